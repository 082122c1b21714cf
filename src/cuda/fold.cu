// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, clustered_bwd.h) to the rows of dk and dv. A
// block owns a tile of keys. It looks through the lists of all clusters for keys of its tile, sorts
// what it finds by key, then by head and cluster, and adds it by half a warp per key.
#include "cuda/clustered_bwd.h"
#include "cuda/device/element.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kMostKeys = 1024, kLeastKeys = 64;  // of a tile
constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / 32;
constexpr int kRowLanes = 16;  // that add up one key's rows
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

// Rows of scratch.slots: one for each unit of the cluster, topk rows apart.
struct SlotRows {
  int first, units;
};

struct FoldMemory {
  Entry entries[kEntries];
  SlotRows rows[kEntries];
  int found;
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
  // Number of the cluster of a list among those of all items and heads.
  __device__ std::int64_t row(int list) const {
    return (static_cast<std::int64_t>(keys.item) * args.shape.H + head(list)) *
               args.shape.clusters +
           list % args.shape.clusters;
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

  // Finds the entries of lists [first, last) in any order; returns their number, of which at most
  // kEntries are kept. A warp reads 32 slots of several lists at a time.
  __device__ int find(FoldMemory& memory, int first, int last) const {
    constexpr int kLists = 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, topk = args.shape.topk;
    const auto size = static_cast<unsigned>(keys.end - keys.begin);
    __syncthreads();
    if (threadIdx.x == 0) memory.found = 0;
    __syncthreads();
    for (int slot = lane; slot - lane < topk; slot += 32)
      for (int base = first + warp; base < last; base += kLists * kFoldWarps) {
        unsigned key[kLists];
#pragma unroll
        for (int i = 0; i < kLists; ++i) {
          const int list = base + i * kFoldWarps;
          const bool there = slot < topk && list < last;
          key[i] = (there ? args.lists.top_keys[row(list) * topk + slot] : -1) - keys.begin;
        }
#pragma unroll
        for (int i = 0; i < kLists; ++i) {
          if (key[i] >= size) continue;
          const int place = atomicAdd(&memory.found, 1);
          if (place < kEntries)
            memory.entries[place] =
                make_entry(static_cast<int>(key[i]), base + i * kFoldWarps, slot);
        }
      }
    __syncthreads();
    return memory.found;
  }
};

// Sorts the first `count` entries: up to one per thread by counting those before each, more in a
// bitonic network.
__device__ __forceinline__ void sort_entries(Entry* entries, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (count <= kFoldThreads) {
    const Entry mine = i < count ? entries[i] : ~0ull;
    int place = 0;
#pragma unroll 4
    for (int j = 0; j < count; ++j) place += entries[j] < mine;
    __syncthreads();
    if (i < count) entries[place] = mine;
    __syncthreads();
    return;
  }
  int size = 1;
  while (size < count) size *= 2;
  for (int j = count + i; j < size; j += kFoldThreads) entries[j] = ~0ull;
  for (int run = 2; run <= size; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int j = i; j < size; j += kFoldThreads) {
        if ((j ^ step) < j) continue;
        const Entry a = entries[j], b = entries[j ^ step];
        if ((a > b) == ((j & run) == 0)) {
          entries[j] = b;
          entries[j ^ step] = a;
        }
      }
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
  sort_entries(memory.entries, count);
  for (int i = threadIdx.x; i < count; i += kFoldThreads)
    memory.rows[i] = block.slot_rows(memory.entries[i]);
  __syncthreads();
  for (int i = threadIdx.x / kRowLanes; i < count; i += kFoldThreads / kRowLanes) {
    const int key = key_of(memory.entries[i]);
    if (i > 0 && key_of(memory.entries[i - 1]) == key) continue;
    const auto target = [&](int n) {
      return FourElements<T>(dk, dv, static_cast<unsigned>(key), 4 * (lane + kRowLanes * n),
                             kPitch);
    };
    float4 sum[kVectors] = {};
    for (int e = i; e < count && key_of(memory.entries[e]) == key; ++e) {
      const SlotRows rows = memory.rows[e];
      for (int unit = 0; unit < rows.units; ++unit) {
        const std::int64_t slot = rows.first + static_cast<std::int64_t>(unit) * topk;
        const float4* row =
            reinterpret_cast<const float4*>(block.args.scratch.slots + slot * 2 * kPitch) + lane;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          const float4 value = __ldcs(row + kRowLanes * n);
          sum[n].x += value.x;
          sum[n].y += value.y;
          sum[n].z += value.z;
          sum[n].w += value.w;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kVectors; ++n) target(n).add(sum[n]);
  }
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kFoldThreads, kVectors <= 2 ? 5 : 4)
    fold_slots_kernel(const __grid_constant__ BackwardArgs<T> args, KeyChunks tiles) {
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
    fold_slots_kernel<T, decltype(width)::value / 32>
        <<<grid, kFoldThreads, 0, stream>>>(args, tiles);
  });
  COTERIE_LAUNCH("fold_slots_kernel");
}

#define COTERIE_INSTANTIATE(T) template void fold_slots(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
