// SPDX-License-Identifier: MIT
// Residual sum and layer norm (coterie/block.h), forward and backward:
//   y = x + branch + branch_bias,  h = (y - mean) scale,  out = h gain + bias
//   dx = grad_y + scale (g - avg(g) - h avg(g h)),  g = grad_out gain
//
// Grid and block: blocks of 8 warps. Forward: one warp per row, a grid of all rows. Backward: 264
// blocks, whose warps take rows in turn and add up their columns' sums (of grad_out h, grad_out and
// dx) in registers; the warps of a block add theirs in shared memory, in order, and add_slices adds
// those of the blocks. A lane has vectors of four elements, 32 vectors apart: E = 128 kVectors at
// most. Shared memory: E floats. Registers: 128 at E = 512 in the backward pass.
// Preconditions: contiguous tensors, E a multiple of 4 and at most 1024.
#include <algorithm>
#include <cmath>

#include "core/block_rows.h"
#include "cuda/api/entry.h"
#include "cuda/block/columns.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/vector4.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

namespace {

constexpr int kWarps = 8;

template <class T>
struct ForwardArguments {
  const float *x, *branch_bias, *gain, *bias;
  const T* branch;
  float *y, *mean, *scale;
  T* out;
  std::int64_t rows;
  int width;
  float eps;
};

template <class T, int kVectors>
__global__ void __launch_bounds__(32 * kWarps) add_norm_rows(ForwardArguments<T> a) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.rows) return;
  const int lane = threadIdx.x % 32;
  const std::int64_t begin = row * a.width;
  float y[kVectors][4] = {};
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int d = (v * 32 + lane) * 4;
    if (d >= a.width) continue;
    load4(a.x + begin + d, y[v]);
    if (a.branch != nullptr) {
      float other[4], shift[4] = {};
      load4(a.branch + begin + d, other);
      if (a.branch_bias != nullptr) load4(a.branch_bias + d, shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[v][i] += other[i] + shift[i];
      store4(a.y + begin + d, y[v]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += y[v][i];
  }
  const float mean = warp_sum(sum) / static_cast<float>(a.width);
  float square = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if ((v * 32 + lane) * 4 >= a.width) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) square += (y[v][i] - mean) * (y[v][i] - mean);
  }
  const float scale = rsqrtf(warp_sum(square) / static_cast<float>(a.width) + a.eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int d = (v * 32 + lane) * 4;
    if (d >= a.width) continue;
    float gain[4], bias[4], out[4];
    load4(a.gain + d, gain);
    load4(a.bias + d, bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = (y[v][i] - mean) * scale * gain[i] + bias[i];
    store4(a.out + begin + d, out);
  }
  if (lane == 0) {
    a.mean[row] = mean;
    a.scale[row] = scale;
  }
}

template <class T>
struct BackwardArguments {
  const float *y, *mean, *scale, *gain, *grad_y;
  const T* grad_out;
  float* dx;
  T* dbranch;
  float* partial;  // sums of (blocks, 3, width): of gain, bias and branch bias
  std::int64_t rows;
  int width;
};

template <class T, int kVectors>
__global__ void __launch_bounds__(32 * kWarps) add_norm_rows_backward(BackwardArguments<T> a) {
  __shared__ float sums[kVectors * 128];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float of_gain[kVectors][4] = {}, of_bias[kVectors][4] = {}, of_branch[kVectors][4] = {};
  const float share = 1.0f / static_cast<float>(a.width);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp; row < a.rows;
       row += step) {
    const std::int64_t begin = row * a.width;
    const float mean = a.mean[row], scale = a.scale[row];
    float h[kVectors][4] = {}, g[kVectors][4] = {}, dx[kVectors][4] = {};
    float sum = 0, product = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {  // all loads are in flight before the first use
      const int d = (v * 32 + lane) * 4;
      if (d >= a.width) continue;
      load4(a.y + begin + d, h[v]);
      load4(a.grad_out + begin + d, g[v]);
      if (a.grad_y != nullptr) load4(a.grad_y + begin + d, dx[v]);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int d = (v * 32 + lane) * 4;
      if (d >= a.width) continue;
      float gain[4];
      load4(a.gain + d, gain);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        h[v][i] = (h[v][i] - mean) * scale;
        of_gain[v][i] += g[v][i] * h[v][i];
        of_bias[v][i] += g[v][i];
        g[v][i] *= gain[i];
        sum += g[v][i];
        product += g[v][i] * h[v][i];
      }
    }
    sum = warp_sum(sum) * share;
    product = warp_sum(product) * share;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int d = (v * 32 + lane) * 4;
      if (d >= a.width) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dx[v][i] += scale * (g[v][i] - sum - h[v][i] * product);
        of_branch[v][i] += dx[v][i];
      }
      store4(a.dx + begin + d, dx[v]);
      if (a.dbranch != nullptr) store4(a.dbranch + begin + d, dx[v]);
    }
  }
  float* const to = a.partial + static_cast<std::int64_t>(blockIdx.x) * 3 * a.width;
  const auto add_up = [&](const float(&own)[kVectors][4], float* out) {
    for (int turn = 0; turn < kWarps; ++turn) {
      if (turn == warp) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = sums[(v * 32 + lane) * 4 + i];
            sum = turn == 0 ? own[v][i] : sum + own[v][i];
          }
        }
      }
      __syncthreads();
    }
    for (int d = threadIdx.x; d < a.width; d += 32 * kWarps) out[d] = sums[d];
    __syncthreads();
  };
  add_up(of_gain, to);
  add_up(of_bias, to + a.width);
  add_up(of_branch, to + 2 * a.width);
}

