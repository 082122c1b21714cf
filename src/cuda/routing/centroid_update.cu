// SPDX-License-Identifier: MIT
// The centroids of routing on the GPU, with y normalised rows and c their clusters:
//   y              (x - mean) / sqrt(variance + 1e-6) (normalise_row)
//   statistics     += members of a cluster, sum of their y (add_statistics, add_parts)
//   counts, sums   <- decay * old + (1 - decay) * statistics (move_counts, move_sums); a centroid
//                  is sums over smoothed counts
//   loss           mean of (y - mu_c)^2 (add_differences, take_mean), and its gradient
//                  (add_gradients)
//
// Grid and block: 256 threads. normalise_row: a warp per row. add_statistics: a block per cluster,
// head of the centroids and part of its tokens, all of whose labels it looks at: a large cluster is
// summed by many blocks. add_parts and move_sums: a block per cluster and head. move_counts: a
// thread per cluster. The others: up to 1024 blocks, a group of 8 to 32 lanes per token, four
// tokens of a group in flight. Shared memory: up to 21 KB of double sums and tokens in
// add_statistics. Sums run in an order that is given by the shapes alone. Preconditions:
// refuse_tokens; normalise_row takes any width, and f64. Any alignment.
#include "core/arena.h"
#include "core/item.h"
#include "cuda/api/entry.h"
#include "cuda/api/refusal.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr double kSmoothing = 1e-5;  // src/cpu/cluster/centroid_update.cc
constexpr int kPartials = 1024;      // of the loss

constexpr int kInFlight = 4;  // rows that a group of lanes loads at once

template <class Lanes>
constexpr int kGroups = kThreads / Lanes::kLanes;  // groups of lanes of a block

template <class Lanes>
__device__ __forceinline__ int group_number() {
  return static_cast<int>(threadIdx.x) / Lanes::kLanes;
}

// Tokens (B, H, N, D), their clusters (B, H, N) and centroids (Hc, C, D).
template <class T>
struct Tokens {
  Tensor4<const T> x;
  const std::int32_t* labels;
  SequenceSpans spans;
  int batches, items, heads, rows, owners, clusters;

  __device__ int owner(int head) const { return head / (heads / owners); }
  __device__ int label(int batch, int head, int row) const {
    return labels[(static_cast<std::int64_t>(batch) * heads + head) * rows + row];
  }
  __device__ std::int64_t valid_rows() const {
    std::int64_t count = 0;
    for (int item = 0; item < items; ++item) count += spans.span(item).length;
    return count;
  }
};

template <class T>
Tokens<T> tokens_of(const TensorView& x, const Sequences& sequences, const TensorView& labels,
                    const TensorView& centroids) {
  return {tensor4<const T>(x),
          static_cast<const std::int32_t*>(labels.data),
          sequence_spans(sequences, x.size(2)),
          static_cast<int>(x.size(0)),
          static_cast<int>(item_count(sequences, x.size(0))),
          static_cast<int>(x.size(1)),
          static_cast<int>(x.size(2)),
          static_cast<int>(centroids.size(0)),
          static_cast<int>(centroids.size(1))};
}

// Tokens that a thread looks at before the block gathers the members among them: a label is read
// while others are on their way.
constexpr int kLabels = 4, kListed = kThreads * kLabels;
constexpr int kPartCells = 2048;  // most sums of parts for each head of the centroids

// The rows of a head of the centroids, in pieces of kListed rows of a batch entry and head. Parts
// of as many pieces each are summed at the same time. The cut depends on the shapes alone.
struct StatisticParts {
  int of_rows, pieces, length, count;  // pieces of a batch entry and head, in all, of a part; parts

  StatisticParts(const TensorView& x, const TensorView& members)
      : of_rows(static_cast<int>((x.size(2) + kListed - 1) / kListed)),
        pieces(static_cast<int>(x.size(0) * (x.size(1) / members.size(0)) * of_rows)) {
    const int most = static_cast<int>(max(kPartCells / members.size(1), std::int64_t{1}));
    length = (pieces + most - 1) / most;
    count = length > 0 ? (pieces + length - 1) / length : 1;
  }
};

// Number of members and sum of their rows, (owners, parts, C) and (owners, parts, C, D).
struct PartSums {
  int* members;
  double* sums;

