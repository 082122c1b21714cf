// SPDX-License-Identifier: MIT
// The fold of the clustered backward pass (fold.cu): which list entries add to a tile of keys, and
// in what order.
#pragma once

#include <cstdint>

#include "cuda/clustered_bwd.h"
#include "cuda/device/block_scan.cuh"
#include "cuda/tuning.h"

namespace coterie::cuda {

constexpr int kMostKeys = 4096, kLeastKeys = 64;  // of a tile
constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / 32;
// Entries sorted at a time; a tile with more of them is added up in several rounds.
constexpr int kEntries = 2048;
static_assert(kEntries >= kMaxTopKeys, "a round takes at least one list");

// (key, list, slot) in one word, in the order in which entries are added; lists are numbered by
// head and cluster. A list has a key once, so words are distinct.
using Entry = unsigned long long;
constexpr int kSlotBits = 8, kKeyShift = 40;
static_assert(kMaxTopKeys <= 1 << kSlotBits, "a slot in its bits");

__device__ __forceinline__ Entry make_entry(int key, int list, int slot) {
  return static_cast<Entry>(key) << kKeyShift | static_cast<Entry>(list) << kSlotBits |
         static_cast<unsigned>(slot);
}
__device__ __forceinline__ int key_of(Entry entry) { return static_cast<int>(entry >> kKeyShift); }
__device__ __forceinline__ int list_of(Entry entry) {
  return static_cast<int>(entry >> kSlotBits & ((1ull << (kKeyShift - kSlotBits)) - 1));
}
__device__ __forceinline__ int slot_of(Entry entry) {
  return static_cast<int>(entry & ((1u << kSlotBits) - 1));
}

// Places of a cluster's units: the first one, and the second, which the others follow.
struct UnitPlaces {
  int first, second, units;
};

struct FoldMemory {
  Entry found[kEntries];
  UnitPlaces units[kEntries];
  int ends[kMostKeys];  // entries of each key, then where its next one goes
  int count;

  // Of the sorted entries.
  __device__ int key(int entry) const { return key_of(found[entry]); }
  __device__ int begin(int key) const { return key == 0 ? 0 : ends[key - 1]; }
};

// What a block works on.
template <class T>
struct FoldBlock {
  const BackwardArgs<T>& args;
  ItemChunk keys;
  int key_head;
  ItemSpan queries;

  // Of the lists of this key head: they follow each other.
  __device__ std::int64_t first_row() const {
    const BackwardShape& shape = args.shape;
    return (static_cast<std::int64_t>(keys.item) * shape.H + key_head * shape.group) *
           shape.clusters;
  }
  __device__ UnitPlaces unit_places(Entry entry) const {
    const BackwardShape& shape = args.shape;
    const int list = list_of(entry), from_first = list / shape.clusters;
    const int head = key_head * shape.group + from_first;
    const int cluster = list - from_first * shape.clusters;
    const std::int32_t* offset =
        args.lists.offsets +
        (static_cast<std::int64_t>(keys.item) * shape.H + head) * (shape.clusters + 1) + cluster;
    const int begin = offset[0], end = offset[1];
    return {shape.units.row(keys.item, head, cluster),
            shape.units.second_place(head, queries, begin),
            (end - begin + kUnitRows - 1) / kUnitRows};
  }

  // Finds the entries of lists [first, last) in any order, and counts them by key; returns their
  // number, of which at most kEntries are kept. A warp reads 32 slots of several lists at a time.
  __device__ int find(FoldMemory& memory, int first, int last) const {
    constexpr int kLists = 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, topk = args.shape.topk;
    const auto size = static_cast<unsigned>(keys.end - keys.begin);
    const std::int32_t* lists = args.lists.top_keys + first_row() * topk;
    __syncthreads();
    if (threadIdx.x == 0) memory.count = 0;
    for (unsigned i = threadIdx.x; i < size; i += kFoldThreads) memory.ends[i] = 0;
    __syncthreads();
    for (int slot = lane; slot - lane < topk; slot += 32)
      for (int base = first + warp; base < last; base += kLists * kFoldWarps) {
        const std::int32_t* from = lists + static_cast<std::int64_t>(base) * topk + slot;
        unsigned key[kLists];
#pragma unroll
        for (int i = 0; i < kLists; ++i, from += kFoldWarps * topk)
          key[i] = (slot < topk && base + i * kFoldWarps < last ? *from : -1) - keys.begin;
#pragma unroll
        for (int i = 0; i < kLists; ++i) {
          if (key[i] >= size) continue;
          atomicAdd(&memory.ends[key[i]], 1);
          const int place = atomicAdd(&memory.count, 1);
          if (place < kEntries)
            memory.found[place] = make_entry(static_cast<int>(key[i]), base + i * kFoldWarps, slot);
        }
      }
    __syncthreads();
    return memory.count;
  }
};

// Puts the `count` entries that were found in order: to the places of their keys, then each key's
// few among themselves. `entries` is memory to work in.
template <class T>
__device__ __forceinline__ void sort_entries(const FoldBlock<T>& block, FoldMemory& memory,
                                             Entry* entries, int count) {
  int carry = 0;
  const int size = block.keys.end - block.keys.begin;
  for (int first = 0; first < size; first += kFoldThreads) {
    const int key = first + static_cast<int>(threadIdx.x);
    const int start = block_exclusive_scan(key < size ? memory.ends[key] : 0, carry);
    if (key < size) memory.ends[key] = start;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kFoldThreads) {
    const Entry entry = memory.found[i];
    entries[atomicAdd(&memory.ends[key_of(entry)], 1)] = entry;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kFoldThreads) {
    const Entry entry = entries[i];
    const int key = key_of(entry), begin = memory.begin(key), end = memory.ends[key];
    int place = begin;
#pragma unroll 8
    for (int j = begin; j < end; ++j) place += entries[j] < entry;
    memory.found[place] = entry;
    memory.units[place] = block.unit_places(entry);
  }
  __syncthreads();
}

}  // namespace coterie::cuda
