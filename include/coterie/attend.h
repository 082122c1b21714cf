// SPDX-License-Identifier: MIT
// Attention of listed queries over listed keys: what the mechanisms are made of. Attention over all
// keys is the mechanism "full", over a window of positions "local" (attention.h).
//
// Every operation sees queries q (B, H, N, Dk), keys k (B, Hkv, S, Dk), values v (B, Hkv, S, Dv) of
// AttentionInputs, with its lengths, scale and causal rule, and takes index lists (int32, counted
// from the start of the item). Outputs lse are of the accumulator type. Backward passes take the
// forward's out and lse, and write dq, dk, dv in full. Tensors are on the CPU; on a GPU whole
// mechanisms run (attention.h).
#pragma once

#include <cstdint>

#include "coterie/attention.h"
#include "coterie/group.h"
#include "coterie/tensor.h"

namespace coterie {

// A band in permuted order with segment limits: the query in slot s of `queries` (its cluster's
// run) attends to the `window` latest keys of the same cluster of `keys` that are not after it.
// With one cluster and identity orders this is causal sliding-window attention. Needs equal query
// and key lengths. out (B, H, N, Dv), lse (B, H, N).
struct BandedLists {
  Groups queries;  // offsets (items, H, C+1)
  Groups keys;     // order (B, Hkv, S), offsets (items, Hkv, C+1)
  std::int64_t window = 0;
};
std::int64_t attend_banded_workspace_bytes(const AttentionInputs& inputs, const BandedLists& lists);
void attend_banded(const AttentionInputs& inputs, const BandedLists& lists, const TensorView& out,
                   const TensorView& lse, const Workspace& workspace);
void attend_banded_backward(const AttentionInputs& inputs, const BandedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace);

// A shared key list per group: all queries of cluster c attend to keys[item, head, c, :] (-1 =
// empty slot, ascending), with `causal` only to those not after them. out (B, H, N, Dv), lse (B, H,
// N).
struct SharedLists {
  Groups queries;   // order (B, H, N), offsets (items, H, C+1)
  TensorView keys;  // (items, H, C, k)
};
std::int64_t attend_shared_workspace_bytes(const AttentionInputs& inputs, const SharedLists& lists);
void attend_shared(const AttentionInputs& inputs, const SharedLists& lists, const TensorView& out,
                   const TensorView& lse, const Workspace& workspace);
void attend_shared_backward(const AttentionInputs& inputs, const SharedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace);

// Groups of equal size: slot p of group c is query queries[item, head, c, p] attending to all keys
// keys[item, key head, c, :] (-1 = empty, ascending), with `causal` only to those not after it. A
// token may be in any number of groups, so outputs stay per slot: out (items, H, C, w, Dv), lse
// (items, H, C, w). grad_out of the backward has out's shape; result.saved[0] is lse.
struct MemberLists {
  TensorView queries;  // (items, H, C, wq)
  TensorView keys;     // (items, Hkv, C, wk)
};
std::int64_t attend_members_workspace_bytes(const AttentionInputs& inputs,
                                            const MemberLists& lists);
void attend_members(const AttentionInputs& inputs, const MemberLists& lists, const TensorView& out,
                    const TensorView& lse, const Workspace& workspace);
void attend_members_backward(const AttentionInputs& inputs, const MemberLists& lists,
                             const AttentionResult& result, const TensorView& grad_out,
                             const AttentionGradients& gradients, const Workspace& workspace);

// Merges attention over disjoint key sets: parts (P, R, Dv) with part_lse (P, R) give the attention
// over the union, out (R, Dv) and lse (R). An empty part has lse -inf. All of one accumulator type.
void merge_partials(const TensorView& parts, const TensorView& part_lse, const TensorView& out,
                    const TensorView& lse, const Workspace& workspace = {});

}  // namespace coterie
