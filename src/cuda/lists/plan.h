// SPDX-License-Identifier: MIT
// How a call of lists (lists.h) is computed: which kernel, in which form, and the work of each
// block. Decided once, before anything is launched. plan.cu
#pragma once

#include <cstdint>

#include "cuda/lists/lists.h"
#include "cuda/lists/problem.cuh"

namespace coterie::cuda {

constexpr int kStreamBits = 6, kStreamRows = 1 << kStreamBits;  // rows of a tile, owned or streamed
constexpr int kForwardTileBits = 7;                             // forward.cu

// The forms of a list kernel: what is decided at compile time.
enum class ListForm {
  plain,       // softmax over ranges
  normalised,  // with row statistics
  general,     // with statistics, filters and laplace
};

// A stream of steps (stream.cuh): the steps of a block, and the number of tiles in its ring.
constexpr int kStreamPlan = 160;                        // maximum steps per block
constexpr int kForwardGroups = 3, kBackwardGroups = 2;  // warpgroups that compute
constexpr int forward_ring(std::int64_t width, ListForm form) {
  return width > 64 ? 5 : form == ListForm::plain ? 10 : 9;
}
constexpr int backward_ring(ListForm form, bool keys) {
  return form == ListForm::plain && !keys ? 9 : 8;
}
// Limits for blocks that cut steps by work (WorkCut).
constexpr int kCutLists = 16384, kCutBlocks = 4096;
constexpr int kStepBits = 24;  // bits of a step count

struct StreamRun {
  int heads, of_head;  // heads of the owned side, and the steps of each
  int count;           // maximum steps per block
  int blocks;
  bool rounds;   // as many steps as there are warpgroups walk over their tiles together
  bool by_work;  // WorkCut assigns the steps to blocks

  // Number `place` of a block's steps, -1 if there is none.
  __device__ int in_order(int place) const {
    const int number = static_cast<int>(blockIdx.x) * count + place;
    return number < heads * of_head ? number : -1;
  }
};

struct ListForwardPlan {
  ListProblem problem;
  ListTiles tiles;
  ListForm form;
  bool stream;    // forward_sm90a.cu, else forward.cu
  StreamRun run;  // if stream
  int fold;       // tiles of a window whose first and last tile are weighted as one; 0: none
};
ListForwardPlan plan_lists_forward(const AttentionCall& call, const ListCall& lists,
                                   const ListOutputs& outputs);

// The backward pass of windows: the tiles of a block. If items are packed, tiles are numbered over
// the items of a head, otherwise over the heads of an item; some numbers have no tile.
constexpr int kWalkGroups = 4;  // warpgroups, each with one tile of keys
constexpr int kWalkWindow = kWalkGroups * kStreamRows;
struct WalkCut {
  int per_head;  // numbers per head, or per item and head
  int per_item;  // packed: numbers per item, in addition to one for every 64 rows
  int total, per_block;
  int reach;  // visible keys after a query's own
};

constexpr int kWholeTiles = 4;                          // on either side of a whole list
constexpr int kWholeRanks = kWholeTiles * kStreamRows;  // of a list

// Full attention and windows whose delta comes from the output (full_backward_sm90a.cu): keys of a
// block and queries of a tile.
constexpr int kFullKeyBits = 7;
constexpr int full_query_bits(std::int64_t width) { return width <= 64 ? 7 : 6; }
// Its scratch memory, empty for other calls.
struct FullScratch {
  float *shifts = nullptr, *deltas = nullptr;        // (B, H, N)
  float* sums = nullptr;                             // of dq: (H, tiles, 2, 4096)
  std::int32_t *turns = nullptr, *ticket = nullptr;  // turns: (H, tiles, 2)
};
FullScratch take_full(const AttentionCall& call, const ListCall& lists, Arena& arena);

enum class ListBackwardKernel {
  tiles,       // backward.cu: a kernel for queries and one for keys, as in the next two
  wide_tiles,  // the same with warpgroup products. backward_sm90a.cu
  stream,      // backward_sm90a.cu
  whole,       // all gradients in one kernel. whole_backward_sm90a.cu
  windows,     // window_backward_sm90a.cu
  full,        // full_backward_sm90a.cu
};
struct ListBackwardPlan {
  ListProblem problem;
  ListTiles q_tiles, k_tiles;
  ListForm form;
  ListBackwardKernel kernel;
  bool queries, keys;            // which sides are computed
  StreamRun query_run, key_run;  // of the stream
  WalkCut windows;
  int whole_lists;
  bool clears;  // gradients.cleared are zeroed
};
ListBackwardPlan plan_lists_backward(const AttentionCall& call, const ListCall& lists,
                                     const ListGradients& gradients);

}  // namespace coterie::cuda
