// SPDX-License-Identifier: MIT
#include "bench/tensor.h"

#include <cstring>
#include <utility>

#include "bench/device.h"
#include "coterie/error.h"

namespace coterie::bench {
namespace {

// Copies the elements in row-major order to host memory, one contiguous run at a time.
void copy_dense(const TensorView& from, char* to) {
  if (from.count() == 0) return;
  if (from.is_contiguous()) {
    const std::int64_t bytes = bytes_of(from);
    if (from.device == Device::cuda) return copy_to_host(to, from.data, bytes);
    std::memcpy(to, from.data, static_cast<std::size_t>(bytes));
    return;
  }
  int dim = 0;
  while (from.size(dim) == 1) ++dim;
  const std::int64_t share = bytes_of(from) / from.size(dim);
  for (std::int64_t i = 0; i < from.size(dim); ++i) {
    copy_dense(from.narrowed(dim, i, 1), to + i * share);
  }
}

}  // namespace

Tensor::Tensor(const TensorLayout& layout, Device device) {
  if (device == Device::cpu) {
    host_ = HostTensor(layout);
    view_ = host_.view();
    return;
  }
  view_ = view_of(layout, nullptr, device);
  device_ = device_memory(bytes_of(view_));
  view_.data = device_.get();
}

Tensor::Tensor(HostTensor values, Device device) {
  if (device == Device::cpu) {
    host_ = std::move(values);
    view_ = host_.view();
    return;
  }
  *this = Tensor({"", values.view().dtype, sizes_of(values)}, device);
  copy_to_device(view_.data, values.view().data, bytes_of(values));
}

std::vector<std::int64_t> sizes_of(const TensorView& view) {
  return {view.sizes, view.sizes + view.rank};
}

std::int64_t bytes_of(const TensorView& view) { return view.count() * dtype_bytes(view.dtype); }

HostTensor host_copy(const TensorView& view) {
  HostTensor copy(view.dtype, sizes_of(view));
  copy_dense(view, copy.data<char>());
  return copy;
}

void poison(const TensorView& view) {
  if (!view.is_contiguous()) {
    throw Error("[bench] expected a contiguous tensor to poison; got " + describe(view));
  }
  if (view.device == Device::cuda) {
    fill_device(view.data, 0xff, bytes_of(view));
  } else if (view.count() > 0) {
    std::memset(view.data, 0xff, static_cast<std::size_t>(bytes_of(view)));
  }
}

}  // namespace coterie::bench
