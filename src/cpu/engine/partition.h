// SPDX-License-Identifier: MIT
// Attention over lists that partition the tokens of a head: every query and every key is in at most
// one list of its (item, head), so each row of every output has one writer.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/call.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/rows.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// One list: queries and the keys they attend to.
template <class T>
struct ListPair {
  RowList queries, keys;
  Rule<T> rule;
};

// The lists of a call: `lists` of them per (item, head). Lists of query heads that share a key head
// have the same keys.
template <class T>
struct ListCall {
  std::int64_t lists = 1;
  std::function<ListPair<T>(std::int64_t item, std::int64_t head, std::int64_t list)> pair;
  T scale = 1;
  const T* head_scale = nullptr;  // optional (H) factors
  // Optional: changes the finished outputs tiles.o of queries [first, first + count) of a list, or
  // their gradients tiles.dq in the backward pass, before they are stored.
  std::function<void(const RowTile&tile, Tiles<T>&tiles)> finish, finish_backward;
  // Optional (B, H, N): the backward pass multiplies output gradients by it.
  const T* weight = nullptr;
};

template <class T>
Segment<T> make_segment(const AttentionCall& call, const ListCall<T>& plan, std::int64_t item,
                        std::int64_t head, const ListPair<T>& pair);

template <class T>
struct ListWorkspace {
  std::vector<Tiles<T>> tiles;  // one per thread
  T* delta = nullptr;           // (B, H, N)

  ListWorkspace(Arena& arena, const AttentionCall& call);
};

// out (B, H, N, Dv) and lse (B, H, N); rows beyond an item's length and rows without admissible
// keys get 0 and -inf. Every row of an item is in a list.
template <class T>
void lists_forward(const AttentionCall& call, const ListCall<T>& plan, const TensorView& out,
                   const TensorView& lse, ListWorkspace<T>& workspace);

struct ListGradients {
  TensorView out, lse, grad_out;  // of the forward pass
  TensorView dq, dk, dv;          // absent ones are not computed
};

// delta (B, H, N) = grad_out . output, into workspace.delta: from the stored output, or from
// recomputed weights if that was rounded to 16 bits. The rounding error would not cancel in small
// differences grad_out . v - delta.
template <class T>
void lists_deltas(const AttentionCall& call, const ListCall<T>& plan,
                  const ListGradients& gradients, ListWorkspace<T>& workspace);

// The two halves of the backward pass, from workspace.delta. The key half needs lists that do not
// share keys.
template <class T>
void lists_backward_queries(const AttentionCall& call, const ListCall<T>& plan,
                            const ListGradients& gradients, ListWorkspace<T>& workspace);
template <class T>
void lists_backward_keys(const AttentionCall& call, const ListCall<T>& plan,
                         const ListGradients& gradients, ListWorkspace<T>& workspace);

// Both halves in one pass. Needs a dq of type T and no plan.finish_backward.
template <class T>
void lists_backward_together(const AttentionCall& call, const ListCall<T>& plan,
                             const ListGradients& gradients, ListWorkspace<T>& workspace);

// Deltas, then both halves.
template <class T>
void lists_backward(const AttentionCall& call, const ListCall<T>& plan,
                    const ListGradients& gradients, ListWorkspace<T>& workspace);

// Backward inputs of the queries of a list.
template <class T>
RowGradients<T> list_row_gradients(const AttentionCall& call, const ListCall<T>& plan,
                                   const ListGradients& gradients, const T* delta,
                                   std::int64_t item, std::int64_t head, const RowList& list);

// Tiles of the queries of all lists.
template <class T>
std::vector<RowTile> list_query_tiles(const AttentionCall& call, const ListCall<T>& plan);

// Key lists by key/value head: `lists` per (item, head); a single list of all keys if `list` is
// empty.
struct KeyLists {
  std::int64_t lists = 1;
  std::function<RowList(std::int64_t item, std::int64_t kv_head, std::int64_t list)> list;
};

// The lists of a plan by key/value head; refers to the plan.
template <class T>
KeyLists key_lists(const AttentionCall& call, const ListCall<T>& plan);

// Adds the gradients of keys [tile.first, tile.first + tile.count) of a list from one query head to
// tiles.dk and tiles.dv.
template <class T>
using AddKeyTile = std::function<void(const RowTile& tile, std::int64_t head, Tiles<T>& tiles)>;

// Writes dk and dv (either may be absent): every tile of keys is the sum of `add` over the query
// heads that share the key/value head tile.head, in ascending order; keys in no item get 0. Tiles
// are scheduled by their index in a list, all first tiles first.
template <class T>
void write_key_tiles(const AttentionCall& call, const KeyLists& keys, const AddKeyTile<T>& add,
                     const TensorView& dk, const TensorView& dv, std::vector<Tiles<T>>& tiles);

}  // namespace coterie::cpu
