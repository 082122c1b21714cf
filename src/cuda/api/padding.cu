// SPDX-License-Identifier: MIT
// Writes a value to the rows of a tensor that belong to no item (a warp per row, the heads in a
// loop), or to every element of a tensor with any strides (a thread per element). No shared memory.
#include "cuda/api/padding.h"

#include <type_traits>

#include "cuda/api/entry.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/guard.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/element.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256;

// One warp per row of (B, rows), for all heads; blockIdx.y counts batch entries.
template <class T>
__global__ void __launch_bounds__(kThreads)
    padding_kernel(const __grid_constant__ Tensor4<T> tensor, int batches, int heads,
                   SequenceSpans spans, int items, float value) {
  const int row = (blockIdx.x * kThreads + threadIdx.x) / 32;
  if (row >= spans.rows) return;
  for (int batch = blockIdx.y; batch < batches; batch += gridDim.y) {
    if (spans.item_of(batch, row, items) >= 0) continue;
    for (int head = 0; head < heads; ++head)
      for (int d = threadIdx.x % 32; d < tensor.width; d += 32)
        tensor.rows(batch, head, row).data[d] = from_float<T>(value);
  }
}

// One thread per element, numbered in row-major order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    fill_kernel(const __grid_constant__ TensorView tensor, std::int64_t count, float value) {
  T element;
  if constexpr (std::is_same_v<T, std::int32_t>)
    element = static_cast<std::int32_t>(value);
  else
    element = from_float<T>(value);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    std::int64_t rest = i, offset = 0;
    for (int dim = tensor.rank - 1; dim >= 0; --dim) {
      offset += rest % tensor.sizes[dim] * tensor.strides[dim];
      rest /= tensor.sizes[dim];
    }
    static_cast<T*>(tensor.data)[offset] = element;
  }
}

template <class T>
void fill_padding_of(const TensorView& view, const Sequences& sequences, std::int64_t items,
                     float value, cudaStream_t stream) {
  const std::int64_t batches = view.size(0), rows = view.size(2);
  if (!ragged(sequences) || view.count() == 0) return;
  const dim3 grid(static_cast<unsigned>((rows + kThreads / 32 - 1) / (kThreads / 32)),
                  static_cast<unsigned>(min(batches, kMaxBlocks)));
  padding_kernel<T><<<grid, kThreads, 0, stream>>>(
      tensor4<T>(view), static_cast<int>(batches), static_cast<int>(view.size(1)),
      sequence_spans(sequences, rows), static_cast<int>(items), value);
  COTERIE_LAUNCH("padding");
}

}  // namespace

bool ragged(const Sequences& sequences) {
  return sequences.lengths.present() || sequences.cu_seqlens.present();
}

void zero_padding(const TensorView& tensor, const Sequences& sequences, std::int64_t items,
                  cudaStream_t stream) {
  dispatch_element("padding", tensor.dtype, [&](auto tag) {
    fill_padding_of<typename decltype(tag)::type>(tensor, sequences, items, 0.0f, stream);
  });
}

void fill_padding(float* values, std::int64_t batches, std::int64_t heads, std::int64_t rows,
                  const Sequences& sequences, std::int64_t items, float value,
                  cudaStream_t stream) {
  fill_padding_of<float>(
      TensorView::contiguous(values, DType::f32, {batches, heads, rows, 1}, Device::cuda),
      sequences, items, value, stream);
}

void fill(const TensorView& tensor, double value, const Workspace& workspace) {
  const std::int64_t count = tensor.count();
  if (count == 0) return;
  const DeviceGuard guard("fill", tensor.device);
  const auto launch = [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t blocks = min((count + kThreads - 1) / kThreads, std::int64_t{4096});
    fill_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(workspace)>>>(
        tensor, count, static_cast<float>(value));
    COTERIE_LAUNCH("fill");
  };
  if (tensor.dtype == DType::i32) return launch(TypeTag<std::int32_t>{});
  dispatch_element("fill", tensor.dtype, launch);
}

}  // namespace coterie::cuda
