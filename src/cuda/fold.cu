// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, clustered_bwd.h) to the rows of dk and dv. A
// block owns a tile of keys. It looks through the lists of all clusters for keys of its tile, sorts
// what it finds by key, then by head and cluster, and adds it by a quarter of a warp per key.
#include "cuda/clustered_bwd.h"
#include "cuda/device/await.cuh"
#include "cuda/device/element.cuh"
#include "cuda/device/group.cuh"
#include "cuda/device/row_sums.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kMostKeys = 1024, kLeastKeys = 64;  // of a tile
constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / 32;
constexpr int kRowLanes = 8;  // that add up one key's rows
// Entries sorted at a time; a tile with more of them is added up in several rounds.
constexpr int kEntries = 1024;
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

// Rows of scratch.slots: one for each unit of the cluster, topk rows apart.
struct SlotRows {
  int first, units;
};

struct FoldMemory {
  Entry found[kEntries], entries[kEntries];
  SlotRows rows[kEntries];
  int ends[kMostKeys];  // entries of each key, then where its next one goes
  int count;
};

// What a block works on.
template <class T>
struct FoldBlock {
  const BackwardArgs<T>& args;
  KeyChunk keys;
  int key_head;
  ItemSpan queries;

  __device__ int head(int list) const {
    return key_head * args.shape.group + list / args.shape.clusters;
  }
  __device__ SlotRows slot_rows(Entry entry) const {
    const BackwardShape& shape = args.shape;
    const int list = list_of(entry), cluster = list % shape.clusters;
    const std::int64_t problem = static_cast<std::int64_t>(keys.item) * shape.H + head(list);
    const std::int32_t* offset = args.lists.offsets + problem * (shape.clusters + 1) + cluster;
    const int begin = offset[0], end = offset[1];
    const int unit =
        head(list) * shape.units.total + shape.units.first_tile(keys.item, cluster, queries, begin);
    return {unit * shape.topk + slot_of(entry), (end - begin + kUnitRows - 1) / kUnitRows};
  }

  // Finds the entries of lists [first, last) in any order, and counts them by key; returns their
  // number, of which at most kEntries are kept. A warp reads 32 slots of several lists at a time.
  __device__ int find(FoldMemory& memory, int first, int last) const {
    constexpr int kLists = 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, topk = args.shape.topk;
    const auto size = static_cast<unsigned>(keys.end - keys.begin);
    // The lists of the query heads of a key head follow each other.
    const std::int32_t* lists =
        args.lists.top_keys + (static_cast<std::int64_t>(keys.item) * args.shape.H + head(0)) *
                                  args.shape.clusters * topk;
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
// few among themselves.
template <class T>
__device__ __forceinline__ void sort_entries(const FoldBlock<T>& block, FoldMemory& memory,
                                             int count) {
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
    memory.entries[atomicAdd(&memory.ends[key_of(entry)], 1)] = entry;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kFoldThreads) {
    const Entry entry = memory.entries[i];
    const int key = key_of(entry), begin = key == 0 ? 0 : memory.ends[key - 1];
    int place = begin;
    for (int j = begin; j < memory.ends[key]; ++j) place += memory.entries[j] < entry;
    memory.found[place] = entry;
    memory.rows[place] = block.slot_rows(entry);
  }
  __syncthreads();
}

// Neighbouring elements of a row of dk or dv, 16 bytes.
template <class T>
struct RowElements {
  static constexpr int kCount = VectorSum<T>::kVector;
  T* to;
  int there;  // how many of them are in the row
  bool aligned;
  VectorSum<T> sum;

  // `column` counts through a row of dk and one of dv, both of `pitch` elements.
  __device__ RowElements(const Rows<T>& dk, const Rows<T>& dv, unsigned row, int column,
                         int pitch) {
    const bool second = column >= pitch;
    if (second) column -= pitch;
    const Rows<T>& rows = second ? dv : dk;
    to = rows.row(row) + column;
    there = rows.data ? min(max(rows.width - column, 0), kCount) : 0;
    aligned = rows.aligned && there == kCount;
    if (there == 0) return;
    sum.add(aligned ? *reinterpret_cast<const uint4*>(to) : load_chunk(to, 0, there));
  }
  __device__ void add(const VectorSum<T>& other) {
    union {
      uint4 words;
      T element[kCount];
    } chunk;
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunk.element[i] = from_float<T>(sum.sum[i] + other.sum[i]);
    if (aligned)
      *reinterpret_cast<uint4*>(to) = chunk.words;
    else
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < there) to[i] = chunk.element[i];
  }
};

