// SPDX-License-Identifier: MIT
// Cases of cluster_gpu_test.cu: inputs in host and device memory, outputs on the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/parallel.h"
#include "cuda/launch/launch.h"
#include "ops/call.h"
#include "ops/parts.h"

namespace coterie::gpu_test {

// A tensor in host memory and its counterpart on the device, which is initialised with a poison
// pattern.
class TwinTensor {
 public:
  TwinTensor() = default;
  TwinTensor(DType dtype, std::vector<std::int64_t> sizes) : host_(dtype, std::move(sizes)) {
    bytes_ = static_cast<std::size_t>(host_.view().count() * dtype_bytes(dtype));
    COTERIE_CUDA(cudaMalloc(&data_, std::max<std::size_t>(bytes_, 1)));
    poison();
  }
  TwinTensor(const TwinTensor&) = delete;
  TwinTensor& operator=(const TwinTensor&) = delete;
  ~TwinTensor() { cudaFree(data_); }

  void poison() { COTERIE_CUDA(cudaMemset(data_, 0xcd, bytes_)); }
  void upload() {
    COTERIE_CUDA(cudaMemcpy(data_, host_.view().data, bytes_, cudaMemcpyHostToDevice));
  }
  HostTensor& download() {
    COTERIE_CUDA(cudaMemcpy(host_.view().data, data_, bytes_, cudaMemcpyDeviceToHost));
    return host_;
  }
  HostTensor& host() { return host_; }
  TensorView view() const {
    TensorView view = host_.view();
    view.data = data_;
    view.device = Device::cuda;
    return view;
  }

 private:
  HostTensor host_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Case {
  std::string name;
  std::int64_t B = 1, H = 2, Hkv = 2, N = 129, S = 129, D = 64;
  DType dtype = DType::bf16;
  std::int64_t clusters = 16, iterations = kAutomatic;
  std::vector<int> q_lengths, k_lengths, q_seqlens, k_seqlens;
  bool rows_first = false;  // (B, N, H, D) in memory
  double offset = 0.5;      // added to all queries and keys
  int modes = 40;           // of the mixture the data are drawn from
  double noise = 0.6;       // around a mode
};

inline double cheap_normal(std::uint64_t index) {
  std::uint64_t z = index * 0x9E3779B97F4A7C15ull + 0x1234567ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  double sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<double>((z >> (16 * i)) & 0xffff) / 65536.0 - 0.5;
  return sum * 1.7320508;
}

// A tensor (B, H, N, D) in host and device memory.
struct Input {
  TwinTensor memory;
  bool rows_first;

  Input(const Case& c, std::int64_t heads, std::int64_t rows, std::int64_t width,
        std::uint64_t salt)
      : memory(c.dtype, c.rows_first ? std::vector<std::int64_t>{c.B, rows, heads, width}
                                     : std::vector<std::int64_t>{c.B, heads, rows, width}),
        rows_first(c.rows_first) {
    std::vector<double> middle;
    for (std::int64_t d = 0; d < width; ++d)
      middle.push_back(c.offset * std::sin(static_cast<double>(d)));
    void* data = memory.host().view().data;
    parallel_for(c.B * heads * rows, [&](std::int64_t i, int) {
      const auto row = static_cast<std::uint64_t>(i);
      const std::uint64_t mode = (row * 2654435761u + salt) % static_cast<std::uint64_t>(c.modes);
      for (std::int64_t d = 0; d < width; ++d) {
        const auto column = static_cast<std::uint64_t>(d);
        const double value = middle[static_cast<std::size_t>(d)] +
                             cheap_normal((mode << 20) + column + 99) +
                             c.noise * cheap_normal((row << 8) + column + (salt << 40));
        const std::int64_t at = i * width + d;
        if (c.dtype == DType::f32) static_cast<float*>(data)[at] = static_cast<float>(value);
        if (c.dtype == DType::bf16)
          static_cast<Bf16*>(data)[at] = to_bf16(static_cast<float>(value));
        if (c.dtype == DType::f16) static_cast<F16*>(data)[at] = to_f16(static_cast<float>(value));
      }
    });
    memory.upload();
  }
  TensorView host() {
    return rows_first ? memory.host().view().transposed(1, 2) : memory.host().view();
  }
  TensorView device() const { return rows_first ? memory.view().transposed(1, 2) : memory.view(); }
};

struct Ints {
  TwinTensor memory;
  explicit Ints(const std::vector<int>& values)
      : memory(DType::i32, {static_cast<std::int64_t>(values.size())}) {
    std::copy(values.begin(), values.end(), memory.host().data<std::int32_t>());
    memory.upload();
  }
};

// Inputs of a case in host and device memory, outputs on the device.
struct ClusterSetup {
  Case c;
  Input q, k, v;
  Ints q_lengths, k_lengths, q_seqlens, k_seqlens;
  AttentionInputs host, device;

