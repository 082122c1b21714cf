// SPDX-License-Identifier: MIT
// GELU after a bias (coterie/block.h), forward and backward, v = x + bias:
//   out = v Phi(v),  dx = grad_out (Phi(v) + v phi(v)),  dbias = column sums of dx
// The same walk over rows gives column sums alone (sum_rows).
// Phi by Abramowitz and Stegun 7.1.26 (error below 1e-7): it shares the exponential with the
// density phi, and costs a third of erff.
//
// Grid and block: blocks of 8 warps; a block has 256 columns (x) and a slice of the rows (y). A
// lane has eight columns, its warp takes rows of the slice in turn, four at a time to keep loads in
// flight. The backward pass adds columns in registers, over the warps in shared memory, in order,
// and over slices by add_slices. About 1056 blocks. Shared memory: 1 KiB.
// Preconditions: contiguous tensors, columns a multiple of 4. out may be x, dx may be grad_out.
#include <cstdint>

#include "core/block_rows.h"
#include "cuda/api/entry.h"
#include "cuda/block/columns.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/element.cuh"
#include "cuda/prim/softmax.cuh"

namespace coterie::cuda {

namespace {

constexpr int kWarps = kWarpsOfSlice;
constexpr int kColumns = kGeluColumns;  // of a block: 32 lanes with eight each
constexpr int kRows = 4;                // in flight

struct Normal {
  float below, density;  // Phi(v), phi(v)
};

__device__ __forceinline__ Normal normal(float v) {
  constexpr float kHalfLog2 = -0.72134752f;  // -log2(e) / 2
  const float power = exp2_approximate(v * v * kHalfLog2);
  const float t = reciprocal_approximate(fmaf(0.23164189f, fabsf(v), 1.0f));  // 0.3275911 / sqrt(2)
  float sum = fmaf(t, 1.061405429f, -1.453152027f);
  sum = fmaf(t, sum, 1.421413741f);
  sum = fmaf(t, sum, -0.284496736f);
  sum = fmaf(t, sum, 0.254829592f) * t;
  const float tail = 0.5f * sum * power;
  return {v < 0 ? tail : 1.0f - tail, 0.39894228f * power};
}

template <class T>
struct GeluArguments {
  const T* x;
  const float* bias;  // may be null
  const T* grad_out;  // null in the forward pass
  T* out;             // or dx
  float* partial;     // (slices, columns); null if no sums are wanted
  std::int64_t rows, columns;
};

enum class Walk { forward, backward, sums };

// Eight neighbouring elements, in one load or store of 16-bit types.
template <class T>
struct alignas(16) Eight {
  T at[8];
};
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// kWhole: rows are a multiple of eight elements; else the last eight of a row may be four.
template <bool kWhole, class T>
__device__ __forceinline__ Eight<T> load8(const T* from, bool both) {
  if constexpr (kWhole) {
    return *reinterpret_cast<const Eight<T>*>(from);
  } else {
    Eight<T> all{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half > 0 && !both) break;
      const Four<T> part = *reinterpret_cast<const Four<T>*>(from + 4 * half);
#pragma unroll
      for (int i = 0; i < 4; ++i) all.at[4 * half + i] = part.at[i];
    }
    return all;
  }
}
template <bool kWhole, class T>
__device__ __forceinline__ void store8(T* to, const Eight<T>& all, bool both) {
  if constexpr (kWhole) {
    *reinterpret_cast<Eight<T>*>(to) = all;
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half > 0 && !both) break;
      Four<T> part;
#pragma unroll
      for (int i = 0; i < 4; ++i) part.at[i] = all.at[4 * half + i];
      *reinterpret_cast<Four<T>*>(to + 4 * half) = part;
    }
  }
}

