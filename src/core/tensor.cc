// SPDX-License-Identifier: MIT
#include "coterie/tensor.h"

#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "core/half.h"

namespace coterie {

std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return 1;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
  }
  fail("tensor", "unknown element type");
}

const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"f32", "f64", "bf16", "f16", "i32", "i64", "u64", "u8"};
  return kNames[static_cast<int>(dtype)];
}

const char* device_name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16 || dtype == DType::f16;
}

DType accumulator_dtype(DType input) { return input == DType::f64 ? DType::f64 : DType::f32; }

namespace {

TensorView dense_view(void* data, DType dtype, const std::int64_t* sizes, int rank, Device device) {
  COTERIE_CHECK(rank <= kMaxRank, "tensor", "expected at most ", kMaxRank, " dimensions; got ",
                rank);
  TensorView view{data, dtype, device, rank, {}, {}};
  std::int64_t stride = 1;
  for (int dim = rank - 1; dim >= 0; --dim) {
    COTERIE_CHECK(sizes[dim] >= 0, "tensor", "expected sizes of 0 or more; got ", sizes[dim]);
    view.sizes[dim] = sizes[dim];
    view.strides[dim] = stride;
    stride *= sizes[dim];
  }
  return view;
}

// Calls visit(flat row-major index, element offset) for every element.
template <class Visit>
void for_each_offset(const TensorView& tensor, Visit visit) {
  const std::int64_t count = tensor.count();
  std::int64_t index[kMaxRank] = {}, offset = 0;
  for (std::int64_t flat = 0; flat < count; ++flat) {
    visit(flat, offset);
    for (int dim = tensor.rank - 1; dim >= 0; --dim) {
      offset += tensor.strides[dim];
      if (++index[dim] < tensor.sizes[dim]) break;
      offset -= index[dim] * tensor.strides[dim];
      index[dim] = 0;
    }
  }
}

double load_element(const TensorView& tensor, std::int64_t offset) {
  switch (tensor.dtype) {
    case DType::f32:
      return static_cast<const float*>(tensor.data)[offset];
    case DType::f64:
      return static_cast<const double*>(tensor.data)[offset];
    case DType::bf16:
      return to_float(static_cast<const Bf16*>(tensor.data)[offset]);
    case DType::f16:
      return to_float(static_cast<const F16*>(tensor.data)[offset]);
    case DType::i32:
      return static_cast<const std::int32_t*>(tensor.data)[offset];
    case DType::i64:
      return static_cast<double>(static_cast<const std::int64_t*>(tensor.data)[offset]);
    case DType::u64:
      return static_cast<double>(static_cast<const std::uint64_t*>(tensor.data)[offset]);
    case DType::u8:
      return static_cast<const std::uint8_t*>(tensor.data)[offset];
  }
  return 0;
}

// Rounds towards zero and sets the last bit if the result is inexact. Rounding that to 16 bits
// gives the same as rounding `value` once.
float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || !std::isfinite(nearest)) return nearest;
  const bool away = std::abs(static_cast<double>(nearest)) > std::abs(value);
  return bits_to_float((float_to_bits(nearest) - (away ? 1 : 0)) | 1);
}

void store_element(const TensorView& tensor, std::int64_t offset, double value) {
  switch (tensor.dtype) {
    case DType::f32:
      static_cast<float*>(tensor.data)[offset] = static_cast<float>(value);
      return;
    case DType::f64:
      static_cast<double*>(tensor.data)[offset] = value;
      return;
    case DType::bf16:
      static_cast<Bf16*>(tensor.data)[offset] = to_bf16(round_to_odd(value));
      return;
    case DType::f16:
      static_cast<F16*>(tensor.data)[offset] = to_f16(round_to_odd(value));
      return;
    case DType::i32:
      static_cast<std::int32_t*>(tensor.data)[offset] = static_cast<std::int32_t>(value);
      return;
    case DType::i64:
      static_cast<std::int64_t*>(tensor.data)[offset] = static_cast<std::int64_t>(value);
      return;
    case DType::u64:
      static_cast<std::uint64_t*>(tensor.data)[offset] = static_cast<std::uint64_t>(value);
      return;
    case DType::u8:
      static_cast<std::uint8_t*>(tensor.data)[offset] = static_cast<std::uint8_t>(value);
      return;
  }
}

void check_host(const char* op, const TensorView& tensor) {
  COTERIE_CHECK(tensor.device == Device::cpu, op, "expected a tensor on the cpu; got one on ",
                describe(tensor.device));
}

}  // namespace

