// SPDX-License-Identifier: MIT
// Attention of lists of queries over lists of keys: the one engine under full, local, strided,
// routing, LSH and CAST's inner attention.
//
// An item and head has `lists` pairs of lists. Row r of a query list sees the ranks [low, high) of
// its key list; low and high never decrease along a list. Tiles start at the start of every list,
// and a row's sums depend on the keys that it sees only. A place in a list is a slot.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/view.h"

namespace coterie::cuda {

// How slots are laid out and numbered, for queries (heads = H, rows = N) and keys (heads =
// key_heads, rows = S). An index holds rows counted from the item. It may have fewer heads than its
// side: then consecutive heads share lists (`index_heads`), but have slots of their own.
enum class ListLayout : std::uint8_t {
  // No index. List l holds the rows whose position is l modulo `lists`: all rows where there is one
  // list. Slots are the rows of (B, heads, rows).
  residues,
  // index (B, index_heads, rows * per_row): those of an item from begin * per_row, and list l is
  // there what lies in offsets[l] .. offsets[l + 1]. Slots (B, heads, rows * per_row).
  runs,
  // index (items, index_heads, lists, width): filled from the front, -1 beyond. Slots (items,
  // heads, lists, width).
  members,
  // index (B, index_heads, lists, rows): every list holds all rows of the item, in an order of its
  // own. Slots (B, heads, lists, rows).
  rounds,
};

struct ListSide {
  ListLayout layout = ListLayout::residues;
  const std::int32_t* index = nullptr;
  const std::int32_t* offsets = nullptr;  // runs: (items, index_heads, lists + 1)
  int index_heads = 1;
  int per_row = 1;         // runs
  std::int64_t width = 0;  // members
};

// Which ranks of the key list a query sees. With residues, r below is the rank that the query's own
// position has among the keys (causal calls: the last query stands at the last key); else its rank.
enum class ListRule : std::uint8_t {
  all,      // every key
  causal,   // up to and including r
  sliding,  // causal: [r - window + 1, r]; else [r - window / 2, r + (window + 1) / 2)
  blocked,  // blocks of `window` ranks: from `before` blocks before that of r to `after` behind it
  ends,     // [ends - window, ends) by query slot; ends never decrease along a list
};

struct ListRanges {
  ListRule rule = ListRule::all;
  bool causal = false;      // sliding, blocked: keys after r are out of sight
  std::int64_t window = 0;  // at most N + S
  std::int64_t before = 0, after = 0;
  const std::int32_t* ends = nullptr;  // one per query slot
};

// What else takes keys out of sight, all optional.
struct ListFilters {
  bool causal_rows = false;  // keys of rows beyond query row + offset (see call.position_offset)
  // Bit 0 of a query's flag takes out the key of its own position: by row (B, H, N), or by slot.
  const std::uint8_t* drop_own = nullptr;
  bool drop_by_slot = false;
  TensorView mask;  // u8 (B, H, N, S), strides may be 0; 0 = not admissible

  bool any() const { return causal_rows || drop_own || mask.present(); }
};

// As cpu/engine/segment.h: laplace(score) is not normalised and has no log-sum-exps.
enum class ListWeighting : std::uint8_t { softmax, laplace };

// Rows normalised on the fly: a row x counts as (x - mean) * inverse.
struct RowStatistics {
  float mean, inverse;
};

// What lists there are, and what rows see of each other.
struct ListCall {
  std::int64_t lists = 1;
  ListSide queries, keys;
  ListRanges ranges;
  ListFilters filters;
  ListWeighting weighting = ListWeighting::softmax;
  float scale = 1.0f;
  const float* head_scale = nullptr;       // optional (H) factors, on the device
  const RowStatistics* q_stats = nullptr;  // optional (B, H, N)
  const RowStatistics* k_stats = nullptr;  // optional (B, key_heads, S)
};

// Slots of a side: elements of arrays by slot.
std::int64_t list_query_slots(const AttentionCall& call, const ListCall& lists);
std::int64_t list_key_slots(const AttentionCall& call, const ListCall& lists);

// Results by row, where every row is in one list (rows in no item get 0 and -inf), or by slot.
// Queries that see no key get 0 and -inf.
struct ListOutputs {
  TensorView out;             // (B, H, N, Dv), if by row, of the inputs' type
  void* slot_rows = nullptr;  // (query slots, Dv), if by slot; empty slots are not written
  // (B, H, N), or by slot where the outputs are; null: not wanted. -inf in empty slots of members
  // and rounds. Natural logarithm, scale applied.
  float* lse = nullptr;
};

// Reads call.inputs.q, call.k and call.inputs.v. forward.cu
void lists_forward(const AttentionCall& call, const ListCall& lists, const ListOutputs& outputs,
                   cudaStream_t stream);

// One float per query row (B, H, N), or per query slot.
struct ListValues {
  const float* data = nullptr;
  bool by_slot = false;
};

// What the backward pass knows of the forward pass, and what it computes. Absent gradients (neither
// view nor pointer) are not computed.
struct ListGradients {
  TensorView grad_out;  // (B, H, N, Dv) of the inputs' type: a slot has that of its row
  ListValues weight;    // optional factor of output gradients
  ListValues lse;       // softmax only
  ListValues delta;     // gradient . output; null: recomputed, laid out as lse
  // By row, where every row is in one list: rows in no list get 0. Of key heads that share a value
  // head only by slot.
  TensorView dq, dk, dv;
  // dq and dk by row: of the rows before their normalisation by q_stats and k_stats.
  bool normalise = false;
  float* dq_products = nullptr;  // with it, optional (B, H, N): dq . normalised row, before that
  // By slot: (query slots, Dk), (key slots, Dk), (key slots, Dv), of floats, or of the inputs'
  // type. The slots of a key head take the sum over its query heads in ascending order. Empty slots
  // are not written.
  void *slot_dq = nullptr, *slot_dk = nullptr, *slot_dv = nullptr;
  bool slots_rounded = false;
  // Optional tensors that may become 0 on the way, where that costs next to nothing.
  std::array<TensorView, 3> cleared;
};

// Gradients with respect to q and k as the scores see them: with statistics those of the normalised
// rows, up to a constant per row, which the way back through the normalisation takes out. Returns
// whether `cleared` are 0 now. The next kernel starts behind all that came before this pass
// (SlotSumStart::slots_ready). backward.cu
bool lists_backward(const AttentionCall& call, const ListCall& lists,
                    const ListGradients& gradients, Arena& arena, cudaStream_t stream);

// delta[query slot] = sum over the keys in sight of exp(score - lse) gradient . v, times weight:
// the part of gradient . output that a list adds. backward.cu
void lists_delta(const AttentionCall& call, const ListCall& lists, const ListGradients& gradients,
                 float* delta, cudaStream_t stream);

}  // namespace coterie::cuda
