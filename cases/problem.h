// SPDX-License-Identifier: MIT
// Inputs generated from a case and a seed, and memory for running it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cases/buffers.h"
#include "cases/cases.h"
#include "coterie/mechanism.h"
#include "coterie/tensor.h"

namespace coterie::cases {

// Inputs of attention and the gradient of its output. The views point into `storage`, so a problem
// can be moved but not copied. Rows that belong to no sequence are NaN.
struct Problem {
  Problem() = default;
  Problem(Problem&&) = default;
  Problem& operator=(Problem&&) = default;

  Mechanism mechanism;
  AttentionInputs inputs;
  TensorView grad_out;  // (B, H, N, Dv)
  Layout layout = Layout::bhnd;
  std::vector<HostTensor> storage;
};

// Values are a pure function of case and seed.
Problem make_problem(const Case& c, std::uint64_t seed);

// What a pass writes. Before the pass floating-point elements are NaN and integers 0x7F7F..., which
// reveals elements that were not written. out and gradients have the problem's layout.
struct Pass {
  Pass() = default;
  Pass(Pass&&) = default;
  Pass& operator=(Pass&&) = default;

  AttentionResult result;
  std::size_t selection_count = 0;
  AttentionGradients gradients;
  Buffers buffers;      // of the saved tensors and the workspace
  Workspace workspace;  // of exactly the required size
  std::vector<HostTensor> storage;
};

// Allocates the memory without running anything.
Pass prepare(const Problem& problem);
// attention_forward in fresh memory.
Pass run_forward(const Problem& problem);
// attention_backward after run_forward, with every gradient that the problem has.
void run_backward(const Problem& problem, Pass& run);

// The number of rows of batch entry b that belong to a sequence; the rest is padding.
std::int64_t used_rows(const Sequences& sequences, std::int64_t b, std::int64_t rows);

// Fills all elements of a contiguous tensor with the pattern that Pass describes.
void poison(const TensorView& tensor);
// A view of a new poisoned tensor with the given layout; sizes (B, H, N, D).
TensorView new_tensor(std::vector<HostTensor>& storage, DType dtype,
                      const std::vector<std::int64_t>& sizes, Layout layout = Layout::bhnd);

}  // namespace coterie::cases
