// SPDX-License-Identifier: MIT
// k-means of rows in Euclidean distance (coterie/kmeans.h). With a reference row r, the nearest
// centroid is argmax_c x . m_c + b_c, m_c = (mu_c - r) / 2 and b_c = -(mu_c + r) . m_c / 2
// (stages.h, with half of the identity as covariance, which keeps m_c in the range of fp16).
//
// A pass: table_kernel (means, table; a warp per cluster), nearest_clusters (labels and sort), with
// fill_empty fill_kernel and another sort, sum_cluster_tiles: x is read twice. Rows that are not
// finite are in a cluster of their own, behind the others, until finish_kernel.
// Start: start_rows_kernel; for k-means++ two kernels per centroid: distance_kernel (blocks of 1024
// rows), draw_kernel (a block per problem). Sums have a fixed order; nothing waits for the device.
// Preconditions: up to 128 elements a row and kMaxClusters - 1 clusters; all devices, f32, bf16,
// f16.
#include "coterie/kmeans.h"

#include <string>

#include "coterie/random.h"
#include "cuda/api/entry.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/clustering.h"
#include "cuda/cluster/group.h"
#include "cuda/cluster/means.h"
#include "cuda/cluster/table.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kWide = 1024;      // threads of a block that has a problem alone
constexpr int kPartRows = 1024;  // of a block of distance_kernel
constexpr int kColumns = kMaxHeadDim / 32;

// The arguments of all kernels; P problems of N rows of `width` elements.
template <class T>
struct KMeansArgs {
  Tensor4<const T> x;  // (1, P, N, D)
  int problems, rows, clusters, width;
  std::uint64_t seed;
  ClusterSums sums;  // clusters + 1
  CentroidTable table;
  float *centroids, *reference;  // (P, C, D), (P, D)
  std::int32_t *labels, *counts;
  std::int32_t* start;  // (P, C): rows where centroids start, -1 if no row is finite
  float* far;           // (P, N)
  double* parts;        // (P, parts)
  int num_parts;

  __device__ Rows<const T> rows_of(int p) const { return x.rows(0, p, 0); }
  __device__ float* centroid(int p, int c) const {
    return centroids + (static_cast<std::int64_t>(p) * clusters + c) * width;
  }
  __device__ std::int64_t row(int p, int n) const {
    return static_cast<std::int64_t>(p) * rows + n;
  }
  __device__ const std::int32_t* offsets(int p) const {
    return sums.offsets + static_cast<std::int64_t>(p) * (clusters + 2);
  }
};

// A row in the lanes of a warp: elements lane + 32 i.
struct LaneRow {
  float value[kColumns];

  template <class From>
  __device__ LaneRow(const From* row, int width) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int d = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      value[i] = d < width ? to_float(row[d]) : 0.0f;
    }
  }
  __device__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) all = all && isfinite(value[i]);
    return __all_sync(~0u, all);
  }
  __device__ float distance(const LaneRow& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float difference = value[i] - other.value[i];
      sum = fmaf(difference, difference, sum);
    }
    return warp_sum(sum);
  }
  __device__ void store(float* to, int width) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int d = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (d < width) to[d] = value[i];
    }
  }
};

// Finite rows in random order, repeated if there are less than clusters; a block per problem.
template <class T>
__global__ void __launch_bounds__(kWide)
    start_rows_kernel(const __grid_constant__ KMeansArgs<T> args) {
  const int p = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const RandomStream stream{args.seed, RandomUse::kmeans_start, static_cast<std::uint32_t>(p)};
  std::int32_t* start = args.start + static_cast<std::int64_t>(p) * args.clusters;
  const Rows<const T> rows = args.rows_of(p);
  int found = 0;
  for (int first = 0; first < args.rows && found < args.clusters; first += kWide) {
    int row = -1;
    if (first + thread < args.rows) {
      row = static_cast<int>(random_permutation(stream, static_cast<std::uint32_t>(first + thread),
                                                static_cast<std::uint32_t>(args.rows)));
      for (int d = 0; d < args.width && row >= 0; ++d)
        if (!isfinite(to_float(rows.row(row)[d]))) row = -1;
    }
    const int at = block_exclusive_scan(row >= 0 ? 1 : 0, found);
    if (row >= 0 && at < args.clusters) start[at] = row;
  }
  if (found == 0 && thread == 0) start[0] = -1;
  __syncthreads();
  found = max(found, 1);
  for (int c = found + thread; c < args.clusters; c += kWide) start[c] = start[c % found];
}

