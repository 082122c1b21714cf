// SPDX-License-Identifier: MIT
// Attention of lists of queries over lists of keys: the engine shared by full, local, strided,
// routing, LSH and CAST's inner attention.
//
// Each item and head has `lists` pairs of lists. Row r of a query list sees the ranks [low, high)
// of its key list; low and high never decrease along a list. Tiles start at the start of every
// list, and a row's sums depend only on the keys that it sees. A place in a list is a slot.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "core/arena.h"
#include "core/call.h"
#include "coterie/view.h"

namespace coterie::cuda {

// How slots are laid out and numbered, for queries (heads = H, rows = N) and keys (heads =
// key_heads, rows = S). An index contains rows counted from the item. It may have fewer heads than
// its side: then consecutive heads share lists (`index_heads`), but have separate slots.
enum class ListLayout : std::uint8_t {
  // No index. List l contains the rows whose position is l modulo `lists`: all rows if there is one
  // list. Slots are the rows of (B, heads, rows).
  residues,
  // index (B, index_heads, rows * per_row): the entries of an item start at begin * per_row, and
  // list l is offsets[l] .. offsets[l + 1] of them. Slots (B, heads, rows * per_row).
  runs,
  // index (items, index_heads, lists, width): filled from the front, -1 beyond. Slots (items,
  // heads, lists, width).
  members,
  // index (B, index_heads, lists, rows): every list contains all rows of the item, each in its own
  // order. Slots (B, heads, lists, rows).
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

// Which ranks of the key list a query sees. With residues, r below is the rank of the query's own
// position among the keys (causal calls: the last query is at the last key); else the query's rank.
enum class ListRule : std::uint8_t {
  all,      // every key
  causal,   // up to and including r
  sliding,  // causal: [r - window + 1, r]; else [r - window / 2, r + (window + 1) / 2)
  blocked,  // blocks of `window` ranks: from `before` blocks before that of r to `after` after it
  earlier,  // [r - window + 1, r); rank 0 sees itself
  ends,     // [ends - window, ends) by query slot; ends never decrease along a list
};

struct ListRanges {
  ListRule rule = ListRule::all;
  bool causal = false;      // sliding, blocked: keys after r are not visible
  std::int64_t window = 0;  // at most N + S
  std::int64_t before = 0, after = 0;
  const std::int32_t* ends = nullptr;  // one per query slot
};

// What else hides keys; all optional.
struct ListFilters {
  bool causal_rows = false;  // hides keys of rows beyond query row + offset (call.position_offset)
  // Bit 0 of a query's flag hides the key of its own position: by row (B, H, N), or by slot.
  const std::uint8_t* drop_own = nullptr;
  bool drop_by_slot = false;
  TensorView mask;  // u8 (B, H, N, S), strides may be 0; 0 = not admissible

  bool any() const { return causal_rows || drop_own || mask.present(); }
};

// As in cpu/engine/segment.h: laplace(score) is not normalised and has no log-sum-exps.
enum class ListWeighting : std::uint8_t { softmax, laplace };

// Rows normalised on the fly: a row x is used as (x - mean) * inverse.
struct RowStatistics {
  float mean, inverse;
};

// The lists of a call, and which keys each query sees.
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

// Number of slots of a side: elements of arrays by slot.
std::int64_t list_query_slots(const AttentionCall& call, const ListCall& lists);
std::int64_t list_key_slots(const AttentionCall& call, const ListCall& lists);

// Results by row, if every row is in one list (rows in no item get 0 and -inf), or by slot. Queries
// that see no key get 0 and -inf.
struct ListOutputs {
  TensorView out;             // (B, H, N, Dv), if by row, of the inputs' type
  void* slot_rows = nullptr;  // (query slots, Dv), if by slot; empty slots are not written
  // (B, H, N), or by slot if the outputs are; null: not requested. -inf in empty slots of members
  // and rounds. Natural logarithm, scale applied.
  float* lse = nullptr;
};

// Reads call.inputs.q, call.k and call.inputs.v. lists.cu
void lists_forward(const AttentionCall& call, const ListCall& lists, const ListOutputs& outputs,
                   cudaStream_t stream);

// The same for one query per head over all the rows that a rule of positions lets it see, as in
// decoding: many blocks share the keys of a head. one_query.cu
bool takes_one_query(const AttentionCall& call, const ListCall& lists);
void attend_one_query(const AttentionCall& call, const ListCall& lists, const ListOutputs& outputs,
                      Arena& arena, cudaStream_t stream);

// One float per query row (B, H, N), or per query slot.
struct ListValues {
  const float* data = nullptr;
  bool by_slot = false;
};

// Inputs of the backward pass from the forward pass, and the gradients it computes. Absent
// gradients (neither view nor pointer) are not computed.
struct ListGradients {
  TensorView grad_out;  // (B, H, N, Dv) of the inputs' type: a slot uses that of its row
  ListValues weight;    // optional factor of output gradients
  ListValues lse;       // softmax only
  ListValues delta;     // gradient . output; null: recomputed, laid out as lse
  TensorView out;       // optional (B, H, N, Dv): gives delta, as rounded as it is
  // By row, if every row is in one list: rows in no list get 0. If key heads share a value head, dv
  // is only available by slot.
  TensorView dq, dk, dv;
  // dq and dk by row: with respect to the rows before normalisation by q_stats and k_stats.
  bool normalise = false;
  float* dq_products = nullptr;  // if so, optional (B, H, N): normalised row . its gradient
  // By slot: (query slots, Dk), (key slots, Dk), (key slots, Dv), of floats, or of the inputs'
  // type. The slots of a key head receive the sum over its query heads in ascending order. Empty
  // slots are not written.
  void *slot_dq = nullptr, *slot_dk = nullptr, *slot_dv = nullptr;
  bool slots_rounded = false;
  // Optional tensors that may be zeroed along the way, where that costs next to nothing.
  std::array<TensorView, 3> cleared;
};

// Gradients with respect to q and k as used in the scores: with statistics, those of the normalised
// rows, up to a constant per row, which the backward pass of the normalisation cancels. Returns
// whether `cleared` are now 0. The next kernel starts after everything that precedes this pass
// (SlotSumStart::slots_ready). lists.cu
bool lists_backward(const AttentionCall& call, const ListCall& lists,
                    const ListGradients& gradients, Arena& arena, cudaStream_t stream);

// delta[query slot] = sum over the visible keys of exp(score - lse) gradient . v, times weight: the
// part of gradient . output that a list contributes. lists.cu
void lists_delta(const AttentionCall& call, const ListCall& lists, const ListGradients& gradients,
                 float* delta, cudaStream_t stream);

}  // namespace coterie::cuda
