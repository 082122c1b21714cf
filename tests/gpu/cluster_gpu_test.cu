// SPDX-License-Identifier: MIT
// Every stage of clustering on the GPU against the CPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/half.h"
#include "core/items.h"
#include "core/parallel.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "cuda/cluster/clustering.h"
#include "cuda/cluster/group.h"
#include "cuda/cluster/means.h"
#include "cuda/cluster/stages.h"
#include "cuda/launch/launch.h"
#include "ops/call.h"
#include "ops/parts.h"
#include "tests/gpu/cluster_setup.h"

namespace coterie::gpu_test {
namespace {

std::string title(const ClusterSetup& s, Clustering method, const char* what) {
  const char* names[] = {"keys", "hamming-keys", "hamming"};
  return s.c.name + " " + names[static_cast<int>(method)] + ": " + what;
}

double element(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t n,
               std::int64_t d) {
  const std::int64_t at = b * t.stride(0) + h * t.stride(1) + n * t.stride(2) + d * t.stride(3);
  switch (t.dtype) {
    case DType::f32:
      return static_cast<const float*>(t.data)[at];
    case DType::bf16:
      return to_float(static_cast<const Bf16*>(t.data)[at]);
    default:
      return to_float(static_cast<const F16*>(t.data)[at]);
  }
}

std::vector<double> row_of(const TensorView& t, const Span& span, std::int64_t h, std::int64_t i) {
  std::vector<double> row(static_cast<std::size_t>(t.size(3)));
  for (std::size_t d = 0; d < row.size(); ++d)
    row[d] = element(t, span.batch, h, span.begin + i, static_cast<std::int64_t>(d));
  return row;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

template <class T>
bool equal_bytes(const HostTensor& a, const HostTensor& b) {
  return std::memcmp(a.view().data, b.view().data,
                     static_cast<std::size_t>(a.view().count()) * sizeof(T)) == 0;
}

void run_clusters(const ClusterSetup& s, const ClusteringParams& p, Outputs& out,
                  Scratch& scratch) {
  const AttentionCall call = s.call(p, s.device);
  cuda::cluster_queries(p, call, out.labels.view(), out.order.view(), out.offsets.view(),
                        scratch.data, nullptr);
  COTERIE_CUDA(cudaDeviceSynchronize());
}

// order and offsets follow from the labels; padding is -1.
void check_groups(const ClusterSetup& s, Clustering method, Outputs& out) {
  HostTensor order(DType::i32, {s.c.B, s.c.H, s.c.N}), offsets(out.offsets.host());
  HostTensor& labels = out.labels.download();
  std::vector<char> valid(static_cast<std::size_t>(labels.view().count()), 0);
  for (const Span& span : s.spans())
    for (std::int64_t h = 0; h < s.c.H; ++h)
      for (std::int64_t i = 0; i < span.length; ++i)
        valid[static_cast<std::size_t>((span.batch * s.c.H + h) * s.c.N + span.begin + i)] = 1;
  bool in_range = true;
  for (std::size_t i = 0; i < valid.size(); ++i) {
    const int label = labels.data<std::int32_t>()[i];
    in_range = in_range && (valid[i] ? label >= 0 && label < s.c.clusters : label == -1);
  }
  EXPECT_TRUE(in_range) << title(s, method, "labels in range, -1 in padding");
  if (!in_range) return;
  group_by_cluster(labels, s.host.q_sequences, {order, {}, offsets});
  EXPECT_TRUE(equal_bytes<std::int32_t>(order, out.order.download())) << title(s, method, "order");
  EXPECT_TRUE(equal_bytes<std::int32_t>(offsets, out.offsets.download()))
      << title(s, method, "offsets");
}

// Codes against the CPU's; returns the GPU's for the k-means.
HostTensor check_codes(const ClusterSetup& s, const ClusteringParams& p, Scratch& scratch) {
  const AttentionCall call = s.call(p, s.device);
  const std::int64_t items = static_cast<std::int64_t>(s.spans().size());
  Arena arena("test", scratch.workspace(), 0);
  const cuda::HashPlan buffers(arena, p, call);
  cuda::hash_queries(p, call, buffers, {}, nullptr);
  HostTensor codes(DType::u64, {s.c.B, s.c.H, s.c.N}), wanted(DType::u64, {s.c.B, s.c.H, s.c.N});
  COTERIE_CUDA(cudaMemcpy(codes.view().data, buffers.codes,
                          static_cast<std::size_t>(codes.view().count()) * 8,
                          cudaMemcpyDeviceToHost));
  const bool by_keys = p.method == Clustering::hamming_keys;
  HostTensor planes(DType::f32, by_keys ? std::vector<std::int64_t>{items, s.c.Hkv, p.bits, s.c.D}
                                        : std::vector<std::int64_t>{1, 1, p.bits, s.c.D});
  HostTensor thresholds(DType::f32, by_keys ? std::vector<std::int64_t>{items, s.c.H, p.bits}
                                            : std::vector<std::int64_t>{1, 1, p.bits});
  HostTensor device_planes(planes);
  COTERIE_CUDA(cudaMemcpy(device_planes.view().data, buffers.planes,
                          static_cast<std::size_t>(planes.view().count()) * 4,
                          cudaMemcpyDeviceToHost));
  if (by_keys)
    key_difference_planes(s.host, planes, thresholds);
  else
    isotropic_planes(s.host.seed, p.hash_bias, planes, thresholds);
  EXPECT_TRUE(equal_bytes<float>(planes, device_planes)) << title(s, p.method, "planes");
  hash_codes(s.host.q, s.host.q_sequences, planes, thresholds, wanted);
  const std::vector<Span> spans = s.spans();
  std::int64_t different = 0, wrong = 0;
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t h = 0; h < s.c.H; ++h)
      for (std::int64_t i = 0; i < spans[item].length; ++i) {
        if (spans[item].length <= s.c.clusters) continue;  // not hashed
        const std::int64_t at = (spans[item].batch * s.c.H + h) * s.c.N + spans[item].begin + i;
        std::uint64_t bits = codes.data<std::uint64_t>()[at] ^ wanted.data<std::uint64_t>()[at];
        for (; bits; bits &= bits - 1) {
          const std::int64_t r = __builtin_ctzll(bits);
          ++different;
          if (r >= p.bits) {
            ++wrong;
            continue;
          }
          const std::int64_t kv = h / (s.c.H / s.c.Hkv), it = static_cast<std::int64_t>(item);
          const float* plane =
              planes.data<float>() + ((by_keys ? it * s.c.Hkv + kv : 0) * p.bits + r) * s.c.D;
          const double t = thresholds.data<float>()[(by_keys ? it * s.c.H + h : 0) * p.bits + r];
          const std::vector<double> row = row_of(s.host.q, spans[item], h, i);
          double projection = -t, size = 0, length = 0;
          for (std::int64_t d = 0; d < s.c.D; ++d) {
            projection += plane[d] * row[static_cast<std::size_t>(d)];
            size += plane[d] * plane[d];
            length += row[static_cast<std::size_t>(d)] * row[static_cast<std::size_t>(d)];
          }
          wrong += std::abs(projection) > 1e-5 * std::sqrt(size * length) + 1e-6 * std::abs(t);
        }
      }
  EXPECT_EQ(wrong, 0) << title(s, p.method, "codes") << ", wrong bits of different " << different;
  if (different > 0)
    std::printf("  %s: %lld bits differ near zero\n", title(s, p.method, "codes").c_str(),
                static_cast<long long>(different));
  return codes;
}

void check_hamming(const ClusterSetup& s, Clustering method) {
  const ClusteringParams p = s.params(method);
  const std::int64_t items = static_cast<std::int64_t>(s.spans().size());
  Scratch scratch(cuda::cluster_workspace_bytes(p, s.call(p, s.device)));
  HostTensor codes = check_codes(s, p, scratch);
  Outputs out(s.c, items);
  run_clusters(s, p, out, scratch);
  check_groups(s, method, out);
  HostTensor labels(DType::i32, {s.c.B, s.c.H, s.c.N}),
      centroids(DType::u64, {items, s.c.H, s.c.clusters});
  HammingKMeansParams kmeans;
  kmeans.iterations = p.iterations;
  kmeans.bits = p.bits;
  kmeans.seed = s.host.seed;
  hamming_kmeans(kmeans, codes, s.host.q_sequences, labels, centroids);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < labels.view().count(); ++i)
    different += labels.data<std::int32_t>()[i] != out.labels.host().data<std::int32_t>()[i];
  EXPECT_EQ(different, 0) << title(s, method, "labels given the codes");
}

// Checks labels against exact scores with the GPU's centroids and covariance, and checks those two
// separately.
void check_keys(const ClusterSetup& s) {
  ClusteringParams p = s.params(Clustering::keys);
  const std::int64_t items = static_cast<std::int64_t>(s.spans().size()), C = s.c.clusters;
  const std::size_t D = static_cast<std::size_t>(s.c.D);
  const AttentionCall call = s.call(p, s.device);
  Scratch scratch(cuda::cluster_workspace_bytes(p, call));
  Outputs out(s.c, items), before(s.c, items);
  if (p.iterations > 0) {
    ClusteringParams fewer = p;
    --fewer.iterations;
    run_clusters(s, fewer, before, scratch);
    before.labels.download();
  }
  run_clusters(s, p, out, scratch);
  check_groups(s, Clustering::keys, out);
  Arena arena("test", scratch.workspace(), 0);
  const cuda::KeyMetricBuffers metric(arena, call, C);
  const std::size_t P = D <= 64 ? 64 : 128;  // pitch of the covariance
  std::vector<float> covariance(static_cast<std::size_t>(items * s.c.Hkv) * P * P);
  std::vector<float> centroids(static_cast<std::size_t>(items * s.c.H * C) * D);
  COTERIE_CUDA(cudaMemcpy(covariance.data(), metric.covariance, covariance.size() * 4,
                          cudaMemcpyDeviceToHost));
  COTERIE_CUDA(
      cudaMemcpy(centroids.data(), metric.centroids, centroids.size() * 4, cudaMemcpyDeviceToHost));
  const std::vector<Span> spans = s.spans(), key_spans = s.key_spans();
  double covariance_error = 0, mean_error = 0;
  std::int64_t total = 0, near = 0, wrong = 0, cpu_different = 0;
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t h = 0; h < s.c.H; ++h) {
      const Span &span = spans[item], &keys = key_spans[item];
      const std::int64_t kv = h / (s.c.H / s.c.Hkv);
      // Covariance in double.
      const std::int64_t samples = std::min(keys.length, 8 * s.c.D);
      std::vector<std::vector<double>> sampled;
      std::vector<double> mean(D);
      for (std::int64_t t = 0; t < samples; ++t) {
        sampled.push_back(row_of(s.host.k, keys, kv, t * keys.length / samples));
        for (std::size_t d = 0; d < D; ++d)
          mean[d] += sampled.back()[d] / static_cast<double>(samples);
      }
      const float* sigma =
          covariance.data() +
          (item * static_cast<std::size_t>(s.c.Hkv) + static_cast<std::size_t>(kv)) * P * P;
      double error = 0, size = 1e-30;
      for (std::size_t a = 0; a < D; ++a)
        for (std::size_t b = 0; b < D; ++b) {
          double value = 0;
          for (const auto& row : sampled) value += (row[a] - mean[a]) * (row[b] - mean[b]);
          if (samples > 0) value /= static_cast<double>(samples);
          error += (value - sigma[a * P + b]) * (value - sigma[a * P + b]);
          size += value * value;
        }
      if (span.length > C)  // otherwise unused
        covariance_error = std::max(covariance_error, std::sqrt(error / size));
      const std::int32_t* label =
          out.labels.host().data<std::int32_t>() + (span.batch * s.c.H + h) * s.c.N + span.begin;
      if (span.length <= C) {
        for (std::int64_t i = 0; i < span.length; ++i) wrong += label[i] != i;
        continue;
      }
      const std::size_t problem =
          item * static_cast<std::size_t>(s.c.H) + static_cast<std::size_t>(h);
      const float* mu = centroids.data() + problem * static_cast<std::size_t>(C) * D;
      // Centroids are the means of the previous labels' clusters.
      if (p.iterations > 0) {
        const std::int32_t* old = before.labels.host().data<std::int32_t>() +
                                  (span.batch * s.c.H + h) * s.c.N + span.begin;
        std::vector<double> sum(static_cast<std::size_t>(C) * D);
        std::vector<std::int64_t> members(static_cast<std::size_t>(C));
        for (std::int64_t i = 0; i < span.length; ++i) {
          const std::vector<double> row = row_of(s.host.q, span, h, i);
          ++members[static_cast<std::size_t>(old[i])];
          for (std::size_t d = 0; d < D; ++d)
            sum[static_cast<std::size_t>(old[i]) * D + d] += row[d];
        }
        for (std::size_t c = 0; c < static_cast<std::size_t>(C) && p.iterations == 1; ++c)
          for (std::size_t d = 0; d < D && members[c] > 0; ++d)
            mean_error = std::max(
                mean_error,
                std::abs(sum[c * D + d] / static_cast<double>(members[c]) - mu[c * D + d]));
      }
      // Scores in double; m is relative to a fixed query, as in the kernels.
      const RandomStream stream{s.host.seed, RandomUse::initial_centroid,
                                static_cast<std::uint32_t>(problem)};
      const std::vector<double> reference =
          row_of(s.host.q, span, h,
                 random_permutation(stream, 0, static_cast<std::uint32_t>(span.length)));
      std::vector<std::vector<double>> m(static_cast<std::size_t>(C)),
          mus(static_cast<std::size_t>(C));
      std::vector<double> bias(static_cast<std::size_t>(C)), lengths(static_cast<std::size_t>(C));
      for (std::size_t c = 0; c < static_cast<std::size_t>(C); ++c) {
        m[c].assign(D, 0);
        mus[c].assign(mu + c * D, mu + (c + 1) * D);
        for (std::size_t a = 0; a < D; ++a)
          for (std::size_t b = 0; b < D; ++b)
            m[c][a] += static_cast<double>(sigma[a * P + b]) * (mus[c][b] - reference[b]);
        for (std::size_t d = 0; d < D; ++d) bias[c] -= 0.5 * (mus[c][d] + reference[d]) * m[c][d];
        lengths[c] = std::sqrt(dot(m[c], m[c]));
      }
      const double digits = s.c.dtype == DType::f32    ? 1e-5
                            : s.c.dtype == DType::bf16 ? 1.0 / 256
                                                       : 1.0 / 2048;
      const std::int64_t step = span.length > 20000 ? 37 : 1;
      for (std::int64_t i = 0; i < span.length; i += step) {
        const std::vector<double> row = row_of(s.host.q, span, h, i);
        std::size_t best = 0;
        std::vector<double> score(static_cast<std::size_t>(C));
        double bound = 0;
        for (std::size_t c = 0; c < static_cast<std::size_t>(C); ++c) {
          score[c] = dot(row, m[c]) + bias[c];
          bound = std::max(bound, std::abs(bias[c]) + std::sqrt(dot(row, row)) * lengths[c]);
          if (score[c] > score[best]) best = c;
        }
        ++total;
        const std::size_t got = static_cast<std::size_t>(label[i]);
        if (got == best) continue;
        ++near;
        double room = 3e-5 * bound;  // fixed-point keys and fp32 sums
        for (std::size_t c : {got, best}) {
          double distance = 0;
          for (std::size_t d = 0; d < D; ++d)
            distance += (row[d] - mus[c][d]) * (row[d] - mus[c][d]);
          room += digits * std::sqrt(distance) * lengths[c];
        }
        wrong += score[best] - score[got] > room;
      }
    }
  EXPECT_LT(covariance_error, s.c.dtype == DType::f32 ? 4e-6 : 2e-5)
      << title(s, Clustering::keys, "covariance");
  EXPECT_LT(mean_error, 2e-5) << title(s, Clustering::keys, "centroids");
  EXPECT_EQ(wrong, 0) << title(s, Clustering::keys, "labels");
  HostTensor cpu(DType::i32, {s.c.B, s.c.H, s.c.N});
  HostTensor memory(DType::u8, {cluster_queries_workspace_bytes(p, s.host)});
  cluster_queries(p, s.host, cpu, {memory.view().data, memory.view().count()});
  for (std::int64_t i = 0; i < cpu.view().count(); ++i)
    cpu_different += cpu.data<std::int32_t>()[i] != out.labels.host().data<std::int32_t>()[i];
  std::printf("  %s: %lld of %lld within rounding, %lld differ from the CPU's (of %lld)\n",
              title(s, Clustering::keys, "labels").c_str(), static_cast<long long>(near),
              static_cast<long long>(total), static_cast<long long>(cpu_different),
              static_cast<long long>(cpu.view().count()));
}