TensorView TensorView::contiguous(void* data, DType dtype,
                                  std::initializer_list<std::int64_t> sizes, Device device) {
  return dense_view(data, dtype, sizes.begin(), static_cast<int>(sizes.size()), device);
}

// Operations do not write to their inputs, so they use one type of view internally.
ConstTensorView ConstTensorView::contiguous(const void* data, DType dtype,
                                            std::initializer_list<std::int64_t> sizes,
                                            Device device) {
  return TensorView::contiguous(const_cast<void*>(data), dtype, sizes, device);
}

std::int64_t TensorView::count() const {
  if (!present()) return 0;
  std::int64_t count = 1;
  for (int dim = 0; dim < rank; ++dim) count *= sizes[dim];
  return count;
}

bool TensorView::is_contiguous() const {
  if (count() == 0) return true;  // no elements: strides do not matter
  std::int64_t stride = 1;
  for (int dim = rank - 1; dim >= 0; --dim) {
    if (sizes[dim] != 1 && strides[dim] != stride) return false;
    stride *= sizes[dim];
  }
  return true;
}

TensorView TensorView::transposed(int a, int b) const {
  TensorView view = *this;
  std::swap(view.sizes[a], view.sizes[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

TensorView TensorView::narrowed(int dim, std::int64_t begin, std::int64_t length) const {
  COTERIE_CHECK(dim >= 0 && dim < rank && begin >= 0 && length >= 0 && begin + length <= sizes[dim],
                "tensor", "expected a range inside dimension ", dim, " of ", describe(*this),
                "; got [", begin, ", ", begin + length, ")");
  TensorView view = *this;
  view.sizes[dim] = length;
  view.data = static_cast<char*>(data) + begin * strides[dim] * dtype_bytes(dtype);
  return view;
}

std::string describe(Device device) {
  if (device == Device(Device::cpu)) return "cpu";
  return std::string(device_name(device)) + ':' + std::to_string(device.index);
}

std::string describe(const TensorView& tensor) {
  if (!tensor.present()) return "nothing";
  std::ostringstream text;
  text << dtype_name(tensor.dtype) << " (";
  for (int dim = 0; dim < tensor.rank; ++dim) text << (dim ? ", " : "") << tensor.size(dim);
  text << ')';
  if (tensor.device != Device::cpu) text << " on " << describe(tensor.device);
  return text.str();
}

TensorView view_of(const TensorLayout& layout, void* data, Device device) {
  return dense_view(data, layout.dtype, layout.sizes.data(), static_cast<int>(layout.sizes.size()),
                    device);
}

HostTensor::HostTensor(DType dtype, std::vector<std::int64_t> sizes) {
  view_ = dense_view(nullptr, dtype, sizes.data(), static_cast<int>(sizes.size()), Device::cpu);
  const std::int64_t bytes = view_.count() * dtype_bytes(dtype);
  if (bytes == 0) return;
  const std::int64_t padded = (bytes + 63) / 64 * 64;
  storage_.reset(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<std::size_t>(padded))));
  COTERIE_CHECK(storage_ != nullptr, "tensor", "cannot allocate ", bytes, " bytes");
  std::memset(storage_.get(), 0, static_cast<std::size_t>(bytes));
  view_.data = storage_.get();
}

HostTensor::HostTensor(const HostTensor& other)
    : HostTensor(other.view_.dtype, {other.view_.sizes, other.view_.sizes + other.view_.rank}) {
  if (other.storage_)
    std::memcpy(view_.data, other.view_.data,
                static_cast<std::size_t>(view_.count() * dtype_bytes(view_.dtype)));
}

std::vector<double> read_values(const TensorView& tensor) {
  check_host("read_values", tensor);
  std::vector<double> values(static_cast<std::size_t>(tensor.count()));
  for_each_offset(tensor, [&](std::int64_t flat, std::int64_t offset) {
    values[static_cast<std::size_t>(flat)] = load_element(tensor, offset);
  });
  return values;
}

void write_values(const TensorView& tensor, const std::vector<double>& values) {
  COTERIE_CHECK(static_cast<std::int64_t>(values.size()) == tensor.count(), "write_values",
                "expected ", tensor.count(), " values; got ", values.size());
  fill(tensor, [&](std::int64_t flat) { return values[static_cast<std::size_t>(flat)]; });
}

void fill(const TensorView& tensor, const std::function<double(std::int64_t)>& value) {
  check_host("fill", tensor);
  for_each_offset(tensor, [&](std::int64_t flat, std::int64_t offset) {
    store_element(tensor, offset, value(flat));
  });
}

}  // namespace coterie