  PartSums(Arena& arena, const StatisticParts& parts, const TensorView& total)
      : members(arena.take<int>(parts.count * total.size(0) * total.size(1))),
        sums(arena.take<double>(parts.count * total.count())) {}
};

// One block per cluster, head and part; groups of lanes share the members.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 3)
    add_statistics(Tokens<T> tokens, StatisticParts parts, PartSums to) {
  using Lanes = RowLanes<T, kWidth>;
  __shared__ int listed[kListed];
  __shared__ double partial[kGroups<Lanes>][kWidth];
  const int cluster = blockIdx.x, owner = blockIdx.y, part = blockIdx.z;
  const int width = tokens.x.width, sharing = tokens.heads / tokens.owners;
  double sum[Lanes::kVector] = {};
  int members = 0;
  const int end = min((part + 1) * parts.length, parts.pieces);
  for (int piece = part * parts.length; piece < end; ++piece) {
    const int slice = piece / parts.of_rows, first = piece % parts.of_rows * kListed;
    const int batch = slice / sharing, head = owner * sharing + slice % sharing;
    const int own = first + static_cast<int>(threadIdx.x) * kLabels;
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < kLabels; ++i)
      if (own + i < tokens.rows && tokens.label(batch, head, own + i) == cluster) found |= 1u << i;
    for (int i = 0; i < kLabels; ++i)
      if (found >> i & 1u && tokens.spans.item_of(batch, own + i, tokens.items) < 0)
        found ^= 1u << i;  // padding
    int total = 0;
    int place = block_exclusive_scan(__popc(found), total);
#pragma unroll
    for (int i = 0; i < kLabels; ++i)
      if (found >> i & 1u) listed[place++] = own + i;
    __syncthreads();
    const Rows<const T> rows = tokens.x.rows(batch, head, 0);
    for (int next = 0; next < total; next += kGroups<Lanes> * kInFlight) {
      typename Lanes::Values y[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int m = next + i * kGroups<Lanes> + group_number<Lanes>();
        Lanes::load(rows, listed[min(m, total - 1)], m < total, y[i]);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        Lanes::normalise(width, y[i]);
#pragma unroll
        for (int d = 0; d < Lanes::kVector; ++d) sum[d] += y[i][d];
      }
    }
    members += total;
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < Lanes::kVector; ++i)
    if (Lanes::column() < kWidth) partial[group_number<Lanes>()][Lanes::column() + i] = sum[i];
  __syncthreads();
  const std::int64_t cell =
      (static_cast<std::int64_t>(owner) * parts.count + part) * tokens.clusters + cluster;
  if (threadIdx.x == 0) to.members[cell] = members;
  for (int column = threadIdx.x; column < width; column += kThreads) {
    double all = 0;
    for (int group = 0; group < kGroups<Lanes>; ++group) all += partial[group][column];
    to.sums[cell * width + column] = all;
  }
}

// Adds the parts. One block per cluster and head.
__global__ void __launch_bounds__(kMaxHeadDim)
    add_parts(PartSums from, int parts, int width, double* members, double* sums) {
  const int cluster = blockIdx.x, owner = blockIdx.y, clusters = gridDim.x, column = threadIdx.x;
  const std::int64_t first = static_cast<std::int64_t>(owner) * parts * clusters + cluster;
  const std::int64_t cell = static_cast<std::int64_t>(owner) * clusters + cluster;
  double sum = 0;
  std::int64_t count = 0;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) {
    const std::int64_t place = first + static_cast<std::int64_t>(part) * clusters;
    if (column < width) sum += from.sums[place * width + column];
    if (column == 0) count += from.members[place];
  }
  if (column < width) sums[cell * width + column] += sum;
  if (column == 0) members[cell] += static_cast<double>(count);
}

__global__ void __launch_bounds__(kThreads)
    move_counts(double decay, const double* members, int count, float* counts) {
  const int cell = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (cell < count)
    counts[cell] = static_cast<float>(decay * counts[cell] + (1 - decay) * members[cell]);
}