// Centroids from their start rows, if they have some; a warp per cluster.
template <class T>
__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ KMeansArgs<T> args) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (at >= static_cast<std::int64_t>(args.problems) * args.clusters) return;
  const int p = static_cast<int>(at / args.clusters), c = static_cast<int>(at % args.clusters);
  float* to = args.centroid(p, c);
  if (args.start) {
    const int row = args.start[at];
    LaneRow start(args.rows > 0 ? args.rows_of(p).row(max(row, 0)) : args.x.data,
                  row >= 0 ? args.width : 0);
    start.store(to, args.width);
  }
  if (c == 0) {
    __syncwarp();
    LaneRow(to, args.width)
        .store(args.reference + static_cast<std::int64_t>(p) * args.width, args.width);
  }
}

// Squared distances to the nearest of centroids 0 .. c - 1, given those to 0 .. c - 2.
template <class T>
__global__ void __launch_bounds__(kThreads)
    distance_kernel(const __grid_constant__ KMeansArgs<T> args, int c) {
  __shared__ double sums[kWarps];
  const int p = static_cast<int>(blockIdx.x) / args.num_parts;
  const int part = static_cast<int>(blockIdx.x) % args.num_parts, warp = threadIdx.x / 32;
  const LaneRow last(args.centroid(p, c - 1), args.width);
  const Rows<const T> rows = args.rows_of(p);
  const int end = min((part + 1) * kPartRows, args.rows);
  double sum = 0.0;
  for (int n = part * kPartRows + warp; n < end; n += kWarps) {
    const LaneRow own(rows.row(n), args.width);
    const float before = c > 1 ? args.far[args.row(p, n)] : INFINITY;
    const float distance = own.finite() ? fminf(before, own.distance(last)) : 0.0f;
    if (threadIdx.x % 32 == 0) args.far[args.row(p, n)] = distance;
    sum += distance;
  }
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (const double each : sums) total += each;
  args.parts[static_cast<std::int64_t>(p) * args.num_parts + part] = total;
}

// Centroid c: a row with a probability in proportion to its distance; a warp per problem.
template <class T>
__global__ void __launch_bounds__(32)
    draw_kernel(const __grid_constant__ KMeansArgs<T> args, int c) {
  const int p = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  const RandomStream stream{args.seed, RandomUse::kmeans_draw, static_cast<std::uint32_t>(p)};
  const double* parts = args.parts + static_cast<std::int64_t>(p) * args.num_parts;
  double total = 0.0;
  for (int part = 0; part < args.num_parts; ++part) total += parts[part];
  if (!(total > 0.0)) return;  // all rows are centroids: the random one stays
  const double drawn = random_unit(stream.at(static_cast<std::uint64_t>(c)).word[0]) * total;
  double before = 0.0;
  int part = 0;
  while (part + 1 < args.num_parts && before + parts[part] <= drawn) before += parts[part++];
  int chosen = -1;
  for (int first = part * kPartRows; first < args.rows; first += 32) {
    const float own = first + lane < args.rows ? args.far[args.row(p, first + lane)] : 0.0f;
    const double sum = before + warp_inclusive_scan(static_cast<double>(own));
    const unsigned some = __ballot_sync(~0u, own > 0.0f);
    const unsigned above = __ballot_sync(~0u, own > 0.0f && sum > drawn);
    if (above) {
      chosen = first + __ffs(static_cast<int>(above)) - 1;
      break;
    }
    if (some) chosen = first + 31 - __clz(static_cast<int>(some));  // if rounding leaves none above
    before = __shfl_sync(~0u, sum, 31);
  }
  if (chosen < 0) return;
  LaneRow(args.rows_of(p).row(chosen), args.width).store(args.centroid(p, c), args.width);
}

