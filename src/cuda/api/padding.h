// SPDX-License-Identifier: MIT
// Padding: rows of tensors that belong to no item.
#pragma once

#include <cuda_runtime.h>

#include "core/call.h"
#include "coterie/view.h"

namespace coterie::cuda {

// Whether rows may belong to no item.
bool ragged(const Sequences& sequences);

// Zeroes the padding of a (B, heads, rows, D) tensor. Does nothing without lengths and offsets.
void zero_padding(const TensorView& tensor, const Sequences& sequences, std::int64_t items,
                  cudaStream_t stream);

// Writes `value` to the padding of floats (B, heads, rows).
void fill_padding(float* values, std::int64_t batches, std::int64_t heads, std::int64_t rows,
                  const Sequences& sequences, std::int64_t items, float value, cudaStream_t stream);

}  // namespace coterie::cuda
