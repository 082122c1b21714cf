// SPDX-License-Identifier: MIT
// Full attention by other libraries, on our memory and with our number of threads. The
// implementation is chosen at link time: opponent_torch.cc or opponent_none.cc.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/attention.h"

namespace coterie::bench {

struct Opponent {
  std::string name;  // "torch sdpa"; on a GPU with its back end: "torch sdpa (cudnn)"
  std::function<void()> forward, backward;
  std::function<TensorView()> output;      // of the last forward pass: (B, heads, N, D)
  std::function<void(int)> set_threads{};  // of the CPU
};

// The opponents for these data. They own their tensors, but `data` must outlive them. On a GPU
// torch has several back ends: each that accepts the data is tried, and the fastest in the passes
// to be measured is used.
std::vector<Opponent> make_opponents(const AttentionData& data, bool causal, Pass pass);

// A product of two large matrices on a GPU, taken as the machine's arithmetic peak.
struct MatrixProduct {
  std::function<void()> run;
  double flops = 0;
};
std::optional<MatrixProduct> make_matrix_product(DType dtype);

// "torch sdpa" and "torch 2.11.0: scaled_dot_product_attention on the CPU"; empty without one.
std::string opponent_name();
std::string opponent_description(Device device);

}  // namespace coterie::bench