// Means and sums by the labels of the last clustering, and the sort alone.
void check_means(const ClusterSetup& s) {
  const ClusteringParams p = s.params(Clustering::keys);
  const AttentionCall call = s.call(p, s.device);
  const std::int64_t items = static_cast<std::int64_t>(s.spans().size());
  const std::size_t D = static_cast<std::size_t>(s.c.D), C = static_cast<std::size_t>(s.c.clusters);
  Scratch scratch(cuda::cluster_workspace_bytes(p, call));
  Outputs out(s.c, items);
  run_clusters(s, p, out, scratch);
  HostTensor& labels = out.labels.download();
  TwinTensor means(DType::f32, {items, s.c.H, s.c.clusters, s.c.D}),
      sums(DType::f32, {items, s.c.H, s.c.clusters, s.c.D});
  Arena counter;
  cuda::centroid_means(call, {}, {}, {}, counter, nullptr);
  const std::int64_t one = counter.used();
  cuda::cluster_sums(call, call.inputs.q, {}, {}, {}, counter, nullptr);
  Scratch more(counter.used());
  Arena arena("test", more.workspace(), one);
  cuda::centroid_means(call, out.order.view(), out.offsets.view(), means.view(), arena, nullptr);
  cuda::cluster_sums(call, call.inputs.q, out.order.view(), out.offsets.view(), sums.view(), arena,
                     nullptr);
  COTERIE_CUDA(cudaDeviceSynchronize());
  means.download();
  sums.download();
  double worst = 0;
  const std::vector<Span> spans = s.spans();
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (std::int64_t h = 0; h < s.c.H; ++h) {
      std::vector<double> sum(C * D), size(C * D);
      std::vector<double> members(C);
      const std::int32_t* label =
          labels.data<std::int32_t>() + (spans[item].batch * s.c.H + h) * s.c.N + spans[item].begin;
      for (std::int64_t i = 0; i < spans[item].length; ++i) {
        const std::vector<double> row = row_of(s.host.q, spans[item], h, i);
        members[static_cast<std::size_t>(label[i])] += 1;
        for (std::size_t d = 0; d < D; ++d) {
          sum[static_cast<std::size_t>(label[i]) * D + d] += row[d];
          size[static_cast<std::size_t>(label[i]) * D + d] += std::abs(row[d]);
        }
      }
      const std::size_t at =
          (item * static_cast<std::size_t>(s.c.H) + static_cast<std::size_t>(h)) * C * D;
      for (std::size_t e = 0; e < C * D; ++e) {
        const double n = std::max(1.0, members[e / D]);
        worst = std::max(worst,
                         std::abs(sums.host().data<float>()[at + e] - sum[e]) / (size[e] + 1e-30));
        worst = std::max(worst, std::abs(means.host().data<float>()[at + e] - sum[e] / n) * n /
                                    (size[e] + 1e-30));
      }
    }
  EXPECT_LT(worst, 1e-5) << title(s, Clustering::keys, "sums and means");
  TwinTensor order(DType::i32, {s.c.B, s.c.H, s.c.N}),
      offsets(DType::i32, {items, s.c.H, s.c.clusters + 1});
  const cuda::ClusterShape shape = cuda::cluster_shape(call, s.c.clusters);
  const cuda::ClusterLists run{static_cast<std::int32_t*>(out.labels.view().data),
                               static_cast<std::int32_t*>(order.view().data),
                               static_cast<std::int32_t*>(offsets.view().data)};
  Arena group_count;
  cuda::group_by_label(shape, run, group_count, nullptr);
  Scratch group_memory(group_count.used());
  Arena group_arena("test", group_memory.workspace(), 0);
  cuda::group_by_label(shape, run, group_arena, nullptr);
  EXPECT_TRUE(equal_bytes<std::int32_t>(order.download(), out.order.download()) &&
              equal_bytes<std::int32_t>(offsets.download(), out.offsets.download()))
      << title(s, Clustering::keys, "the sort alone");
}