// Adds the first `count` entries to the rows of the tile's keys; absent tensors have no data.
template <class T, int kPitch>
__device__ __forceinline__ void add_entries(const FoldBlock<T>& block, FoldMemory& memory,
                                            int count, const Rows<T>& dk, const Rows<T>& dv) {
  constexpr int kVector = VectorSum<T>::kVector, kVectors = 2 * kPitch / (kRowLanes * kVector);
  constexpr int kAhead = kVectors <= 2 ? 4 : 2;  // entries on their way: their rows come from far
  const int lane = threadIdx.x % kRowLanes, topk = block.args.shape.topk;
  sort_entries(block, memory, count);
  for (int i = threadIdx.x / kRowLanes; i < count; i += kFoldThreads / kRowLanes) {
    const int key = key_of(memory.found[i]), end = memory.ends[key];
    if (i > 0 && key_of(memory.found[i - 1]) == key) continue;
    VectorSum<T> sum[kVectors];
    const auto load = [&](uint4(&words)[kVectors], int e, int unit) {
      const std::int64_t slot = memory.rows[e].first + static_cast<std::int64_t>(unit) * topk;
      const auto* from =
          reinterpret_cast<const uint4*>(block.args.scratch.slots + slot * 2 * kPitch) + lane;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) words[n] = __ldcs(from + kRowLanes * n);
    };
    const auto add = [&](const uint4(&words)[kVectors]) {
#pragma unroll
      for (int n = 0; n < kVectors; ++n) sum[n].add(words[n]);
    };
    for (int e = i; e < end; e += kAhead) {
      uint4 ahead[kAhead][kVectors] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (e + a < end && memory.rows[e + a].units > 0) load(ahead[a], e + a, 0);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (e + a >= end) break;
        add(ahead[a]);
        for (int unit = 1; unit < memory.rows[e + a].units; ++unit) {
          uint4 words[kVectors];
          load(words, e + a, unit);
          add(words);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      RowElements<T>(dk, dv, static_cast<unsigned>(key), kVector * (lane + kRowLanes * n), kPitch)
          .add(sum[n]);
  }
}

template <class T, int kPitch>
__global__ void __launch_bounds__(kFoldThreads, kPitch <= 64 ? 4 : 3)
    fold_slots_kernel(const __grid_constant__ BackwardArgs<T> args, KeyChunks tiles) {
  await_previous();
  __shared__ FoldMemory memory;
  const BackwardShape& shape = args.shape;
  FoldBlock<T> block{args, tiles.find(shape.spans.k, blockIdx.x), static_cast<int>(blockIdx.y)};
  const KeyChunk& keys = block.keys;
  if (keys.begin >= keys.end) return;
  block.queries = shape.spans.q.span(keys.item);
  const auto rows = [&](const Tensor4<T>& tensor) {
    Rows<T> found = tensor.rows(keys.keys.batch, block.key_head, keys.keys.begin + keys.begin);
    if (!tensor.data) found.data = nullptr;
    return found;
  };
  const Rows<T> dk = rows(args.dk), dv = rows(args.dv);
  const int lists = shape.group * shape.clusters;
  int step = lists;
  for (int first = 0; first < lists; first += step) {
    int count = block.find(memory, first, min(first + step, lists));
    if (count > kEntries) {  // fewer lists at a time, so that all of their slots have room
      step = kEntries / shape.topk;
      count = block.find(memory, first, min(first + step, lists));
    }
    add_entries<T, kPitch>(block, memory, count, dk, dv);
  }
}

}  // namespace

template <class T>
void fold_slots(const BackwardArgs<T>& args, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  // Small tiles, so that short sequences keep the device busy too.
  constexpr std::int64_t kBlocks = 1024;
  const std::int64_t rows = static_cast<std::int64_t>(shape.B) * (shape.H / shape.group) * shape.S;
  int size = kMostKeys;
  while (size > kLeastKeys && rows / size < kBlocks) size /= 2;
  const KeyChunks tiles = shape.key_tiles(size);
  if (tiles.slots == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H / shape.group));
  dispatch_head_dim("i-clustered", shape.pitch, [&](auto width) {
    launch_early("fold_slots", fold_slots_kernel<T, decltype(width)::value>, grid, kFoldThreads, 0,
                 stream, args, tiles);
  });
}

#define COTERIE_INSTANTIATE(T) template void fold_slots(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
