// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, clustered_bwd.h) to the rows of dk and dv. A
// block owns a tile of keys. Top keys ascend, so the slots of a cluster that fall into the tile are
// one run, found by bisection; the entries of all clusters, sorted by key and then by head, cluster
// and unit, are added by half a warp per key.
#include "cuda/clustered_bwd.h"
#include "cuda/device/element.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kMostKeys = 512, kLeastKeys = 64;  // of a tile
constexpr int kFoldThreads = 256;
constexpr int kRowLanes = 16;  // that add up one key's rows
// Entries sorted at a time; a tile with more of them is added up in several rounds.
constexpr int kEntries = 2048;
static_assert(kMostKeys * kEntries <= 1 << 30, "a sort key is (key, entry) in one word");

// Slots of one cluster and place, one for each of its units.
struct Entry {
  int slot;   // row of the first unit's slot
  int units;  // the next unit's is topk rows further
};

struct FoldMemory {
  Entry entries[kEntries];
  unsigned sorted[kEntries];  // key * kEntries + entry
  int sums[kFoldThreads / 32];
};

// First of `count` ascending keys that is at least `key`; -1, which ends a list, is the largest.
__device__ __forceinline__ int lower_bound(const std::int32_t* keys, int count, unsigned key) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    if (static_cast<unsigned>(keys[low + half]) < key) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

// Sum of `value` over the threads before this one; `total` over all.
__device__ __forceinline__ int exclusive_scan(int value, int* shared, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  int offset = 0;
  total = 0;
  for (int w = 0; w < kFoldThreads / 32; ++w) {
    if (w == warp) offset = total;
    total += shared[w];
  }
  return offset + sum - value;
}

// Bitonic sort of the first `count` words. Up to a word per thread stays in registers.
__device__ __forceinline__ void sort_entries(unsigned* sorted, int count) {
  int size = 1;
  while (size < count) size *= 2;
  const int i = static_cast<int>(threadIdx.x);
  if (size <= kFoldThreads) {
    unsigned word = i < count ? sorted[i] : 0xffffffffu;
    for (int run = 2; run <= size; run *= 2)
      for (int step = run / 2; step > 0; step /= 2) {
        unsigned other;
        if (step >= 32) {
          __syncthreads();
          sorted[i] = word;
          __syncthreads();
          other = sorted[i ^ step];
        } else {
          other = __shfl_xor_sync(0xffffffffu, word, step);
        }
        word = ((i & step) == 0) == ((i & run) == 0) ? min(word, other) : max(word, other);
      }
    __syncthreads();
    sorted[i] = word;
    __syncthreads();
    return;
  }
  for (int j = count + i; j < size; j += kFoldThreads) sorted[j] = 0xffffffffu;
  for (int run = 2; run <= size; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int j = i; j < size; j += kFoldThreads) {
        if ((j ^ step) < j) continue;
        const unsigned a = sorted[j], b = sorted[j ^ step];
        if ((a > b) == ((j & run) == 0)) {
          sorted[j] = b;
          sorted[j ^ step] = a;
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
__device__ __forceinline__ void add_entries(const BackwardArgs<T>& args, FoldMemory& memory,
                                            int count, const Rows<T>& dk, const Rows<T>& dv) {
  const int lane = threadIdx.x % kRowLanes, pitch = 32 * kVectors, topk = args.shape.topk;
  sort_entries(memory.sorted, count);
  for (int i = threadIdx.x / kRowLanes; i < count; i += kFoldThreads / kRowLanes) {
    const unsigned key = memory.sorted[i] / kEntries;
    if (i > 0 && memory.sorted[i - 1] / kEntries == key) continue;
    float4 sum[kVectors] = {};
    for (int e = i; e < count && memory.sorted[e] / kEntries == key; ++e) {
      const Entry entry = memory.entries[memory.sorted[e] % kEntries];
      for (int unit = 0; unit < entry.units; ++unit) {
        const std::int64_t slot = entry.slot + static_cast<std::int64_t>(unit) * topk;
        const float4* row =
            reinterpret_cast<const float4*>(args.scratch.slots + slot * 2 * pitch) + lane;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          const float4 value = row[kRowLanes * n];
          sum[n].x += value.x;
          sum[n].y += value.y;
          sum[n].z += value.z;
          sum[n].w += value.w;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      FourElements<T>(dk, dv, key, 4 * (lane + kRowLanes * n), pitch).add(sum[n]);
  }
  __syncthreads();
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kFoldThreads)
    fold_slots_kernel(const __grid_constant__ BackwardArgs<T> args, KeyChunks tiles) {
  __shared__ FoldMemory memory;
  const BackwardShape& shape = args.shape;
  const KeyChunk keys = tiles.find(shape.spans.k, blockIdx.x);
  if (keys.begin >= keys.end) return;
  const int key_head = blockIdx.y, topk = shape.topk, item = keys.item;
  const ItemSpan span = shape.spans.q.span(item);
  const auto rows = [&](const Tensor4<T>& tensor) {
    return tensor.rows(keys.keys.batch, key_head, keys.keys.begin + keys.begin);
  };
  Rows<T> dk = rows(args.dk), dv = rows(args.dv);
  if (!args.dk.data) dk.data = nullptr;
  if (!args.dv.data) dv.data = nullptr;
  const int total = shape.group * shape.clusters;
  int filled = 0;
  for (int base = 0; base < total; base += kFoldThreads) {
    const int r = base + static_cast<int>(threadIdx.x);
    const std::int32_t* list = nullptr;
    int from = 0, to = 0;
    Entry entry{0, 0};
    if (r < total) {
      const int head = key_head * shape.group + r / shape.clusters, cluster = r % shape.clusters;
      const std::int64_t problem = static_cast<std::int64_t>(item) * shape.H + head;
      const std::int32_t* offset = args.lists.offsets + problem * (shape.clusters + 1) + cluster;
      entry.units = (offset[1] - offset[0] + kUnitRows - 1) / kUnitRows;
      entry.slot = (head * shape.units + shape.first_unit(item, cluster, span, offset[0])) * topk;
      list = args.lists.top_keys + (problem * shape.clusters + cluster) * topk;
      if (entry.units > 0) {
        from = lower_bound(list, topk, static_cast<unsigned>(keys.begin));
        to = from;  // a tile holds few keys of a list
        while (to < topk && static_cast<unsigned>(list[to]) < static_cast<unsigned>(keys.end)) ++to;
      }
    }
    int added = 0;
    const int place = filled + exclusive_scan(to - from, memory.sums, added);
    const int all = filled + added;
    for (int window = 0;; window += kEntries) {
      for (int slot = from; slot < to; ++slot) {
        const int e = place + slot - from - window;
        if (e < 0 || e >= kEntries) continue;
        memory.entries[e] = {entry.slot + slot, entry.units};
        memory.sorted[e] = static_cast<unsigned>((list[slot] - keys.begin) * kEntries + e);
      }
      __syncthreads();
      filled = all - window;
      const bool full = filled >= kEntries, last = base + kFoldThreads >= total;
      if (filled > 0 && (full || last))
        add_entries<T, kVectors>(args, memory, min(filled, kEntries), dk, dv);
      if (!full) break;
    }
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