// After move_counts. Clusters without members keep their centroids.
__global__ void __launch_bounds__(kThreads)
    move_sums(double decay, const double* members, const double* added, const float* counts,
              int width, float* sums, float* centroids) {
  const int cluster = blockIdx.x, owner = blockIdx.y, clusters = gridDim.x;
  double total = 0;
  for (int c = 0; c < clusters; ++c) total += counts[owner * clusters + c];
  const std::int64_t cell = static_cast<std::int64_t>(owner) * clusters + cluster;
  const double smoothed = (counts[cell] + kSmoothing) / (total + clusters * kSmoothing) * total;
  for (int column = threadIdx.x; column < width; column += kThreads) {
    float& old = sums[cell * width + column];
    const double moved = decay * old + (1 - decay) * added[cell * width + column];
    old = static_cast<float>(moved);
    if (members[cell] > 0) centroids[cell * width + column] = static_cast<float>(moved / smoothed);
  }
}

__device__ __forceinline__ double to_wide(double value) { return value; }
template <class T>
__device__ __forceinline__ float to_wide(T value) {
  return to_float(value);
}

// Rows number blockIdx.x * kWarps + warp of x; `out` is dense, of float or double.
template <class T, class Wide>
__global__ void __launch_bounds__(kThreads)
    normalise_row(Tensor4<const T> x, std::int64_t heads, std::int64_t rows, std::int64_t total,
                  Wide* out) {
  const std::int64_t number =
      static_cast<std::int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (number >= total) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, width = x.width;
  const T* row =
      x.rows(static_cast<int>(number / rows / heads), static_cast<int>(number / rows % heads), 0)
          .row(number % rows);
  Wide mean = 0, squares = 0;
  for (int d = lane; d < width; d += 32) mean += to_wide(row[d]);
  mean = warp_sum(mean) / width;
  for (int d = lane; d < width; d += 32) {
    const Wide difference = to_wide(row[d]) - mean;
    squares += difference * difference;
  }
  const Wide sigma = sqrt(warp_sum(squares) / width + static_cast<Wide>(kVarianceFloor));
  for (int d = lane; d < width; d += 32) out[number * width + d] = (to_wide(row[d]) - mean) / sigma;
}

// Rows of a batch entry and head that a block takes at a time.
template <class Lanes>
constexpr int kChunk = kGroups<Lanes>* kInFlight;

// Chunks of the rows of x.
template <class Lanes>
std::int64_t chunks_of(const TensorView& x) {
  return x.size(0) * x.size(1) * ((x.size(2) + kChunk<Lanes> - 1) / kChunk<Lanes>);
}

// A token of a group of lanes; `there` is false for padding and beyond the last row.
struct Place {
  int batch, head, row;
  bool there;
};

// A normalised token, and its difference from its centroid. Labels on the device are not checked
// but clamped.
template <class Lanes>
struct Difference {
  typename Lanes::Values y, difference;
  float inverse;

  template <class T>
  __device__ void take(const Tokens<T>& tokens, const float* centroids, const Place& at,
                       int label) {
    const int width = tokens.x.width;
    inverse = Lanes::normalise(width, y);
    const std::int64_t owner = at.there ? tokens.owner(at.head) : 0;
    const std::int64_t cluster = min(max(label, 0), tokens.clusters - 1);
    Lanes::load_floats(centroids + (owner * tokens.clusters + cluster) * width, width, difference);
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) difference[i] = y[i] - difference[i];
  }
};