// Calls body(std::integral_constant<int, kVectors>).
template <class Body>
void dispatch_width(std::int64_t width, Body&& body) {
  if (width <= 128) return body(std::integral_constant<int, 1>{});
  if (width <= 256) return body(std::integral_constant<int, 2>{});
  if (width <= 512) return body(std::integral_constant<int, 4>{});
  body(std::integral_constant<int, 8>{});
}

template <class T>
T* data_of(const TensorView& view) {
  return view.present() ? static_cast<T*>(view.data) : nullptr;
}

}  // namespace

void add_norm(const AddNorm& in, const AddNormResult& result, const Workspace& workspace) {
  const char* op = "add_norm";
  const DeviceGuard guard(op, in.x.device);
  const std::int64_t rows = in.x.size(0), width = in.x.size(1);
  const auto blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  dispatch_element(op, result.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ForwardArguments<T> a{};
    a.x = data_of<float>(in.x);
    a.branch_bias = data_of<float>(in.branch_bias);
    a.gain = data_of<float>(in.gain);
    a.bias = data_of<float>(in.bias);
    a.branch = data_of<T>(in.branch);
    a.y = data_of<float>(result.y);
    a.mean = data_of<float>(result.mean);
    a.scale = data_of<float>(result.scale);
    a.out = data_of<T>(result.out);
    a.rows = rows;
    a.width = static_cast<int>(width);
    a.eps = static_cast<float>(in.eps);
    dispatch_width(width, [&](auto vectors) {
      add_norm_rows<T, decltype(vectors)::value>
          <<<blocks, 32 * kWarps, 0, stream_of(workspace)>>>(a);
      COTERIE_LAUNCH("add_norm_rows");
    });
  });
}

void add_norm_backward(const AddNormBackward& in, const AddNormGradients& gradients,
                       const Workspace& workspace) {
  const char* op = "add_norm_backward";
  const DeviceGuard guard(op, in.y.device);
  const std::int64_t rows = in.y.size(0), width = in.y.size(1);
  const auto blocks = static_cast<unsigned>(norm_slices(rows));
  auto* const partial = static_cast<float*>(workspace.data);
  dispatch_element(op, in.grad_out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    BackwardArguments<T> a{};
    a.y = data_of<float>(in.y);
    a.mean = data_of<float>(in.mean);
    a.scale = data_of<float>(in.scale);
    a.gain = data_of<float>(in.gain);
    a.grad_y = data_of<float>(in.grad_y);
    a.grad_out = data_of<T>(in.grad_out);
    a.dx = data_of<float>(gradients.dx);
    a.dbranch = data_of<T>(gradients.dbranch);
    a.partial = partial;
    a.rows = rows;
    a.width = static_cast<int>(width);
    dispatch_width(width, [&](auto vectors) {
      add_norm_rows_backward<T, decltype(vectors)::value>
          <<<blocks, 32 * kWarps, 0, stream_of(workspace)>>>(a);
      COTERIE_LAUNCH("add_norm_rows_backward");
    });
  });
  const TensorView sums[] = {gradients.dgain, gradients.dbias, gradients.dbranch_bias};
  for (int i = 0; i < 3; ++i) {
    if (!sums[i].present()) continue;
    add_slices<<<static_cast<unsigned>((width + 31) / 32), 256, 0, stream_of(workspace)>>>(
        partial + i * width, static_cast<int>(blocks), static_cast<int>(width),
        static_cast<int>(3 * width), data_of<float>(sums[i]));
    COTERIE_LAUNCH("add_slices");
  }
}

}  // namespace coterie::cuda
