// SPDX-License-Identifier: MIT
// Clustered and improved clustered attention: the order of their stages. Host code only;
// clustered.h says which file contains which stage.
#include <algorithm>
#include <cstddef>
#include <optional>

#include "cuda/api/entry.h"
#include "cuda/api/padding.h"
#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/cluster/means.h"
#include "cuda/clustered/clustered.h"
#include "cuda/clustered/near.cuh"
#include "cuda/clustered/near.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"

namespace coterie::cuda {

ClusteredTensors clustered_tensors(const TensorView* saved, std::size_t count, bool top,
                                   bool causal, bool near) {
  ClusteredTensors tensors;
  std::size_t next = 0;
  const auto take = [&](TensorView& to, bool kept) {
    if (kept && next < count) to = saved[next++];
  };
  take(tensors.labels, true);
  take(tensors.order, true);
  take(tensors.offsets, true);
  take(tensors.top_keys, top);
  take(tensors.centroids, !causal);
  if (near) {
    take(tensors.lse, true);
    take(tensors.centroid_lse, true);
    take(tensors.cancels, true);
    return tensors;
  }
  take(tensors.centroid_lse, !causal);
  take(tensors.mass, top && !causal);
  take(tensors.out, !causal);
  take(tensors.lse, top);
  return tensors;
}

namespace {

// Runs stages one after the other, each in all memory after the shared part; `most` is their need.
struct Stages {
  Arena shared;
  cudaStream_t stream = nullptr;
  std::int64_t most = 0;

  template <class Stage>
  void operator()(const Stage& stage) {
    Arena arena = shared;
    stage(arena);
    most = std::max(most, arena.used());
  }
};

template <class T>
BackwardScratch<T> take_scratch(Arena& arena, const BackwardShape& shape) {
  // The causal form has neither the tail nor its corrections.
  const std::int64_t tail = shape.causal ? 0 : 1;
  const std::int64_t rows = tail * shape.items * shape.H * shape.clusters;
  const std::int64_t units = shape.units.places(), pitch = shape.pitch;
  const std::int64_t slices = tail * shape.chunks.slots * shape.H * shape.clusters;
  BackwardScratch<T> scratch;
  scratch.unit_dout = arena.take<float>(tail * units * pitch);
  scratch.unit_dmass = arena.take<float>(tail * units);
  scratch.mean = arena.take<T>(rows * pitch);
  scratch.dout = arena.take<T>(rows * pitch);
  scratch.row_lse = arena.take<float>(rows);
  scratch.row_delta = arena.take<float>(rows);
  scratch.mean_slices = arena.take<float>(slices * pitch);
  scratch.top_dmean = arena.take<float>(shape.topk > 0 || shape.subtracts ? rows * pitch : 0);
  scratch.slots = arena.take<T>(units * shape.topk * 2 * pitch);
  const std::int64_t queries =
      shape.near > 0 ? static_cast<std::int64_t>(shape.B) * shape.H * shape.N : 0;
  const std::int64_t key_heads = shape.H / shape.group;
  const std::int64_t words = shape.B * key_heads * shape.S * shape.top_words;
  scratch.top_bits = {arena.take<std::uint32_t>(words), static_cast<int>(key_heads), shape.S,
                      shape.top_words};
  if (words == 0) scratch.top_bits.words = nullptr;
  scratch.near_top = arena.take<NearTopKeys>(shape.subtracts && shape.topk > 0 ? queries : 0);
  scratch.delta = arena.take<float>(queries);
  scratch.near_dmean = arena.take<T>(shape.subtracts ? queries * pitch : 0);
  scratch.unit_dmean = arena.take<float>(shape.subtracts ? units * pitch : 0);
  return scratch;
}

// Both mechanisms; the plain one has no top keys.
template <class Params>
class ClusteredPass : public Pass {
 public:
  ClusteredPass(const Params& params, const AttentionCall& call) : Pass(call), params_(params) {}

  std::string refusal() const override {
    // Clusters, their tiles of 64 rows, and hash planes of a key head, in all heads.
    const std::int64_t clusters = params_.clustering.clusters, items = call_.num_items();
    const std::int64_t lists = items * (clusters + 1) + call_.B * (call_.N / 64);
    const std::int64_t planes = items * params_.clustering.bits;
    std::int64_t topk = 0;
    if constexpr (kImproved) topk = params_.topk;
    if (params_.near % 16 != 0)
      return "the CUDA kernels need near to be a multiple of 16; got near=" +
             std::to_string(params_.near);
    if (params_.near > 0 && call_.N != call_.S)
      return "near needs as many keys as queries; got " + std::to_string(call_.S) + " and " +
             std::to_string(call_.N);
    for (const std::string& reason :
         {refuse_more_than(kMaxTopKeys, "top keys", topk),
          refuse_more_than(kMaxClusters, "clusters", clusters), refuse_batches(call_.B),
          refuse_lists(std::max(lists, planes) * call_.H)})
      if (!reason.empty()) return reason;
    return "";
  }

