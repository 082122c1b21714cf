// SPDX-License-Identifier: MIT
// The centroids of routing on the GPU: their moving average and the commitment loss. A warp
// normalises a row at a time; sums run in an order that is given by the rows alone.
#include <algorithm>

#include "core/arena.h"
#include "cuda/device/element.cuh"
#include "cuda/device/problem.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/entry.h"
#include "cuda/launch.h"
#include "cuda/refusal.h"
#include "cuda/tuning.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = kMaxHeadDim / 32;  // of a row, per lane: lane, lane + 32, ...
constexpr float kVarianceFloor = 1e-6f;     // src/cpu/normalise.cc
constexpr double kSmoothing = 1e-5;         // src/cpu/centroid_update.cc
constexpr int kPartials = 1024;             // of the loss

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

// A row over the lanes of a warp; columns beyond the row's width are 0.
struct LaneRow {
  float value[kColumns];

  template <class T>
  __device__ static LaneRow load(const T* row, int width) {
    LaneRow lane_row;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = 32 * i + threadIdx.x % 32;
      lane_row.value[i] = column < width ? to_float(row[column]) : 0.0f;
    }
    return lane_row;
  }
  __device__ float sum() const {
    float part = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) part += value[i];
    return warp_sum(part);
  }
  __device__ float dot(const LaneRow& other) const {
    float part = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) part = fmaf(value[i], other.value[i], part);
    return warp_sum(part);
  }
  // To mean 0 and variance 1; returns 1 / sigma.
  __device__ float normalise(int width) {
    const float mean = sum() / width;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      value[i] = 32 * i + static_cast<int>(threadIdx.x) % 32 < width ? value[i] - mean : 0.0f;
    const float inverse = rsqrtf(dot(*this) / width + kVarianceFloor);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) value[i] *= inverse;
    return inverse;
  }
};

// The rows of one cluster, 256 tokens at a time: this thread's token of a chunk, or -1.
template <class T, class Visit>
__device__ void for_members(const Tokens<T>& tokens, int owner, int cluster, Visit visit) {
  const int sharing = tokens.heads / tokens.owners;
  for (int item = 0; item < tokens.items; ++item) {
    const ItemSpan span = tokens.spans.span(item);
    for (int head = owner * sharing; head < (owner + 1) * sharing; ++head)
      for (int first = 0; first < span.length; first += kThreads) {
        const int row = first + static_cast<int>(threadIdx.x);
        const bool member =
            row < span.length && tokens.label(span.batch, head, span.begin + row) == cluster;
        visit(span.batch, head, member ? span.begin + row : -1);
      }
  }
}

// counts <- decay counts + (1 - decay) members, one block per cluster.
template <class T>
__global__ void __launch_bounds__(kThreads)
    count_members(Tokens<T> tokens, double decay, float* counts) {
  const int cluster = blockIdx.x, owner = blockIdx.y;
  int members = 0;
  for_members(tokens, owner, cluster,
              [&](int, int, int row) { members += __syncthreads_count(row >= 0); });
  float& count = counts[owner * tokens.clusters + cluster];
  if (threadIdx.x == 0) count = static_cast<float>(decay * count + (1 - decay) * members);
}

// sums <- decay sums + (1 - decay) sum of normalised members; centroids of clusters with members
// become sums over smoothed counts. One block per cluster; the warps share the members.
template <class T>
__global__ void __launch_bounds__(kThreads)
    move_centroids(Tokens<T> tokens, double decay, const float* counts, float* sums,
                   float* centroids) {
  __shared__ int listed[kThreads];
  __shared__ int ahead[kWarps];  // members of the chunk in earlier warps
  __shared__ double partial[kWarps][kMaxHeadDim];
  const int cluster = blockIdx.x, owner = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = tokens.x.width;
  double sum[kColumns] = {};
  int members = 0;
  for_members(tokens, owner, cluster, [&](int batch, int head, int row) {
    const unsigned found = __ballot_sync(~0u, row >= 0);
    if (lane == 0) ahead[warp] = __popc(found);
    const int total = __syncthreads_count(row >= 0);
    if (total == 0) return;
    int place = __popc(found & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) place += ahead[w];
    if (row >= 0) listed[place] = row;
    __syncthreads();
    const Rows<const T> rows = tokens.x.rows(batch, head, 0);
    for (int m = warp; m < total; m += kWarps) {
      LaneRow y = LaneRow::load(rows.row(listed[m]), width);
      y.normalise(width);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] += y.value[i];
    }
    members += total;
    __syncthreads();
  });
#pragma unroll
  for (int i = 0; i < kColumns; ++i) partial[warp][32 * i + lane] = sum[i];
  __syncthreads();
  double total = 0;
  for (int c = 0; c < tokens.clusters; ++c) total += counts[owner * tokens.clusters + c];
  const std::int64_t cell = static_cast<std::int64_t>(owner) * tokens.clusters + cluster;
  const double smoothed =
      (counts[cell] + kSmoothing) / (total + tokens.clusters * kSmoothing) * total;
  for (int column = threadIdx.x; column < width; column += kThreads) {
    double batch = 0;
    for (int w = 0; w < kWarps; ++w) batch += partial[w][column];
    float& old = sums[cell * width + column];
    const double moved = decay * old + (1 - decay) * batch;
    old = static_cast<float>(moved);
    if (members > 0) centroids[cell * width + column] = static_cast<float>(moved / smoothed);
  }
}