template <class T, Walk kWalk, bool kWhole>
__global__ void __launch_bounds__(32 * kWarps) gelu_rows(GeluArguments<T> a) {
  constexpr bool kBackward = kWalk == Walk::backward;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * kWarps;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + lane * 8;
  const bool there = column < a.columns, both = column + 4 < a.columns;
  float sums[8] = {};
  Eight<float> bias{};
  if (there && a.bias != nullptr) bias = load8<kWhole>(a.bias + column, both);
  const auto weigh = [&](Eight<T>& x, const Eight<T>& grad, std::int64_t row) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kWalk == Walk::sums) {
        sums[i] += to_float(x.at[i]);
        continue;
      }
      const float v = to_float(x.at[i]) + bias.at[i];
      const Normal at = normal(v);
      float out = v * at.below;
      if constexpr (kBackward) {
        out = to_float(grad.at[i]) * fmaf(v, at.density, at.below);
        sums[i] += out;
      }
      x.at[i] = from_float<T>(out);
    }
    if constexpr (kWalk != Walk::sums) store8<kWhole>(a.out + row * a.columns + column, x, both);
  };
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kWarps + warp;
       there && first < a.rows; first += kRows * step) {
    Eight<T> x[kRows], grad[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t place = min(first + r * step, a.rows - 1) * a.columns + column;
      x[r] = load8<kWhole>(a.x + place, both);
      if constexpr (kBackward) grad[r] = load8<kWhole>(a.grad_out + place, both);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (first + r * step < a.rows) weigh(x[r], grad[r], first + r * step);
  }
  if (a.partial == nullptr) return;  // also in the forward pass
  __shared__ float shared[kColumns];
  for (int turn = 0; turn < kWarps; ++turn) {
    if (turn == warp) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = shared[lane * 8 + i];
        sum = turn == 0 ? sums[i] : sum + sums[i];
      }
    }
    __syncthreads();
  }
  const std::int64_t own = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  if (own < a.columns) a.partial[blockIdx.y * a.columns + own] = shared[threadIdx.x];
}

template <class T, Walk kWalk>
void launch_gelu(const GeluArguments<T>& a, const Workspace& workspace) {
  const dim3 grid(static_cast<unsigned>((a.columns + kColumns - 1) / kColumns),
                  static_cast<unsigned>(gelu_slices(a.rows, a.columns)));
  const auto kernel = a.columns % 8 == 0 ? gelu_rows<T, kWalk, true> : gelu_rows<T, kWalk, false>;
  kernel<<<grid, 32 * kWarps, 0, stream_of(workspace)>>>(a);
  COTERIE_LAUNCH("gelu_rows");
}

void add_all_slices(const float* partial, std::int64_t rows, std::int64_t columns,
                    const TensorView& sums, const Workspace& workspace) {
  add_slices<<<static_cast<unsigned>((columns + 31) / 32), 256, 0, stream_of(workspace)>>>(
      partial, static_cast<int>(gelu_slices(rows, columns)), static_cast<int>(columns),
      static_cast<int>(columns), static_cast<float*>(sums.data));
  COTERIE_LAUNCH("add_slices");
}

const float* floats(const TensorView& view) {
  return view.present() ? static_cast<const float*>(view.data) : nullptr;
}

}  // namespace

void bias_gelu(const TensorView& x, const TensorView& bias, const TensorView& out,
               const Workspace& workspace) {
  const char* op = "bias_gelu";
  const DeviceGuard guard(op, x.device);
  dispatch_element(op, x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_gelu<T, Walk::forward>({static_cast<const T*>(x.data), floats(bias), nullptr,
                                   static_cast<T*>(out.data), nullptr, x.size(0), x.size(1)},
                                  workspace);
  });
}

void bias_gelu_backward(const TensorView& x, const TensorView& bias, const TensorView& grad_out,
                        const TensorView& dx, const TensorView& dbias, const Workspace& workspace) {
  const char* op = "bias_gelu_backward";
  const DeviceGuard guard(op, x.device);
  const std::int64_t rows = x.size(0), columns = x.size(1);
  float* const partial = dbias.present() ? static_cast<float*>(workspace.data) : nullptr;
  dispatch_element(op, x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_gelu<T, Walk::backward>(
        {static_cast<const T*>(x.data), floats(bias), static_cast<const T*>(grad_out.data),
         static_cast<T*>(dx.data), partial, rows, columns},
        workspace);
  });
  if (partial != nullptr) add_all_slices(partial, rows, columns, dbias, workspace);
}

void sum_rows(const TensorView& x, const TensorView& sums, const Workspace& workspace) {
  const char* op = "sum_rows";
  const DeviceGuard guard(op, x.device);
  const std::int64_t rows = x.size(0), columns = x.size(1);
  auto* const partial = static_cast<float*>(workspace.data);
  dispatch_element(op, x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_gelu<T, Walk::sums>(
        {static_cast<const T*>(x.data), nullptr, nullptr, nullptr, partial, rows, columns},
        workspace);
  });
  add_all_slices(partial, rows, columns, sums, workspace);
}

}  // namespace coterie::cuda