// Means of the clusters in `sums`, or `initial` centroids, and their table; a warp per cluster.
template <class T, int kChunks>
__global__ void __launch_bounds__(kThreads)
    table_kernel(const __grid_constant__ KMeansArgs<T> args, bool initial) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (at >= static_cast<std::int64_t>(args.problems) * args.clusters) return;
  const int p = static_cast<int>(at / args.clusters), c = static_cast<int>(at % args.clusters);
  float* stored = args.centroid(p, c);
  float mean[kChunks] = {}, reference[kChunks], weighed[kChunks];
  int size = 0;
  if (!initial) {
    const int begin = args.offsets(p)[c];
    size = args.offsets(p)[c + 1] - begin;
    collect_sums(args.sums, p, c, begin, begin + size, mean);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int d = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    const bool there = d < args.width;
    if (size > 0) mean[i] /= static_cast<float>(size);
    if (size == 0) mean[i] = there ? stored[d] : 0.0f;
    if (size > 0 && there) stored[d] = mean[i];
    reference[i] = there ? args.reference[static_cast<std::int64_t>(p) * args.width + d] : 0.0f;
    weighed[i] = 0.5f * (mean[i] - reference[i]);
  }
  const int copies = c == args.clusters - 1 ? args.table.padded - c : 1;
  write_column<T, kChunks>(args.table, p, c, copies, mean, reference, weighed);
}

// Gives empty clusters the farthest rows, one after the other; `moves`: as their centroids too. A
// block per problem; also writes the counts.
template <class T>
__global__ void __launch_bounds__(kWide)
    fill_kernel(const __grid_constant__ KMeansArgs<T> args, bool moves) {
  __shared__ unsigned long long best[kWide / 32];
  const int p = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  std::int32_t* counts = args.counts + static_cast<std::int64_t>(p) * args.clusters;
  std::int32_t* labels = args.labels + args.row(p, 0);
  float* far = args.far + args.row(p, 0);
  bool empty = false;
  for (int c = thread; c < args.clusters; c += kWide) {
    counts[c] = args.offsets(p)[c + 1] - args.offsets(p)[c];
    empty = empty || counts[c] == 0;
  }
  if (!__syncthreads_or(empty)) return;
  for (int n = warp; n < args.rows; n += kWide / 32) {
    const int label = labels[n];
    float distance = -1.0f;
    if (label < args.clusters)
      distance = LaneRow(args.rows_of(p).row(n), args.width)
                     .distance(LaneRow(args.centroid(p, label), args.width));
    if (lane == 0) far[n] = distance;
  }
  for (int c = 0; c < args.clusters; ++c) {
    __syncthreads();
    if (counts[c] > 0) continue;
    // The largest key has the largest distance, then the lowest row.
    unsigned long long key = 0;
    for (int n = thread; n < args.rows; n += kWide) {
      if (labels[n] >= args.clusters || counts[labels[n]] < 2) continue;
      const auto bits = static_cast<unsigned long long>(__float_as_uint(far[n])) + 1;
      key = max(key, bits << 32 | (~static_cast<unsigned>(n)));
    }
    for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(~0u, key, step));
    if (lane == 0) best[warp] = key;
    __syncthreads();
    for (int w = 0; w < kWide / 32; ++w) key = max(key, best[w]);
    if (key == 0) return;
    const int n = static_cast<int>(~static_cast<unsigned>(key));
    __syncthreads();  // all have read the labels and counts
    if (thread == 0) {
      --counts[labels[n]];
      labels[n] = c;
      counts[c] = 1;
    }
    if (moves && warp == 0)
      LaneRow(args.rows_of(p).row(n), args.width).store(args.centroid(p, c), args.width);
  }
}

