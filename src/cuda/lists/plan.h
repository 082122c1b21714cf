// SPDX-License-Identifier: MIT
// How a call of lists (lists.h) is computed: which kernel, in which form, and what each of its
// blocks does. Decided once, before anything is launched. plan.cu
#pragma once

#include <cstdint>

#include "cuda/lists/lists.h"
#include "cuda/lists/problem.cuh"

namespace coterie::cuda {

constexpr int kStreamBits = 6, kStreamRows = 1 << kStreamBits;  // of a tile, owned or streamed
constexpr int kForwardTileBits = 7;                             // of forward.cu

// The forms of a list kernel: what is decided when it is compiled.
enum class ListForm {
  plain,       // softmax over ranges
  normalised,  // and row statistics
  general,     // and filters, and laplace
};

// A stream of steps (stream.cuh): the steps of a block, and the tiles that its ring holds.
constexpr int kStreamPlan = 160;                        // steps of a block, at most
constexpr int kForwardGroups = 3, kBackwardGroups = 2;  // warpgroups that compute
constexpr int forward_ring(std::int64_t width, ListForm form) {
  return width > 64 ? 5 : form == ListForm::plain ? 10 : 9;
}
constexpr int backward_ring(ListForm form, bool keys) {
  return form == ListForm::plain && !keys ? 9 : 8;
}
// What blocks measure to cut steps by work (WorkCut), at most.
constexpr int kCutLists = 16384, kCutBlocks = 4096;
constexpr int kStepBits = 24;  // of a number of steps

struct StreamRun {
  int heads, of_head;  // of the owned side, and the steps of each
  int count;           // steps of a block, at most
  int blocks;
  bool rounds;   // as many steps as there are warpgroups walk over their tiles together
  bool by_work;  // WorkCut says which steps a block has

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
  StreamRun run;  // of the stream
  int fold;       // tiles of a window whose first and last tile are weighed as one; 0: none
};
ListForwardPlan plan_lists_forward(const AttentionCall& call, const ListCall& lists,
                                   const ListOutputs& outputs);

// The backward pass of windows: which tiles a block has. Tiles are numbered over the items of a
// head where items are packed, over the heads of an item otherwise; numbers may be without a tile.
constexpr int kWalkGroups = 4;  // warpgroups, each with a tile of keys
constexpr int kWalkWindow = kWalkGroups * kStreamRows;
struct WalkCut {
  int per_head;  // numbers of a head, or of an item and head
  int per_item;  // packed: numbers of an item, beside a number for every 64 rows
  int total, per_block;
  int reach;  // keys in sight behind a query's own
};

constexpr int kWholeTiles = 4;                          // of either side of a whole list
constexpr int kWholeRanks = kWholeTiles * kStreamRows;  // of a list

enum class ListBackwardKernel {
  tiles,       // backward.cu: a kernel for queries and one for keys, as the next two
  wide_tiles,  // the same by warpgroup products. backward_sm90a.cu
  stream,      // backward_sm90a.cu
  whole,       // all gradients in one kernel. whole_backward_sm90a.cu
  windows,     // window_backward_sm90a.cu
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
  bool clears;  // gradients.cleared become 0
};
ListBackwardPlan plan_lists_backward(const AttentionCall& call, const ListCall& lists,
                                     const ListGradients& gradients);

}  // namespace coterie::cuda
