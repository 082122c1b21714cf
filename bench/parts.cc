// SPDX-License-Identifier: MIT
#include "bench/parts.h"

#include "ops/parts.h"

namespace coterie::bench {
namespace {

using Work = std::function<void()>;

const ClusteringParams* clustering_of(const Mechanism& mechanism) {
  if (const auto* clustered = std::get_if<ClusteredParams>(&mechanism)) {
    return &clustered->clustering;
  }
  const auto* improved = std::get_if<ImprovedClusteredParams>(&mechanism);
  return improved ? &improved->clustering : nullptr;
}

// Planes and codes of the Hamming clusterings; the public operations run only on the CPU.
Work hash_work(const HeadRun& group) {
  const ClusteringParams* clustering = clustering_of(group.mechanism);
  const TensorView& q = group.inputs.q;
  if (!clustering || clustering->method == Clustering::keys || q.device != Device::cpu) return {};
  struct Codes {
    HostTensor planes, thresholds, codes;
  };
  const bool of_keys = clustering->method == Clustering::hamming_keys;
  const std::int64_t items = of_keys ? q.size(0) : 1, bits = clustering->bits;
  const std::int64_t kv_heads = of_keys ? group.inputs.k.size(1) : 1;
  const std::int64_t heads = of_keys ? q.size(1) : 1;
  const auto codes =
      std::make_shared<Codes>(Codes{HostTensor(DType::f32, {items, kv_heads, bits, q.size(3)}),
                                    HostTensor(DType::f32, {items, heads, bits}),
                                    HostTensor(DType::u64, {q.size(0), q.size(1), q.size(2)})});
  return [&group, codes, of_keys, bias = clustering->hash_bias] {
    if (of_keys) {
      key_difference_planes(group.inputs, codes->planes, codes->thresholds);
    } else {
      isotropic_planes(group.inputs.seed, bias, codes->planes, codes->thresholds);
    }
    hash_codes(group.inputs.q, {}, codes->planes, codes->thresholds, codes->codes);
  };
}

// The selection of plain clustered attention is the clustering and the sort, on every device.
Work clustering_work(const HeadRun& group) {
  const ClusteringParams* clustering = clustering_of(group.mechanism);
  if (!clustering || group.inputs.causal) return {};
  const auto alone = std::make_shared<HeadRun>();
  alone->mechanism = ClusteredParams{*clustering};
  alone->inputs = group.inputs;
  const SavedLayout layout = attention_saved(alone->mechanism, alone->inputs);
  const Device device = group.inputs.q.device;
  for (std::size_t i = 0; i < layout.selection_count; ++i) {
    alone->result.saved.push_back(alone->own({layout.tensors[i], device}));
  }
  const std::int64_t bytes = attention_workspace_bytes(alone->mechanism, alone->inputs);
  alone->workspace = {alone->own({{"", DType::u8, {bytes}}, device}).data, bytes, nullptr};
  return [alone] {
    attention_select(alone->mechanism, alone->inputs, alone->result.saved, alone->workspace);
  };
}

// Nearest centroids of queries and keys, without normalisation and sort; CPU only.
Work routing_work(const HeadRun& group) {
  const Mechanism resolved = resolve(group.mechanism, group.inputs.causal);
  const auto* routing = std::get_if<RoutingParams>(&resolved);
  const bool nearest = routing && routing->membership == Membership::nearest;
  if (!nearest || group.inputs.q.device != Device::cpu) return {};
  TensorView centroids = group.inputs.centroids;  // (Hkv, C, D) as (1, Hkv, C, D)
  centroids = TensorView::contiguous(centroids.data, centroids.dtype,
                                     {1, centroids.size(0), centroids.size(1), centroids.size(2)});
  std::vector<std::pair<TensorView, std::shared_ptr<HostTensor>>> labelled;
  for (const TensorView& x : {group.inputs.q, group.inputs.k}) {
    if (!x.present()) continue;
    labelled.emplace_back(
        x, std::make_shared<HostTensor>(
               DType::i32, std::vector<std::int64_t>{x.size(0), x.size(1), x.size(2)}));
  }
  return [centroids, labelled] {
    for (const auto& [x, labels] : labelled) nearest_centroid(x, {}, centroids, {}, *labels);
  };
}

// The combined work of all groups that have any.
Work together(AttentionRun& run, Work (*make)(const HeadRun&)) {
  std::vector<Work> works;
  for (const HeadRun& group : run.groups()) {
    if (Work work = make(group)) works.push_back(std::move(work));
  }
  if (works.empty()) return {};
  return [works] {
    for (const Work& work : works) work();
  };
}

Work either(const HeadRun& group) {
  Work work = clustering_work(group);
  return work ? work : routing_work(group);
}

}  // namespace

std::vector<Part> parts_of(AttentionRun& run) {
  std::vector<Part> parts;
  std::size_t selected = 0;
  for (const HeadRun& group : run.groups()) selected += group.selection_count;
  if (selected == 0) return parts;
  if (Work hash = together(run, hash_work)) parts.push_back({&Measurement::hash, hash});
  if (Work cluster = together(run, either)) parts.push_back({&Measurement::cluster, cluster});
  parts.push_back({&Measurement::select, [&run] { run.select(); }});
  parts.push_back({&Measurement::attend, [&run] { run.attend(); }});
  return parts;
}

}  // namespace coterie::bench