// Calls visit(batch, head, row of the batch entry) for every valid token, one per warp.
template <class T, class Visit>
__device__ void for_tokens(const Tokens<T>& tokens, Visit visit) {
  const std::int64_t total = static_cast<std::int64_t>(tokens.batches) * tokens.heads * tokens.rows;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t t = blockIdx.x * kWarps + threadIdx.x / 32; t < total; t += warps) {
    const int row = static_cast<int>(t % tokens.rows);
    const int head = static_cast<int>(t / tokens.rows % tokens.heads);
    const int batch = static_cast<int>(t / tokens.rows / tokens.heads);
    if (tokens.spans.item_of(batch, row, tokens.items) >= 0) visit(batch, head, row);
  }
}

// A normalised token, and what it differs by from its centroid. Labels on the device were not
// checked: they are clamped.
template <class T>
struct Difference {
  LaneRow y, difference;
  float inverse;

  __device__ Difference(const Tokens<T>& tokens, const float* centroids, int batch, int head,
                        int row) {
    const int width = tokens.x.width;
    const int label = min(max(tokens.label(batch, head, row), 0), tokens.clusters - 1);
    y = LaneRow::load(tokens.x.rows(batch, head, 0).row(row), width);
    inverse = y.normalise(width);
    difference = LaneRow::load(
        centroids +
            (static_cast<std::int64_t>(tokens.owner(head)) * tokens.clusters + label) * width,
        width);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) difference.value[i] = y.value[i] - difference.value[i];
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_differences(Tokens<T> tokens, const float* centroids, double* partials) {
  __shared__ double parts[kWarps];
  double sum = 0;
  for_tokens(tokens, [&](int batch, int head, int row) {
    const Difference<T> token(tokens, centroids, batch, head, row);
    sum += token.difference.dot(token.difference);
  });
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kWarps; ++w) sum += parts[w];
  partials[blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(32)
    take_mean(Tokens<T> tokens, const double* partials, int count, float* loss) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += 32) sum += partials[i];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const double elements = static_cast<double>(tokens.valid_rows()) * tokens.heads * tokens.x.width;
  if (threadIdx.x == 0) *loss = elements > 0 ? static_cast<float>(sum / elements) : 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_gradients(Tokens<T> tokens, const float* centroids, double weight, Tensor4<T> dx) {
  const int width = tokens.x.width;
  const double elements = static_cast<double>(tokens.valid_rows()) * tokens.heads * tokens.x.width;
  const float factor = static_cast<float>(2 * weight / elements);
  for_tokens(tokens, [&](int batch, int head, int row) {
    const Difference<T> token(tokens, centroids, batch, head, row);
    const float mean = token.difference.sum() / width;
    const float along = token.difference.dot(token.y) / width;
    T* to = dx.rows(batch, head, 0).row(row);
    for (int i = 0; i < kColumns; ++i) {
      const int column = 32 * i + threadIdx.x % 32;
      if (column >= width) continue;
      const float gradient =
          (token.difference.value[i] - mean - token.y.value[i] * along) * token.inverse;
      to[column] = from_float<T>(to_float(to[column]) + factor * gradient);
    }
  });
}

int token_blocks(const TensorView& x) {
  const std::int64_t rows = x.size(0) * x.size(1) * x.size(2);
  return static_cast<int>(std::clamp<std::int64_t>((rows + kWarps - 1) / kWarps, 1, kPartials));
}

}  // namespace

std::string refuse_tokens(const TensorView& x) {
  const std::string type = refuse_type(x.dtype);
  return type.empty() ? refuse_width(x.size(3)) : type;
}

void ema_update(double decay, const TensorView& x, const Sequences& sequences,
                const TensorView& labels, const CentroidState& state, const Workspace& workspace) {
  const cudaStream_t stream = stream_of(workspace);
  const dim3 grid(static_cast<unsigned>(state.centroids.size(1)),
                  static_cast<unsigned>(state.centroids.size(0)));
  dispatch_element("ema_update", x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Tokens<T> tokens = tokens_of<T>(x, sequences, labels, state.centroids);
    float* counts = static_cast<float*>(state.counts.data);
    count_members<<<grid, kThreads, 0, stream>>>(tokens, decay, counts);
    COTERIE_LAUNCH("count_members");
    move_centroids<<<grid, kThreads, 0, stream>>>(tokens, decay, counts,
                                                  static_cast<float*>(state.sums.data),
                                                  static_cast<float*>(state.centroids.data));
    COTERIE_LAUNCH("move_centroids");
  });
}

std::int64_t commitment_workspace_bytes(const TensorView& x) {
  Arena arena;
  arena.take<double>(token_blocks(x));
  return arena.used();
}

void commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     const TensorView& labels, const TensorView& loss, const Workspace& workspace) {
  const cudaStream_t stream = stream_of(workspace);
  const int blocks = token_blocks(x);
  Arena arena("commitment_loss", workspace, cuda::commitment_workspace_bytes(x));
  double* partials = arena.take<double>(blocks);
  dispatch_element("commitment_loss", x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Tokens<T> tokens = tokens_of<T>(x, sequences, labels, centroids);
    add_differences<<<blocks, kThreads, 0, stream>>>(
        tokens, static_cast<const float*>(centroids.data), partials);
    COTERIE_LAUNCH("add_differences");
    take_mean<<<1, 32, 0, stream>>>(tokens, partials, blocks, static_cast<float*>(loss.data));
    COTERIE_LAUNCH("take_mean");
  });
}

void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& dx, const Workspace& workspace) {
  dispatch_element("commitment_loss_backward", x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    add_gradients<<<token_blocks(x), kThreads, 0, stream_of(workspace)>>>(
        tokens_of<T>(x, sequences, labels, centroids), static_cast<const float*>(centroids.data),
        weight, tensor4<T>(dx));
    COTERIE_LAUNCH("add_gradients");
  });
}

}  // namespace coterie::cuda
