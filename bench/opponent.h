// SPDX-License-Identifier: MIT
// Full attention by other libraries, on our memory and with our number of threads. Which there are
// is settled when the program is linked: opponent_torch.cc, or opponent_none.cc.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/attention.h"

namespace coterie::bench {

struct Opponent {
  std::string name;
  std::function<void()> forward, backward;
  std::function<TensorView()> output;  // of the last forward pass: (B, heads, N, D)
};

// The opponents for these data; what they are made of lives as long as they, the data longer.
std::vector<Opponent> make_opponents(const AttentionData& data, bool causal);

// "torch sdpa" and "torch 2.11.0: scaled_dot_product_attention on the CPU"; empty without one.
std::string opponent_name();
std::string opponent_description();

}  // namespace coterie::bench