  explicit ClusterSetup(const Case& which)
      : c(which),
        q(c, c.H, c.N, c.D, 1),
        k(c, c.Hkv, c.S, c.D, 2),
        v(c, c.Hkv, c.S, 1, 3),
        q_lengths(c.q_lengths),
        k_lengths(c.k_lengths),
        q_seqlens(c.q_seqlens),
        k_seqlens(c.k_seqlens) {
    host.q = q.host();
    host.k = k.host();
    host.v = v.host();
    device.q = q.device();
    device.k = k.device();
    device.v = v.device();
    host.seed = device.seed = 77;
    const auto give = [](Ints& ints, TensorView& on_host, TensorView& on_device) {
      if (ints.memory.host().view().size(0) == 0) return;
      on_host = ints.memory.host();
      on_device = ints.memory.view();
    };
    give(q_lengths, host.q_sequences.lengths, device.q_sequences.lengths);
    give(k_lengths, host.k_sequences.lengths, device.k_sequences.lengths);
    give(q_seqlens, host.q_sequences.cu_seqlens, device.q_sequences.cu_seqlens);
    give(k_seqlens, host.k_sequences.cu_seqlens, device.k_sequences.cu_seqlens);
  }

  ClusteringParams params(Clustering method) const {
    ClusteringParams p;
    p.clusters = c.clusters;
    p.method = method;
    p.iterations = c.iterations;
    if (p.iterations == kAutomatic)
      p.iterations = method == Clustering::keys ? 1 : method == Clustering::hamming_keys ? 3 : 10;
    return p;
  }
  AttentionCall call(const ClusteringParams& p, const AttentionInputs& inputs) const {
    ClusteredParams mechanism;
    mechanism.clustering = p;
    return ops::make_call(mechanism, inputs);
  }
  std::vector<Span> spans() const { return make_spans("test", host.q_sequences, c.B, c.N); }
  std::vector<Span> key_spans() const { return make_spans("test", host.k_sequences, c.B, c.S); }
};

struct Outputs {
  TwinTensor labels, order, offsets;
  Outputs(const Case& c, std::int64_t items)
      : labels(DType::i32, {c.B, c.H, c.N}),
        order(DType::i32, {c.B, c.H, c.N}),
        offsets(DType::i32, {items, c.H, c.clusters + 1}) {}
};

struct Scratch {
  void* data = nullptr;
  std::int64_t bytes;
  explicit Scratch(std::int64_t size) : bytes(size) {
    COTERIE_CUDA(cudaMalloc(&data, static_cast<std::size_t>(std::max<std::int64_t>(size, 1))));
    COTERIE_CUDA(cudaMemset(data, 0xcd, static_cast<std::size_t>(size)));
  }
  ~Scratch() { cudaFree(data); }
  Workspace workspace() const { return {data, bytes, nullptr}; }
};

}  // namespace coterie::gpu_test