  std::int64_t workspace_bytes() const override {
    Stages select, attend, forward, backward;
    select_stages(select, {});
    attend_stages(attend, {});
    if (!call_.causal) forward_stages(forward, {});
    backward_stages(backward, {}, {}, {});
    return std::max({select.most, attend.most, forward.most, backward.most});
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    select_stages(stages, saved);
  }
  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    attend_stages(stages, result);
  }
  void forward(const AttentionResult& result, const Workspace& workspace) const override {
    if (call_.causal) return Pass::forward(result, workspace);  // the means are not kept
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    forward_stages(stages, result);
  }
  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Stages stages{take_workspace(workspace), stream_of(workspace)};
    backward_stages(stages, result, grad_out, gradients);
  }

 private:
  static constexpr bool kImproved = std::is_same_v<Params, ImprovedClusteredParams>;

  // Made on first use: a refused call has no plan.
  const ClusteredPlan& plan() const {
    if (plan_) return *plan_;
    if constexpr (kImproved)
      plan_.emplace(
          clustered_plan(call_, params_.clustering, params_.topk, params_.mass_grad, params_.near));
    else
      plan_.emplace(clustered_plan(call_, params_.clustering, 0, true, params_.near));
    return *plan_;
  }

  ClusteredTensors named(const std::vector<TensorView>& saved) const {
    bool causal = false;
    if constexpr (kImproved) causal = params_.causal == Causality::leaking;
    return clustered_tensors(saved.data(), saved.size(), kImproved, causal, params_.near > 0);
  }

  void select_stages(Stages& stages, const std::vector<TensorView>& saved) const {
    ClusteredForward pass = begin(stages, saved);
    if (!kImproved) return cluster(stages, pass, {});
    const std::int64_t items = call_.num_items(), clusters = plan().clusters;
    pass.tensors.centroids =
        TensorView::contiguous(stages.shared.template take<float>(plan().num_means() * call_.Dk),
                               DType::f32, {items, call_.H, clusters, call_.Dk}, Device::cuda);
    cluster_means(stages, pass, select_top_keys);
  }

  void attend_stages(Stages& stages, const AttentionResult& result) const {
    ClusteredForward pass = begin(stages, result.saved);
    pass.out = result.out;
    take_mean_rows(stages, pass);
    if (!call_.causal)
      stages([&](Arena& arena) {
        means(pass, arena);
        if (plan().near == 0 || plan().subtracts) attend_means(pass, arena);
      });
    outputs(stages, pass);
  }

  // One computation of the means serves selection and outputs.
  void forward_stages(Stages& stages, const AttentionResult& result) const {
    ClusteredForward pass = begin(stages, result.saved);
    pass.out = result.out;
    pass.selection_attends = plan().selection_attends;
    take_mean_rows(stages, pass);
    cluster_means(stages, pass, [](const ClusteredForward& own, Arena& arena) {
      if (kImproved) select_top_keys(own, arena);
    });
    if (!pass.selection_attends && (plan().near == 0 || plan().subtracts))
      stages([&](Arena& arena) { attend_means(pass, arena); });
    outputs(stages, pass);
  }

