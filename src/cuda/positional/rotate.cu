// SPDX-License-Identifier: MIT
// Rotation of rows by the angles of their positions: elements d and d + D/2 of row n become
//   (a cos t - b sin t, a sin t + b cos t),  t = (first + n) base^(-2 d / D)
//
// Grid and block: 256 threads, one for each pair (n, d); it computes its sine and cosine once, in
// double, and turns that pair in its share of all (batch, head). Several blocks in y share the
// heads where the pairs alone do not fill the device. Neighbouring threads have neighbouring d:
// both halves of a row are read and written in order. No shared memory; about 40 registers.
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

}  // namespace

void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out,
                 const Workspace& workspace) {
  const char* op = "rotate_rows";
  const DeviceGuard guard(op, x.device);
  const std::int64_t pairs = x.size(2) * (x.size(3) / 2), copies = x.size(0) * x.size(1);
  const std::int64_t blocks = (pairs + kThreads - 1) / kThreads;
  const std::int64_t shares =
      std::min({copies, std::max<std::int64_t>(1, kWantedBlocks / blocks), kMaxBlocks});
  const double step = -2.0 * std::log(rotation.base) / static_cast<double>(x.size(3));
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    rotate_pairs<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(shares)), kThreads, 0,
                   stream_of(workspace)>>>(
        tensor4<const T>(x), tensor4<T>(out), static_cast<int>(x.size(0)),
        static_cast<int>(x.size(1)), x.size(2), rotation.first, step, rotation.inverse ? -1 : 1);
    COTERIE_LAUNCH("rotate_pairs");
  };
  if (x.dtype == DType::f64) return launch(TypeTag<double>{});
  dispatch_element(op, x.dtype, launch);
}

}  // namespace coterie::cuda
