// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, clustered_bwd.h) to the rows of dk and dv. A
// block owns a tile of keys. It looks through the lists of all clusters for keys of its tile, sorts
// what it finds by key, then by head and cluster, and adds it by half a warp per key.
#include "cuda/clustered_bwd.h"
#include "cuda/device/await.cuh"
#include "cuda/device/element.cuh"
#include "cuda/device/group.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kMostKeys = 1024, kLeastKeys = 64;  // of a tile
constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / 32;
constexpr int kRowLanes = 16;  // that add up one key's rows
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

// Four neighbouring elements of a row of dk or dv.
template <class T>
struct FourElements {
  struct alignas(4 * sizeof(T)) Vector {
    T element[4];
  };
  T* to;
  int there;  // how many of them are in the row
  bool aligned;
  float4 old;

  // `column` counts through a row of dk and one of dv, both of `pitch` elements.
  __device__ FourElements(const Rows<T>& dk, const Rows<T>& dv, unsigned row, int column,
                          int pitch) {
    const bool second = column >= pitch;
    if (second) column -= pitch;
    to = (second ? dv.row(row) : dk.row(row)) + column;
    there = min(max((second ? dv.width : dk.width) - column, 0), 4);
    if (!(second ? dv.data : dk.data)) there = 0;
    aligned = (second ? dv.aligned : dk.aligned) && there == 4;
    Vector v{};
    if (aligned)
      v = *reinterpret_cast<const Vector*>(to);
    else
      for (int i = 0; i < 4; ++i)
        if (i < there) v.element[i] = to[i];
    old = {to_float(v.element[0]), to_float(v.element[1]), to_float(v.element[2]),
           to_float(v.element[3])};
  }
  __device__ void add(const float4& sum) const {
    const Vector v{{from_float<T>(old.x + sum.x), from_float<T>(old.y + sum.y),
                    from_float<T>(old.z + sum.z), from_float<T>(old.w + sum.w)}};
    if (aligned)
      *reinterpret_cast<Vector*>(to) = v;
    else
      for (int i = 0; i < 4; ++i)
        if (i < there) to[i] = v.element[i];
  }
};

// Adds the first `count` entries to the rows of the tile's keys; absent tensors have no data.
template <class T, int kVectors>
__device__ __forceinline__ void add_entries(const FoldBlock<T>& block, FoldMemory& memory,
                                            int count, const Rows<T>& dk, const Rows<T>& dv) {
  constexpr int kPitch = 32 * kVectors;
  const int lane = threadIdx.x % kRowLanes, topk = block.args.shape.topk;
  sort_entries(block, memory, count);
  for (int i = threadIdx.x / kRowLanes; i < count; i += kFoldThreads / kRowLanes) {
    const int key = key_of(memory.found[i]), end = memory.ends[key];
    if (i > 0 && key_of(memory.found[i - 1]) == key) continue;
    // Two entries at a time: their rows come from far.
    float4 sum[kVectors] = {};
    const auto slot_row = [&](int e, int unit) {
      const std::int64_t slot = memory.rows[e].first + static_cast<std::int64_t>(unit) * topk;
      return reinterpret_cast<const float4*>(block.args.scratch.slots + slot * 2 * kPitch) + lane;
    };
    const auto load = [&](float4(&values)[kVectors], const float4* from) {
#pragma unroll
      for (int n = 0; n < kVectors; ++n) values[n] = __ldcs(from + kRowLanes * n);
    };
    const auto add = [&](const float4(&values)[kVectors]) {
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        sum[n].x += values[n].x;
        sum[n].y += values[n].y;
        sum[n].z += values[n].z;
        sum[n].w += values[n].w;
      }
    };
    const auto add_later_units = [&](int e) {
      for (int unit = 1; unit < memory.rows[e].units; ++unit) {
        float4 values[kVectors];
        load(values, slot_row(e, unit));
        add(values);
      }
    };
    for (int e = i; e < end; e += 2) {
      const bool both = e + 1 < end;
      float4 first[kVectors] = {}, second[kVectors] = {};
      if (memory.rows[e].units > 0) load(first, slot_row(e, 0));
      if (both && memory.rows[e + 1].units > 0) load(second, slot_row(e + 1, 0));
      add(first);
      add_later_units(e);
      if (!both) break;
      add(second);
      add_later_units(e + 1);
    }
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      FourElements<T>(dk, dv, static_cast<unsigned>(key), 4 * (lane + kRowLanes * n), kPitch)
          .add(sum[n]);
  }
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kFoldThreads, kVectors <= 2 ? 4 : 3)
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
    add_entries<T, kVectors>(block, memory, count, dk, dv);
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
    launch_early("fold_slots", fold_slots_kernel<T, decltype(width)::value / 32>, grid,
                 kFoldThreads, 0, stream, args, tiles);
  });
}

#define COTERIE_INSTANTIATE(T) template void fold_slots(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