// Counts, unless they are known, and -1 as label of rows that are not finite.
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ KMeansArgs<T> args, bool counted) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < static_cast<std::int64_t>(args.problems) * args.rows && args.labels[at] >= args.clusters)
    args.labels[at] = -1;
  if (counted || at >= static_cast<std::int64_t>(args.problems) * args.clusters) return;
  const int p = static_cast<int>(at / args.clusters), c = static_cast<int>(at % args.clusters);
  args.counts[at] = args.offsets(p)[c + 1] - args.offsets(p)[c];
}

unsigned blocks_for(std::int64_t count, int each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

// Memory of a call, and its launches.
struct KMeansPass {
  const KMeansParams& params;
  AttentionCall call;
  ClusterShape shape;  // with the cluster of rows that are not finite
  std::int64_t problems, clusters;
  bool drawn;
  float *reference, *sums_of, *far;
  std::int32_t *order, *offsets, *start;
  double* parts;
  std::int64_t num_parts;
  NearestPlan nearest;
  CentroidTable table;
  ClusterSums sums;

  KMeansPass(const KMeansParams& p, const TensorView& x, std::int64_t num_clusters, Arena& arena)
      : params(p),
        call(call_of(p, x)),
        shape(cluster_shape(call, num_clusters + 1)),
        problems(x.size(1)),
        clusters(num_clusters),
        drawn(p.start == KMeansStart::plus_plus),
        reference(arena.take<float>(problems * x.size(3))),
        sums_of(arena.take<float>(problems * (clusters + 1) * x.size(3))),
        far(arena.take<float>(drawn || p.fill_empty ? problems * x.size(2) : 0)),
        order(arena.take<std::int32_t>(problems * x.size(2))),
        offsets(arena.take<std::int32_t>(problems * (clusters + 2))),
        start(arena.take<std::int32_t>(p.start == KMeansStart::given ? 0 : problems * clusters)),
        num_parts((x.size(2) + kPartRows - 1) / kPartRows),
        nearest(arena, shape, p.iterations + 1),
        table(arena, call, clusters + 1),
        sums(make_cluster_sums(arena, shape, x, order, offsets, sums_of)) {
    parts = arena.take<double>(drawn ? problems * num_parts : 0);
    nearest.own_clusters = false;
    nearest.lost = static_cast<int>(clusters);
  }

  static AttentionCall call_of(const KMeansParams& params, const TensorView& x) {
    AttentionCall call;
    call.op = "kmeans";
    call.inputs.q = x;
    call.inputs.v = x;
    call.inputs.seed = params.seed;
    call.device = x.device;
    call.item_total = call.B = 1;
    call.k = x;
    call.H = call.key_heads = call.value_heads = x.size(1);
    call.N = call.S = x.size(2);
    call.Dk = call.Dv = x.size(3);
    return call;
  }

  ClusterLists lists(const KMeansResult& result) const {
    return {static_cast<std::int32_t*>(result.labels.data), order, offsets};
  }
  // `arena` is a copy: every sort takes the same memory.
  void sort(const KMeansResult& result, Arena arena, cudaStream_t stream) const {
    group_by_label(shape, lists(result), arena, stream);
  }

  template <class T>
  void run(const KMeansResult& result, const Arena& arena, cudaStream_t stream) const {
    KMeansArgs<T> args{};
    args.x = tensor4<const T>(call.inputs.q);
    args.problems = static_cast<int>(problems);
    args.rows = static_cast<int>(call.N);
    args.clusters = static_cast<int>(clusters);
    args.width = static_cast<int>(call.Dk);
    args.seed = params.seed;
    args.sums = sums;
    args.table = table;
    args.centroids = static_cast<float*>(result.centroids.data);
    args.reference = reference;
    args.labels = static_cast<std::int32_t*>(result.labels.data);
    args.counts = static_cast<std::int32_t*>(result.counts.data);
    args.start = params.start == KMeansStart::given ? nullptr : start;
    args.far = far;
    args.parts = parts;
    args.num_parts = static_cast<int>(num_parts);
    const auto one_each = static_cast<unsigned>(problems);
    const unsigned all = blocks_for(problems * clusters, kWarps);
    const auto launch = [&](const char* name, auto* kernel, unsigned blocks, int threads,
                            const auto&... more) {
      launch_kernel(name, {}, kernel, dim3(blocks), threads, 0, stream, args, more...);
    };
    COTERIE_CUDA(cudaMemsetAsync(nearest.zeroed.data, 0,
                                 static_cast<std::size_t>(nearest.zeroed.count) * sizeof(unsigned),
                                 stream));
    if (args.start) launch("kmeans start", start_rows_kernel<T>, one_each, kWide);
    launch("kmeans place", place_kernel<T>, all, kThreads);
    for (int c = 1; drawn && c < args.clusters && args.rows > 0; ++c) {
      launch("kmeans distances", distance_kernel<T>, static_cast<unsigned>(problems * num_parts),
             kThreads, c);
      launch("kmeans draw", draw_kernel<T>, one_each, 32, c);
    }
    for (std::int64_t pass = 0;; ++pass) {
      const bool last = pass == params.iterations;
      dispatch_head_dim(call.op, call.Dk, [&](auto width) {
        launch("kmeans table", table_kernel<T, decltype(width)::value / 32>, all, kThreads,
               pass == 0);
      });
      nearest_clusters(call, nearest, table, pass, lists(result), stream);
      if (params.fill_empty) launch("kmeans fill", fill_kernel<T>, one_each, kWide, last);
      if (last) break;
      if (params.fill_empty) sort(result, arena, stream);
      sum_cluster_tiles(call.op, sums, call.inputs.q, stream);
    }
    launch("kmeans labels", finish_kernel<T>,
           blocks_for(problems * max(call.N, clusters), kThreads), kThreads, params.fill_empty);
  }
};

}  // namespace

