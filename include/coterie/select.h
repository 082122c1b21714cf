// SPDX-License-Identifier: MIT
// Exact selection of the best tokens by inner product, without storing the scores. Tensors are on
// the CPU; on a GPU whole mechanisms run (attention.h).
#pragma once

#include "coterie/attention.h"
#include "coterie/tensor.h"

namespace coterie {

// For every row r of `rows` the indices of its `count` best valid tokens of x by rows_r . x_j: top
// keys of a centroid, top tokens of a cluster. Better score first, then lower index; NaN ranks as
// -inf. rows (items|1, H, R, D) of x's accumulator type, x (B, Hx, N, D) with H a multiple of Hx
// or the reverse. indices (items, max(H, Hx), R, count) int32, ascending, -1 where tokens ran out.
void select_top(const TensorView& rows, const TensorView& x, const Sequences& sequences,
                const TensorView& indices, const Workspace& workspace = {});

}  // namespace coterie
