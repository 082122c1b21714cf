// SPDX-License-Identifier: MIT
#include "cuda/padding.h"

#include "cuda/device/element.cuh"
#include "cuda/device/problem.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

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

template <class T>
void fill(const TensorView& view, const Sequences& sequences, std::int64_t items, float value,
          cudaStream_t stream) {
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
    fill<typename decltype(tag)::type>(tensor, sequences, items, 0.0f, stream);
  });
}

void fill_padding(float* values, std::int64_t batches, std::int64_t heads, std::int64_t rows,
                  const Sequences& sequences, std::int64_t items, float value,
                  cudaStream_t stream) {
  fill<float>(TensorView::contiguous(values, DType::f32, {batches, heads, rows, 1}, Device::cuda),
              sequences, items, value, stream);
}

}  // namespace coterie::cuda