// Calls visit(place, difference) for every token. All lanes of a warp make the call together.
template <class Lanes, class T, class Visit>
__device__ void for_tokens(const Tokens<T>& tokens, const float* centroids, Visit visit) {
  const int of_rows = (tokens.rows + kChunk<Lanes> - 1) / kChunk<Lanes>;
  const std::int64_t chunks = static_cast<std::int64_t>(tokens.batches) * tokens.heads * of_rows;
  for (std::int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const std::int64_t slice = chunk / of_rows;
    const int first = static_cast<int>(chunk - slice * of_rows) * kChunk<Lanes>;
    const int batch = static_cast<int>(slice / tokens.heads);
    const int head = static_cast<int>(slice % tokens.heads);
    const Rows<const T> rows = tokens.x.rows(batch, head, 0);
    Place place[kInFlight];
    Difference<Lanes> token[kInFlight];
    int label[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = first + i * kGroups<Lanes> + group_number<Lanes>();
      const bool there = row < tokens.rows && tokens.spans.item_of(batch, row, tokens.items) >= 0;
      place[i] = {batch, head, row, there};
      label[i] = there ? tokens.label(batch, head, row) : 0;
      Lanes::load(rows, row, there, token[i].y);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      token[i].take(tokens, centroids, place[i], label[i]);
      visit(place[i], token[i]);
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    add_differences(Tokens<T> tokens, const float* centroids, double* partials) {
  using Lanes = RowLanes<T, kWidth>;
  __shared__ double parts[kGroups<Lanes>];
  double sum = 0;
  for_tokens<Lanes>(tokens, centroids, [&](const Place& at, const Difference<Lanes>& token) {
    const float squares = Lanes::dot(token.difference, token.difference);
    if (at.there) sum += squares;
  });
  if (Lanes::column() == 0) parts[group_number<Lanes>()] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int group = 1; group < kGroups<Lanes>; ++group) sum += parts[group];
  partials[blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(32)
    take_mean(Tokens<T> tokens, const double* partials, int count, float* loss) {
  double sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += 32) sum += partials[i];
  sum = warp_sum(sum);
  const double elements = static_cast<double>(tokens.valid_rows()) * tokens.heads * tokens.x.width;
  if (threadIdx.x == 0) *loss = elements > 0 ? static_cast<float>(sum / elements) : 0.0f;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 3)
    add_gradients(Tokens<T> tokens, const float* centroids, double weight, const float* scale,
                  Tensor4<T> dx) {
  using Lanes = RowLanes<T, kWidth>;
  const auto width = static_cast<float>(tokens.x.width);
  const double elements = static_cast<double>(tokens.valid_rows()) * tokens.heads * tokens.x.width;
  const float factor = static_cast<float>(2 * weight * (scale ? *scale : 1.0f) / elements);
  for_tokens<Lanes>(tokens, centroids, [&](const Place& at, const Difference<Lanes>& token) {
    const float mean = Lanes::total(token.difference) / width;
    const float along = Lanes::dot(token.difference, token.y) / width;
    if (!at.there) return;
    typename Lanes::Values sum;
    const Rows<T> to = dx.rows(at.batch, at.head, 0);
    Lanes::load({to.data, to.pitch, to.width, to.aligned}, at.row, true, sum);
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i)
      sum[i] += factor * (token.difference[i] - mean - token.y[i] * along) * token.inverse;
    Lanes::store(to, at.row, sum);
  });
}

// Calls body(TypeTag<T>, std::integral_constant<int, width>).
template <class Body>
void dispatch_tokens(const char* op, const TensorView& x, Body&& body) {
  dispatch_element(op, x.dtype, [&](auto tag) {
    dispatch_head_dim(op, x.size(3), [&](auto width) { body(tag, width); });
  });
}

template <class Lanes>
int token_blocks(const TensorView& x) {
  return static_cast<int>(min(max(chunks_of<Lanes>(x), std::int64_t{1}), std::int64_t{kPartials}));
}

}  // namespace

std::string refuse_tokens(const TensorView& x) {
  for (const std::string& reason : {refuse_type(x.dtype), refuse_width(x.size(3)),
                                    refuse_more_than(kMaxBlocks, "heads", x.size(1)),
                                    refuse_more_than(kMaxRows, "rows of a batch entry", x.size(2))})
    if (!reason.empty()) return reason;
  return "";
}

void normalise_rows(const TensorView& x, const TensorView& out, const Workspace& workspace) {
  const char* op = "normalise_rows";
  const DeviceGuard guard(op, x.device);
  const std::int64_t total = x.size(0) * x.size(1) * x.size(2);
  const auto blocks = static_cast<unsigned>((total + kWarps - 1) / kWarps);
  const auto launch = [&](auto element, auto wide) {
    using T = typename decltype(element)::type;
    using Wide = typename decltype(wide)::type;
    normalise_row<<<blocks, kThreads, 0, stream_of(workspace)>>>(
        tensor4<const T>(x), x.size(1), x.size(2), total, static_cast<Wide*>(out.data));
    COTERIE_LAUNCH("normalise_row");
  };
  if (x.dtype == DType::f64) return launch(TypeTag<double>{}, TypeTag<double>{});
  dispatch_element(op, x.dtype, [&](auto tag) { launch(tag, TypeTag<float>{}); });
}

std::int64_t centroid_statistics_workspace_bytes(const TensorView& x,
                                                 const CentroidStatistics& statistics) {
  Arena arena;
  PartSums(arena, StatisticParts(x, statistics.members), statistics.sums);
  return arena.used();
}

void add_centroid_statistics(const TensorView& x, const Sequences& sequences,
                             const TensorView& labels, const CentroidStatistics& statistics,
                             const Workspace& workspace) {
  const char* op = "add_centroid_statistics";
  const DeviceGuard guard(op, x.device);
  const cudaStream_t stream = stream_of(workspace);
  const TensorView &members = statistics.members, &sums = statistics.sums;
  const StatisticParts parts(x, members);
  Arena arena(op, workspace, cuda::centroid_statistics_workspace_bytes(x, statistics));
  const PartSums found(arena, parts, sums);
  const auto owners = static_cast<unsigned>(members.size(0));
  const auto clusters = static_cast<unsigned>(members.size(1));
  const dim3 grid(clusters, owners, static_cast<unsigned>(parts.count));
  dispatch_tokens(op, x, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    add_statistics<T, decltype(width)::value>
        <<<grid, kThreads, 0, stream>>>(tokens_of<T>(x, sequences, labels, members), parts, found);
    COTERIE_LAUNCH("add_statistics");
  });
  add_parts<<<dim3(clusters, owners), kMaxHeadDim, 0, stream>>>(
      found, parts.count, static_cast<int>(x.size(3)), static_cast<double*>(members.data),
      static_cast<double*>(sums.data));
  COTERIE_LAUNCH("add_parts");
}

