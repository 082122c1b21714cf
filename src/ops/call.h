// SPDX-License-Identifier: MIT
// Preconditions of attention calls.
#pragma once

#include "core/call.h"
#include "coterie/attention.h"

namespace coterie::ops {

// Checks the inputs against the (resolved) mechanism and each other.
AttentionCall make_call(const Mechanism& mechanism, const AttentionInputs& inputs);

// The same for parts.h: q, k, v, lengths, scale and causal only.
AttentionCall make_part_call(const char* op, const AttentionInputs& inputs);

// The number of threads that pay off if a query attends to up to `keys` keys. Fewer for one query
// per sequence, as in decoding: waking threads takes longer than a small call.
int most_threads(const AttentionCall& call, std::int64_t keys);

// For operations that only the CPU has.
void check_cpu(const char* op, const char* name, const TensorView& tensor);
void check_shape(const char* op, const char* name, const TensorView& tensor,
                 const std::vector<std::int64_t>& sizes);
void check_dtype(const char* op, const char* name, const TensorView& tensor, DType dtype);
// Rank as given, last dimension contiguous, on `device`.
void check_rows(const char* op, const char* name, const TensorView& tensor, int rank,
                Device device = Device::cpu);
// Tensors that a call writes or reads whole: type, shape, contiguous, on `device`.
void check_dense(const char* op, const char* name, const TensorView& tensor, DType dtype,
                 const std::vector<std::int64_t>& sizes, Device device = Device::cpu);

void check_saved(const AttentionCall& call, const SavedLayout& layout,
                 const std::vector<TensorView>& saved, std::size_t count);
void check_gradients(const Mechanism& mechanism, const AttentionCall& call,
                     const TensorView& grad_out, const AttentionGradients& gradients);

// The saved tensors of a checked call with a resolved mechanism.
SavedLayout saved_layout(const Mechanism& mechanism, const AttentionCall& call);

}  // namespace coterie::ops
