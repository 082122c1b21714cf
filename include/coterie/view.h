// SPDX-License-Identifier: MIT
// Tensors as the library sees them: a pointer, an element type, a device, sizes and strides. Every
// kernel file includes this header, so it includes little of the standard library.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace coterie {

enum class DType : std::uint8_t { f32, f64, bf16, f16, i32, i64, u64, u8 };

// Where memory is: Device::cpu, or a GPU by CUDA's number, Device(Device::cuda, 1). Device::cuda
// alone is GPU 0. Comparison with a kind ignores the number.
struct Device {
  enum Kind : std::uint8_t { cpu, cuda };
  Kind kind = cpu;
  int index = 0;

  constexpr Device() = default;
  constexpr Device(Kind of_kind, int number = 0)  // NOLINT: a kind is usable as its device 0
      : kind(of_kind), index(number) {}
};
constexpr bool operator==(Device a, Device b) { return a.kind == b.kind && a.index == b.index; }
constexpr bool operator!=(Device a, Device b) { return !(a == b); }
constexpr bool operator==(Device device, Device::Kind kind) { return device.kind == kind; }
constexpr bool operator!=(Device device, Device::Kind kind) { return device.kind != kind; }

std::int64_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);
const char* device_name(Device device);  // of its kind: "cpu", "cuda"
bool is_floating(DType dtype);

// The element type of everything the library accumulates or saves for inputs of type `input`:
// f64 for f64, f32 for all others.
DType accumulator_dtype(DType input);

constexpr int kMaxRank = 5;

// A non-owning view. Strides count elements. A default-constructed view is "absent": an optional
// argument that was not given.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int rank = 0;
  std::int64_t sizes[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};

  // A view of densely packed row-major memory.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> sizes,
                               Device device = Device::cpu);

  bool present() const { return rank > 0; }
  std::int64_t size(int dim) const { return sizes[dim]; }
  std::int64_t stride(int dim) const { return strides[dim]; }
  std::int64_t count() const;  // number of elements; 0 when absent
  bool is_contiguous() const;

  // The view with dimensions a and b exchanged: (B,N,H,D) data becomes (B,H,N,D) without a copy.
  TensorView transposed(int a, int b) const;
  // The view of [begin, begin+length) in one dimension.
  TensorView narrowed(int dim, std::int64_t begin, std::int64_t length) const;
};

// A view of memory that the library only reads: the type of inputs. Any view converts to it.
struct ConstTensorView : TensorView {
  ConstTensorView() = default;
  ConstTensorView(const TensorView& view) : TensorView(view) {}  // NOLINT: any view can be read

  static ConstTensorView contiguous(const void* data, DType dtype,
                                    std::initializer_list<std::int64_t> sizes,
                                    Device device = Device::cpu);
};

// Views of densely packed row-major memory, with the element type of the pointer: float, double,
// std::int32_t, std::int64_t, std::uint64_t or std::uint8_t. C++20 has no type for bf16 and f16;
// use contiguous() for them.
template <class T>
constexpr DType dtype_of_type();
template <class T>
TensorView view(T* data, std::initializer_list<std::int64_t> sizes, Device device = Device::cpu) {
  return TensorView::contiguous(data, dtype_of_type<T>(), sizes, device);
}
template <class T>
ConstTensorView view(const T* data, std::initializer_list<std::int64_t> sizes,
                     Device device = Device::cpu) {
  return ConstTensorView::contiguous(data, dtype_of_type<T>(), sizes, device);
}
template <>
constexpr DType dtype_of_type<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of_type<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of_type<std::int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of_type<std::int64_t>() {
  return DType::i64;
}
template <>
constexpr DType dtype_of_type<std::uint64_t>() {
  return DType::u64;
}
template <>
constexpr DType dtype_of_type<std::uint8_t>() {
  return DType::u8;
}

// Scratch memory and stream of one call. `bytes` comes from the matching ..._workspace_bytes
// function (operations without one need none); contents before and after the call are unspecified.
// Memory and stream belong to the device of the tensors, on which the call runs. `stream` is a
// cudaStream_t for tensors on Device::cuda and unused on the CPU.
struct Workspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
  void* stream = nullptr;
};

}  // namespace coterie
