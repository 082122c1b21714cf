// SPDX-License-Identifier: MIT
// Context parallel attention (Ulysses, Jacobs et al. 2023). Between layers each of P ranks has a
// slice of every sequence. For attention an exchange gives it the whole sequences of 1/P of the
// heads of every group, so mechanisms run unchanged; a second exchange returns the outputs. The
// heads of cast choose their clusters together: each rank gets the whole sequences of all heads for
// that choice (queries and keys, without gradients), and makes the same one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "coterie/spec.h"

namespace coterie::torch_api {

// The ranks that share the sequences of a batch, and how they exchange bytes.
struct SequenceRanks {
  using Sizes = std::vector<std::int64_t>;

  std::int64_t rank = 0, size = 1;
  // Sends to[i] consecutive bytes of a one-dimensional tensor to rank i and returns those that came
  // from ranks 0, 1, ..., from[i] each. All ranks call it in the same order.
  std::function<at::Tensor(const at::Tensor& bytes, const Sizes& to, const Sizes& from)> exchange;
};

// The positions of a rank: sizes differ by at most one.
struct SequenceSlice {
  std::int64_t first = 0, count = 0;
};
SequenceSlice sequence_slice(std::int64_t length, std::int64_t rank, std::int64_t size);

// Each part is (B, n, H, D): this rank's positions of all heads, H a multiple of P. Returns
// (B, N, H/P, D): all N positions of heads rank H/P, ..., (rank + 1) H/P - 1. One exchange for all
// parts; differentiable.
std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& parts, const SequenceRanks& ranks,
                                 std::int64_t length);
// The inverse.
std::vector<at::Tensor> to_positions(const std::vector<at::Tensor>& parts,
                                     const SequenceRanks& ranks);

// Each part is (B, n, ...): this rank's positions. Returns (B, N, ...): all of them, on every rank.
// Differentiable: the gradients of all ranks are added.
std::vector<at::Tensor> to_all(const std::vector<at::Tensor>& parts, const SequenceRanks& ranks,
                               std::int64_t length);

// Throws Error unless `ranks` divides the query and key/value heads of every group of a layer.
void check_sequence_ranks(const AttentionSpec& spec, std::int64_t heads, std::int64_t kv_heads,
                          std::int64_t ranks);

}  // namespace coterie::torch_api
