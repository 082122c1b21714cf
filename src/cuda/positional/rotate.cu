// SPDX-License-Identifier: MIT
// Rotation of rows by the angles of their positions: elements d and d + D/2 of row n become
//   (a cos t - b sin t, a sin t + b cos t),  t = (first + n) base^(-2 d / D)
//
// Grid and block: 256 threads, one for each pair (n, d); it computes its sine and cosine once, in
// double, and turns that pair in its share of all (batch, head). Several blocks in y share the
// heads where the pairs alone do not fill the device. Neighbouring threads have neighbouring d:
// both halves of a row are read and written in order. If rows are aligned and D is a multiple of 8,
// a thread has four neighbouring pairs, and reads them of four (batch, head) before it writes. No
// shared memory; about 40 registers, 64 with four pairs.
// Preconditions: D even, last dimension contiguous; f32, bf16, f16 and f64, any alignment, and out
// may be x.
#include <algorithm>
#include <cmath>

#include "cuda/api/entry.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/element.cuh"
#include "cuda/prim/tensor.cuh"
#include "cuda/prim/vector4.cuh"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kWantedBlocks = 2048;  // a few for each multiprocessor

template <class T>
struct Wide {
  using type = float;
  static __device__ float load(T value) { return to_float(value); }
  static __device__ T store(float value) { return from_float<T>(value); }
};
template <>
struct Wide<double> {
  using type = double;
  static __device__ double load(double value) { return value; }
  static __device__ double store(double value) { return value; }
};

// step = -2 ln(base) / D; `turn` is -1 for the inverse.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rotate_pairs(Tensor4<const T> x, Tensor4<T> out, int batches, int heads, std::int64_t rows,
                 std::int64_t first, double step, double turn) {
  using A = typename Wide<T>::type;
  const int half = x.width / 2;
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pair >= rows * half) return;
  const std::int64_t row = pair / half;
  const int d = static_cast<int>(pair % half);
  double sine, cosine;
  sincos(static_cast<double>(first + row) * exp(d * step), &sine, &cosine);
  const A s = static_cast<A>(turn * sine), c = static_cast<A>(cosine);
  for (int i = blockIdx.y; i < batches * heads; i += gridDim.y) {
    const int batch = i / heads, head = i % heads;
    const T* from = x.rows(batch, head, 0).row(row);
    T* to = out.rows(batch, head, 0).row(row);
    const A a = Wide<T>::load(from[d]), b = Wide<T>::load(from[d + half]);
    to[d] = Wide<T>::store(a * c - b * s);
    to[d + half] = Wide<T>::store(a * s + b * c);
  }
}

// The same for four neighbouring pairs.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rotate_quads(Tensor4<const T> x, Tensor4<T> out, int batches, int heads, std::int64_t rows,
                 std::int64_t first, double step, double turn) {
  constexpr int kCopies = 4;  // in flight
  const int half = x.width / 2, quads = half / 4;
  const std::int64_t quad = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (quad >= rows * quads) return;
  const std::int64_t row = quad / quads;
  const int d = static_cast<int>(quad % quads) * 4;
  float s[4], c[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    double sine, cosine;
    sincos(static_cast<double>(first + row) * exp((d + i) * step), &sine, &cosine);
    s[i] = static_cast<float>(turn * sine);
    c[i] = static_cast<float>(cosine);
  }
  const int copies = batches * heads;
  for (int begin = blockIdx.y; begin < copies; begin += kCopies * gridDim.y) {
    float a[kCopies][4], b[kCopies][4];
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      const int copy = begin + k * gridDim.y;
      if (copy >= copies) continue;
      const T* from = x.rows(copy / heads, copy % heads, 0).row(row);
      load4(from + d, a[k]);
      load4(from + d + half, b[k]);
    }
#pragma unroll
    for (int k = 0; k < kCopies; ++k) {
      const int copy = begin + k * gridDim.y;
      if (copy >= copies) continue;
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = a[k][i] * c[i] - b[k][i] * s[i];
        high[i] = a[k][i] * s[i] + b[k][i] * c[i];
      }
      T* to = out.rows(copy / heads, copy % heads, 0).row(row);
      store4(to + d, low);
      store4(to + d + half, high);
    }
  }
}

// Whether rows start at multiples of 4 elements.
template <class T>
bool in_fours(const TensorView& x) {
  bool fours = reinterpret_cast<std::uintptr_t>(x.data) % (4 * sizeof(T)) == 0;
  for (int dim = 0; dim < 3; ++dim) fours = fours && (x.size(dim) <= 1 || x.stride(dim) % 4 == 0);
  return fours && x.size(3) % 8 == 0;
}

}  // namespace

void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out,
                 const Workspace& workspace) {
  const char* op = "rotate_rows";
  const DeviceGuard guard(op, x.device);
  const std::int64_t copies = x.size(0) * x.size(1);
  const double step = -2.0 * std::log(rotation.base) / static_cast<double>(x.size(3));
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto* kernel, std::int64_t pairs_of_thread) {
      const std::int64_t threads = x.size(2) * (x.size(3) / 2) / pairs_of_thread;
      const std::int64_t blocks = (threads + kThreads - 1) / kThreads;
      const std::int64_t shares =
          std::min({copies, std::max<std::int64_t>(1, kWantedBlocks / blocks), kMaxBlocks});
      kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(shares)), kThreads, 0,
               stream_of(workspace)>>>(tensor4<const T>(x), tensor4<T>(out),
                                       static_cast<int>(x.size(0)), static_cast<int>(x.size(1)),
                                       x.size(2), rotation.first, step, rotation.inverse ? -1 : 1);
      COTERIE_LAUNCH("rotate_pairs");
    };
    if constexpr (!std::is_same_v<T, double>) {
      if (in_fours<T>(x) && in_fours<T>(out)) return run(rotate_quads<T>, 4);
    }
    run(rotate_pairs<T>, 1);
  };
  if (x.dtype == DType::f64) return launch(TypeTag<double>{});
  dispatch_element(op, x.dtype, launch);
}

}  // namespace coterie::cuda
