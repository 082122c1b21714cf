// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, clustered_bwd.h) to the rows of dk and dv. A
// block owns a tile of keys. It looks through the lists of all clusters for keys of its tile and
// sorts what it finds by key, then by head and cluster. Groups of its lanes add up equal shares
// of that, however often a key is listed; keys on the border of shares go through shared memory.
#include "cuda/clustered_bwd.h"
#include "cuda/device/early.cuh"
#include "cuda/device/element.cuh"
#include "cuda/device/fold_entries.cuh"
#include "cuda/device/row_chunk.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

// A share's lane: its pieces of the sums of a key, rows of dk and dv one after the other as in
// scratch.slots.
template <class T, int kPitch>
struct Share {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kLanes = kPitch / 8, kShares = kFoldThreads / kLanes;
  static constexpr int kVectors = 2 * kPitch / (kLanes * kVector);
  static constexpr int kAhead = 8 / kVectors;  // entries on their way: they come from far
  using Border = float[2][2 * kPitch];  // sums of a share's first and last key, where not all of it
  const FoldBlock<T>& block;
  const FoldMemory& memory;
  Border* borders;
  Rows<T> rows[2];  // of dk and dv for the tile's keys; no data when the tensor is absent
  float sum[kVectors][kVector] = {};

  struct Words {
    uint4 slot[kVectors], old[kVectors];
  };
  __device__ static int place(int n) {
    return kVector * (static_cast<int>(threadIdx.x) % kLanes + kLanes * n);
  }
  __device__ static constexpr int tensor(int n) { return n / (kVectors / 2); }
  __device__ static int column(int n) { return place(n % (kVectors / 2)); }
  // A piece of a key's row; null: not there.
  __device__ T* at(int n, int key) const {
    const Rows<T>& to = rows[tensor(n)];
    return to.data && column(n) < to.width ? to.row(key) + column(n) : nullptr;
  }

  __device__ void load_old(uint4 (&words)[kVectors], int key) const {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const Rows<T>& from = rows[tensor(n)];
      const T* piece = at(n, key);
      words[n] = make_uint4(0, 0, 0, 0);
      if (!piece) continue;
      if (from.aligned)
        words[n] = *reinterpret_cast<const uint4*>(piece);
      else
        words[n] = load_slowly(piece, from.width - column(n));
    }
  }
  // Row `unit` of an entry's slot.
  __device__ void load_slot(uint4 (&words)[kVectors], int entry, int unit) const {
    const UnitPlaces& units = memory.units[entry];
    const std::int64_t at = unit == 0 ? units.first : units.second + unit - 1;
    const std::int64_t slot = at * block.args.shape.topk + slot_of(memory.found[entry]);
    const T* from = block.args.scratch.slots + slot * 2 * kPitch;
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      words[n] = __ldcs(reinterpret_cast<const uint4*>(from + place(n)));
  }
  // `last`: the entry is its key's last one.
  __device__ void load(Words& words, int entry, bool last) const {
    if (last) load_old(words.old, memory.key(entry));
    if (memory.units[entry].units > 0) return load_slot(words.slot, entry, 0);
#pragma unroll
    for (int n = 0; n < kVectors; ++n) words.slot[n] = make_uint4(0, 0, 0, 0);  // no members
  }
  __device__ void add(const Words& words, int entry) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) add_chunk<T>(sum[n], words.slot[n]);
    for (int unit = 1; unit < memory.units[entry].units; ++unit) {
      uint4 more[kVectors];
      load_slot(more, entry, unit);
#pragma unroll
      for (int n = 0; n < kVectors; ++n) add_chunk<T>(sum[n], more[n]);
    }
  }
  __device__ void clear(int n) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[n][i] = 0.0f;
  }
  // Writes a key's row and starts anew.
  __device__ void write(const uint4 (&old)[kVectors], int key) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const Rows<T>& to = rows[tensor(n)];
      add_chunk<T>(sum[n], old[n]);
      if (T* piece = at(n, key)) {
        const uint4 words = pack_chunk<T>(sum[n]);
        if (to.aligned)
          *reinterpret_cast<uint4*>(piece) = words;
        else
          store_slowly(piece, words, to.width - column(n));
      }
      clear(n);
    }
  }
  __device__ void to_border(float (&border)[2 * kPitch]) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4)
        *reinterpret_cast<float4*>(border + place(n) + i) =
            make_float4(sum[n][i], sum[n][i + 1], sum[n][i + 2], sum[n][i + 3]);
      clear(n);
    }
  }
  __device__ void add_border(const float (&border)[2 * kPitch]) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[n][i] += border[place(n) + i];
  }

  // Entries [first, end), the share of these lanes.
  __device__ void add_entries(int first, int end) {
    const int number = static_cast<int>(threadIdx.x) / kLanes;
    for (int e = first; e < end; e += kAhead) {
      Words ahead[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
        if (e + a < end) load(ahead[a], e + a, memory.ends[memory.key(e + a)] == e + a + 1);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (e + a >= end) break;
        add(ahead[a], e + a);
        const int key = memory.key(e + a);
        const bool last = memory.ends[key] == e + a + 1, all = memory.begin(key) >= first;
        if (last && all)
          write(ahead[a].old, key);
        else if (last || e + a + 1 == end)
          to_border(borders[number][all]);
      }
    }
  }
  // Adds up the last key of these lanes' share, if it goes on in the next ones.
  __device__ void add_borders(int first, int end, int size) {
    if (first >= end) return;
    const int key = memory.key(end - 1), key_end = memory.ends[key];
    if (key_end <= end || memory.begin(key) < first) return;
    uint4 old[kVectors];
    load_old(old, key);
    int number = static_cast<int>(threadIdx.x) / kLanes;
    add_border(borders[number][1]);
    for (int begin = end; begin < key_end; begin += size) add_border(borders[++number][0]);
    write(old, key);
  }
};