  // The stages of backward.h.
  void backward_stages(Stages& stages, const AttentionResult& result, const TensorView& grad_out,
                       const AttentionGradients& gradients) const {
    stages([&](Arena& arena) {
      dispatch_element(call_.op, call_.inputs.q.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        BackwardArgs<T> args{plan().backward};
        args.scratch = take_scratch<T>(arena, args.shape);
        FarMembers far{};
        if (plan().near > 0) far = {take_runs(arena), take_runs(arena)};
        if (arena.counting()) return;
        const bool nothing = call_.causal && plan().topk == 0;  // to attend to
        clear(gradients.dq, call_.inputs.q_sequences, nothing, stages.stream);
        clear(gradients.dk, call_.inputs.k_sequences, call_.causal, stages.stream);
        clear(gradients.dv, call_.inputs.k_sequences, call_.causal, stages.stream);
        if (plan().num_means() == 0 || nothing) return;
        name_tensors(args, named(result.saved), grad_out, gradients);
        if (plan().near > 0) args.out = tensor4<const T>(result.out);
        differentiate(args, plan().queries(named(result.saved)), far, stages.stream);
      });
    });
  }
  // Far keys, of heads that add (near.h).
  MemberRuns take_runs(Arena& arena) const {
    const std::int64_t queries = call_.B * call_.H * call_.N;
    return {arena.take<float2>(queries), arena.take<float>(queries * plan().backward.pitch)};
  }
  template <class T>
  void differentiate(const BackwardArgs<T>& args, const CentroidQueries& queries,
                     const FarMembers& far, cudaStream_t stream) const {
    const bool means = args.shape.tail(), broadcast = !call_.causal && args.dq.data;
    if (plan().near > 0) near_query_gradients(args, queries, plan().sm90a, stream);
    member_gradients(args, stream);
    if constexpr (sizeof(T) == 2)
      if (means && plan().sm90a) centroid_gradients_sm90a(args, stream);
    if (means && !plan().sm90a) centroid_gradients(args, stream);
    if (plan().near > 0) {
      near_key_gradients(args, queries, plan().sm90a, stream);
      far_key_gradients(args, queries, far, stream);
    }
    if (broadcast) broadcast_gradients(args, stream);
    if (plan().topk > 0 && (args.dk.data || args.dv.data))
      sum_top_key_gradients(args, broadcast, stream);
  }
  template <class T>
  void name_tensors(BackwardArgs<T>& args, const ClusteredTensors& t, const TensorView& grad_out,
                    const AttentionGradients& gradients) const {
    const auto gradient = [](const TensorView& view) {
      return view.present() ? tensor4<T>(view) : Tensor4<T>{};
    };
    args.lists = {ints(t.order),       ints(t.labels),         ints(t.offsets), ints(t.top_keys),
                  floats(t.centroids), floats(t.centroid_lse), floats(t.mass),  floats(t.out),
                  floats(t.lse),       ints(t.cancels)};
    args.q = tensor4<const T>(call_.inputs.q);
    args.k = tensor4<const T>(call_.k);
    args.v = tensor4<const T>(call_.inputs.v);
    args.g = tensor4<const T>(grad_out);
    args.dq = gradient(gradients.dq);
    args.dk = gradient(gradients.dk);
    args.dv = gradient(gradients.dv);
  }
  // Zeroes all of a gradient, or only the rows that belong to no item.
  void clear(const TensorView& view, const Sequences& sequences, bool all,
             cudaStream_t stream) const {
    if (!all || view.count() == 0) return zero_padding(view, sequences, call_.num_items(), stream);
    std::int64_t last = 0;
    for (int dim = 0; dim < view.rank; ++dim) last += (view.size(dim) - 1) * view.stride(dim);
    if (last + 1 != view.count()) return fill(view, 0.0, {nullptr, 0, stream});
    const auto bytes = static_cast<std::size_t>(view.count() * dtype_bytes(view.dtype));
    COTERIE_CUDA(cudaMemsetAsync(view.data, 0, bytes, stream));
  }

  ClusteredForward begin(Stages& stages, const std::vector<TensorView>& saved) const {
    ClusteredForward pass{plan(), named(saved)};
    pass.counters = stages.shared.template take<unsigned>(plan().counters());
    pass.stream = stages.stream;
    return pass;
  }

  void cluster(Stages& stages, const ClusteredForward& pass, const ClusterExtra& extra) const {
    const ClusteredTensors& tensors = pass.tensors;
    stages([&](Arena& arena) {
      void* memory = arena.take<std::byte>(plan().clustering_bytes);
      if (!arena.counting())
        cluster_queries(params_.clustering, call_, tensors.labels, tensors.order, tensors.offsets,
                        memory, pass.stream, extra);
    });
  }
  // Clusters, their means, and the next stage, whose memory is separate from that of the means.
  template <class Next>
  void cluster_means(Stages& stages, const ClusteredForward& pass, const Next& next) const {
    ClusterExtra extra;
    if (plan().clusters_with_means) extra = {floats(pass.tensors.centroids), zeroed(pass)};
    cluster(stages, pass, extra);
    stages([&](Arena& arena) {
      if (!plan().clusters_with_means || arena.counting()) means(pass, arena);
      next(pass, arena);
    });
  }
  void means(const ClusteredForward& pass, Arena& arena) const {
    const ClusteredTensors& tensors = pass.tensors;
    centroid_means(call_, tensors.order, tensors.offsets, tensors.centroids, arena, pass.stream,
                   zeroed(pass));
  }
  static ZeroedWords zeroed(const ClusteredForward& pass) {
    return {pass.counters, pass.plan.counters()};
  }
  void outputs(Stages& stages, const ClusteredForward& pass) const {
    if (plan().near > 0) return stages([&](Arena& arena) { attend_near(pass, arena); });
    if (stages.shared.counting()) return;
    kImproved ? attend_top_keys(pass) : broadcast_means(pass);
  }
  // With near keys the results of attend_means that are not saved.
  void take_mean_rows(Stages& stages, ClusteredForward& pass) const {
    if (!plan().subtracts) return;
    const std::int64_t items = call_.num_items(), clusters = plan().clusters;
    const auto take = [&](std::int64_t width) {
      return TensorView::contiguous(stages.shared.template take<float>(plan().num_means() * width),
                                    DType::f32, {items, call_.H, clusters, width}, Device::cuda);
    };
    pass.tensors.out = take(call_.Dv);
  }

  const Params& params_;
  mutable std::optional<ClusteredPlan> plan_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const ClusteredParams& params, const AttentionCall& call) {
  return std::make_unique<ClusteredPass<ClusteredParams>>(params, call);
}

std::unique_ptr<Pass> make_pass(const ImprovedClusteredParams& params, const AttentionCall& call) {
  return std::make_unique<ClusteredPass<ImprovedClusteredParams>>(params, call);
}

}  // namespace coterie::cuda