void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state,
                    const Workspace& workspace) {
  const char* op = "move_centroids";
  const DeviceGuard guard(op, state.centroids.device);
  if (state.centroids.dtype != DType::f32) fail_element(op, state.centroids.dtype);
  const cudaStream_t stream = stream_of(workspace);
  const auto heads = static_cast<unsigned>(state.centroids.size(0));
  const auto clusters = static_cast<unsigned>(state.centroids.size(1));
  const auto* members = static_cast<const double*>(statistics.members.data);
  auto* counts = static_cast<float*>(state.counts.data);
  const unsigned cells = heads * clusters;
  move_counts<<<(cells + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      decay, members, static_cast<int>(cells), counts);
  COTERIE_LAUNCH("move_counts");
  move_sums<<<dim3(clusters, heads), kThreads, 0, stream>>>(
      decay, members, static_cast<const double*>(statistics.sums.data), counts,
      static_cast<int>(state.centroids.size(2)), static_cast<float*>(state.sums.data),
      static_cast<float*>(state.centroids.data));
  COTERIE_LAUNCH("move_sums");
}

std::int64_t commitment_workspace_bytes(const TensorView&) {
  Arena arena;
  arena.take<double>(kPartials);
  return arena.used();
}

void commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     const TensorView& labels, const TensorView& loss, const Workspace& workspace) {
  const char* op = "commitment_loss";
  const DeviceGuard guard(op, x.device);
  const cudaStream_t stream = stream_of(workspace);
  Arena arena(op, workspace, cuda::commitment_workspace_bytes(x));
  double* partials = arena.take<double>(kPartials);
  dispatch_tokens(op, x, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    const int blocks = token_blocks<RowLanes<T, kWidth>>(x);
    const Tokens<T> tokens = tokens_of<T>(x, sequences, labels, centroids);
    add_differences<T, kWidth><<<blocks, kThreads, 0, stream>>>(
        tokens, static_cast<const float*>(centroids.data), partials);
    COTERIE_LAUNCH("add_differences");
    take_mean<<<1, 32, 0, stream>>>(tokens, partials, blocks, static_cast<float*>(loss.data));
    COTERIE_LAUNCH("take_mean");
  });
}

void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& scale, const TensorView& dx,
                              const Workspace& workspace) {
  const char* op = "commitment_loss_backward";
  const DeviceGuard guard(op, x.device);
  dispatch_tokens(op, x, [&](auto tag, auto width) {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = decltype(width)::value;
    const int blocks = token_blocks<RowLanes<T, kWidth>>(x);
    add_gradients<T, kWidth><<<blocks, kThreads, 0, stream_of(workspace)>>>(
        tokens_of<T>(x, sequences, labels, centroids), static_cast<const float*>(centroids.data),
        weight, static_cast<const float*>(scale.data), tensor4<T>(dx));
    COTERIE_LAUNCH("add_gradients");
  });
}

}  // namespace coterie::cuda