// What a block of fold_slots_kernel has in shared memory.
template <class T, int kPitch>
struct FoldShared {
  union {
    Entry entries[kEntries];  // while they are sorted
    typename Share<T, kPitch>::Border borders[Share<T, kPitch>::kShares];
  };
  FoldMemory memory;
};

template <class T, int kPitch>
__global__ void __launch_bounds__(kFoldThreads, 2)
    fold_slots_kernel(const __grid_constant__ BackwardArgs<T> args, KeyChunks tiles,
                      bool beside_broadcast) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<FoldShared<T, kPitch>*>(bytes);
  FoldMemory& memory = shared.memory;
  const BackwardShape& shape = args.shape;
  FoldBlock<T> block{args, tiles.find(shape.spans.k, blockIdx.x), static_cast<int>(blockIdx.y)};
  const KeyChunk& keys = block.keys;
  if (keys.begin >= keys.end) return await_writes();
  block.queries = shape.spans.q.span(keys.item);
  Share<T, kPitch> share{block, memory, shared.borders};
  share.rows[0] = args.dk.rows(keys.keys.batch, block.key_head, keys.keys.begin + keys.begin);
  share.rows[1] = args.dv.rows(keys.keys.batch, block.key_head, keys.keys.begin + keys.begin);
  if (!args.dk.data) share.rows[0].data = nullptr;
  if (!args.dv.data) share.rows[1].data = nullptr;
  const int lists = shape.group * shape.clusters;
  int step = lists;
  for (int first = 0; first < lists; first += step) {
    int count = block.find(memory, first, min(first + step, lists));
    if (count > kEntries) {  // fewer lists at a time, so that all of their slots have room
      step = kEntries / shape.topk;
      count = block.find(memory, first, min(first + step, lists));
    }
    sort_entries(block, memory, shared.entries, count);
    // The lists were there before. Behind broadcast_gradients, which lets this kernel start when
    // all before it is over, the only wait is the one in the end.
    if (!beside_broadcast) await_writes();
    const int size = (count + share.kShares - 1) / share.kShares;
    const int begin = min(static_cast<int>(threadIdx.x) / share.kLanes * size, count);
    share.add_entries(begin, min(begin + size, count));
    __syncthreads();
    share.add_borders(begin, min(begin + size, count), size);
  }
  await_writes();
}

}  // namespace

template <class T>
void fold_slots(const BackwardArgs<T>& args, bool beside_broadcast, cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  // One block for every place on the device, as long as sequences allow.
  constexpr std::int64_t kBlocks = 264;
  const std::int64_t rows = static_cast<std::int64_t>(shape.B) * (shape.H / shape.group) * shape.S;
  int size = kMostKeys;
  while (size > kLeastKeys && rows / size < kBlocks / 2) size /= 2;
  const KeyChunks tiles = shape.key_tiles(size);
  if (tiles.slots == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H / shape.group));
  dispatch_wide_dim("i-clustered", shape.pitch, [&](auto width) {
    launch_early("fold_slots", fold_slots_kernel<T, decltype(width)::value>, grid, kFoldThreads,
                 sizeof(FoldShared<T, decltype(width)::value>), stream, args, tiles,
                 beside_broadcast);
  });
}

#define COTERIE_INSTANTIATE(T) template void fold_slots(const BackwardArgs<T>&, bool, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