// Repeated runs and a captured graph give the same bits.
void check_repeats(const ClusterSetup& s, Clustering method, int repeats) {
  const ClusteringParams p = s.params(method);
  const AttentionCall call = s.call(p, s.device);
  const std::int64_t items = static_cast<std::int64_t>(s.spans().size());
  Scratch scratch(cuda::cluster_workspace_bytes(p, call));
  Outputs first(s.c, items), again(s.c, items);
  run_clusters(s, p, first, scratch);
  first.labels.download();
  first.order.download();
  first.offsets.download();
  const auto same = [&] {
    return equal_bytes<std::int32_t>(first.labels.host(), again.labels.download()) &&
           equal_bytes<std::int32_t>(first.order.host(), again.order.download()) &&
           equal_bytes<std::int32_t>(first.offsets.host(), again.offsets.download());
  };
  int different = 0;
  for (int i = 0; i < repeats; ++i) {
    again.labels.poison();
    again.order.poison();
    again.offsets.poison();
    run_clusters(s, p, again, scratch);
    different += !same();
  }
  EXPECT_EQ(different, 0) << title(s, method, "repeats");
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  COTERIE_CUDA(cudaStreamCreate(&stream));
  COTERIE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  cuda::cluster_queries(p, call, again.labels.view(), again.order.view(), again.offsets.view(),
                        scratch.data, stream);
  COTERIE_CUDA(cudaStreamEndCapture(stream, &graph));
  COTERIE_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) {
    again.labels.poison();
    COTERIE_CUDA(cudaGraphLaunch(exec, stream));
    COTERIE_CUDA(cudaStreamSynchronize(stream));
    EXPECT_TRUE(same()) << title(s, method, "graph replay");
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

struct Cases {
  std::vector<Case> all;

  template <class Change>
  void add(const char* name, const Change& change) {
    Case c;
    c.name = name;
    change(c);
    all.push_back(c);
  }
};

std::vector<Case> cluster_cases() {
  Cases cases;
  cases.add("one_row", [](Case& c) { c.N = 1; });
  cases.add("31_rows_1_cluster", [](Case& c) { c.N = 31, c.clusters = 1; });
  cases.add("129_rows", [](Case&) {});
  cases.add("more_clusters_than_rows", [](Case& c) { c.N = 31, c.clusters = 100; });
  cases.add("as_many_clusters_as_rows", [](Case& c) { c.N = 64, c.clusters = 64; });
  cases.add("padded_empty_item_other_keys", [](Case& c) {
    c.B = 4, c.N = 300, c.S = 170, c.q_lengths = {300, 0, 17, 131}, c.k_lengths = {170, 5, 0, 100},
    c.clusters = 20;
  });
  cases.add("no_keys", [](Case& c) { c.N = 100, c.S = 0; });
  cases.add("packed_groups_of_2", [](Case& c) {
    c.H = 4, c.N = 700, c.S = 500, c.q_seqlens = {0, 250, 250, 259, 690},
    c.k_seqlens = {0, 200, 230, 260, 500}, c.clusters = 24;
  });
  cases.add("fp32_width_40_rows_first", [](Case& c) {
    c.dtype = DType::f32, c.D = 40, c.N = c.S = 333, c.rows_first = true, c.Hkv = 1;
  });
  cases.add("fp16_width_7", [](Case& c) { c.dtype = DType::f16, c.D = 7, c.N = c.S = 333; });
  cases.add("bf16_width_1", [](Case& c) { c.D = 1, c.N = c.S = 200; });
  cases.add("bf16_width_96", [](Case& c) { c.D = 96, c.N = c.S = 500, c.clusters = 33; });
  cases.add("fp16_width_128", [](Case& c) {
    c.dtype = DType::f16, c.D = 128, c.N = c.S = 500, c.clusters = 33, c.iterations = 2;
  });
  cases.add("fp32_width_128",
            [](Case& c) { c.dtype = DType::f32, c.D = 128, c.N = c.S = 500, c.clusters = 33; });
  cases.add("equal_keys_and_queries",
            [](Case& c) { c.modes = 1, c.noise = 0, c.N = c.S = 200, c.D = 32; });
  cases.add("1000_rows_100_clusters", [](Case& c) { c.N = c.S = 1000, c.clusters = 100; });
  cases.add("many_short_problems", [](Case& c) {
    c.B = 40, c.H = 8, c.Hkv = 2, c.N = c.S = 400, c.clusters = 50, c.dtype = DType::f16;
  });
  cases.add("5000_rows_1500_clusters", [](Case& c) { c.N = c.S = 5000, c.clusters = 1500; });
  cases.add("5000_rows_2100_clusters_fp32",
            [](Case& c) { c.N = c.S = 5000, c.clusters = 2100, c.dtype = DType::f32; });
  cases.add("9000_rows_4500_clusters", [](Case& c) {
    c.H = c.Hkv = 1, c.N = c.S = 9000, c.clusters = 4500, c.iterations = 2;
  });
  cases.add("65536_rows_256_clusters", [](Case& c) { c.N = c.S = 65536, c.clusters = 256; });
  cases.add("65536_rows_fp32", [](Case& c) {
    c.H = c.Hkv = 1, c.N = c.S = 65536, c.clusters = 256, c.dtype = DType::f32;
  });
  cases.add("65536_rows_fp16_far_from_zero", [](Case& c) {
    c.H = c.Hkv = 1, c.N = c.S = 65536, c.clusters = 256, c.dtype = DType::f16, c.offset = 8;
  });
  cases.add("65536_rows_far_from_zero",
            [](Case& c) { c.H = c.Hkv = 1, c.N = c.S = 65536, c.clusters = 256, c.offset = 8; });
  cases.add("70000_rows_a_block_each", [](Case& c) {
    c.H = 67, c.Hkv = 1, c.N = 70000, c.S = 1000, c.D = 8, c.clusters = 40, c.iterations = 2;
  });
  return cases.all;
}

class ClusterGpuTest : public ::testing::TestWithParam<Case> {};

TEST_P(ClusterGpuTest, AgreesWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const ClusterSetup s(GetParam());
  check_hamming(s, Clustering::hamming);
  check_hamming(s, Clustering::hamming_keys);
  check_keys(s);
  check_means(s);
}

TEST_P(ClusterGpuTest, RepeatsItsBits) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const ClusterSetup s(GetParam());
  for (Clustering method : {Clustering::keys, Clustering::hamming_keys, Clustering::hamming})
    check_repeats(s, method, 20);
}

INSTANTIATE_TEST_SUITE_P(Cases, ClusterGpuTest, ::testing::ValuesIn(cluster_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace coterie::gpu_test