std::string refuse_kmeans(const TensorView& x, std::int64_t clusters) {
  for (const std::string& reason :
       {refuse_type(x.dtype), refuse_width(x.size(3)),
        refuse_more_than(kMaxRows, "rows of a problem", x.size(2)),
        refuse_more_than(kMaxClusters - 1, "clusters", clusters),
        refuse_more_than(kMaxLists, "clusters of all problems", x.size(1) * (clusters + 2)),
        refuse_more_than(kMaxLists, "tiles of rows of all problems",
                         x.size(1) * (x.size(2) / 32 + 1))})
    if (!reason.empty()) return reason;
  return "";
}

std::int64_t kmeans_workspace_bytes(const KMeansParams& params, const TensorView& x,
                                    std::int64_t clusters) {
  const DeviceGuard guard("kmeans", x.device);
  Arena arena;
  const KMeansPass pass(params, x, clusters, arena);
  if (params.fill_empty) group_by_label(pass.shape, {}, arena, nullptr);
  return arena.used();
}

void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result,
            const Workspace& workspace) {
  const DeviceGuard guard("kmeans", x.device);
  const std::int64_t clusters = result.centroids.size(1);
  Arena arena("kmeans", workspace, cuda::kmeans_workspace_bytes(params, x, clusters));
  const KMeansPass pass(params, x, clusters, arena);
  dispatch_element("kmeans", x.dtype, [&](auto tag) {
    pass.run<typename decltype(tag)::type>(result, arena, stream_of(workspace));
  });
}

}  // namespace coterie::cuda
