// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, backward.h) to the rows of dk and dv:
//   dk_j += sum over the lists and units with j among their keys of the slot's row; dv_j likewise
//
// Grid (tiles of 64 to 4096 keys, key heads), 256 threads. A block owns a tile of keys. It searches
// the lists of all clusters for keys of its tile and sorts these entries by key, then by head and
// cluster. Groups of lanes sum equal shares of the entries, however often a key is listed; keys on
// the border of shares go through shared memory. Atomics only count entries; the order of every sum
// is fixed. Shared memory: 88 KiB; two blocks per multiprocessor. Rows that are not aligned are
// read and written element by element. All devices and element types.
#include <cstdint>

#include "cuda/clustered/backward.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/element.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kMostKeys = 4096, kLeastKeys = 64;  // of a tile
constexpr int kThreads = 256, kWarps = kThreads / 32;
// Entries sorted at a time; a tile with more of them is added up in several rounds.
constexpr int kEntries = 2048;
static_assert(kEntries >= kMaxTopKeys, "a round takes at least one list");

// (key, list, slot) in one word, in the order in which entries are added; lists are numbered by
// head and cluster. A list contains a key once, so words are distinct.
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

// Places of a cluster's units: the first, and the second, after which the others follow.
struct UnitPlaces {
  int first, second, units;
};

struct EntryMemory {
  Entry found[kEntries];
  UnitPlaces units[kEntries];
  int ends[kMostKeys];  // entries of each key, then where its next one goes
  int count;

  // The key of a sorted entry, and the first entry of a key.
  __device__ int key(int entry) const { return key_of(found[entry]); }
  __device__ int begin(int key) const { return key == 0 ? 0 : ends[key - 1]; }
};

// What a block works on.
template <class T>
struct KeyTileLists {
  const BackwardArgs<T>& args;
  ItemChunk keys;
  int key_head;
  ItemSpan queries;

  // The first of the lists of this key head, which follow each other.
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
  __device__ int find(EntryMemory& memory, int first, int last) const {
    constexpr int kLists = 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, topk = args.shape.topk;
    const auto size = static_cast<unsigned>(keys.end - keys.begin);
    const std::int32_t* lists = args.lists.top_keys + first_row() * topk;
    __syncthreads();
    if (threadIdx.x == 0) memory.count = 0;
    for (unsigned i = threadIdx.x; i < size; i += kThreads) memory.ends[i] = 0;
    __syncthreads();
    for (int slot = lane; slot - lane < topk; slot += 32)
      for (int base = first + warp; base < last; base += kLists * kWarps) {
        const std::int32_t* from = lists + static_cast<std::int64_t>(base) * topk + slot;
        unsigned key[kLists];
#pragma unroll
        for (int i = 0; i < kLists; ++i, from += kWarps * topk)
          key[i] = (slot < topk && base + i * kWarps < last ? *from : -1) - keys.begin;
#pragma unroll
        for (int i = 0; i < kLists; ++i) {
          if (key[i] >= size) continue;
          atomicAdd(&memory.ends[key[i]], 1);
          const int place = atomicAdd(&memory.count, 1);
          if (place < kEntries)
            memory.found[place] = make_entry(static_cast<int>(key[i]), base + i * kWarps, slot);
        }
      }
    __syncthreads();
    return memory.count;
  }

  // Sorts the `count` entries that were found: by key, then each key's few among themselves.
  // `entries` is scratch memory.
  __device__ __forceinline__ void sort(EntryMemory& memory, Entry* entries, int count) const {
    int carry = 0;
    const int size = keys.end - keys.begin;
    for (int first = 0; first < size; first += kThreads) {
      const int key = first + static_cast<int>(threadIdx.x);
      const int start = block_exclusive_scan(key < size ? memory.ends[key] : 0, carry);
      if (key < size) memory.ends[key] = start;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const Entry entry = memory.found[i];
      entries[atomicAdd(&memory.ends[key_of(entry)], 1)] = entry;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const Entry entry = entries[i];
      const int key = key_of(entry), begin = memory.begin(key), end = memory.ends[key];
      int place = begin;
#pragma unroll 8
      for (int j = begin; j < end; ++j) place += entries[j] < entry;
      memory.found[place] = entry;
      memory.units[place] = unit_places(entry);
    }
    __syncthreads();
  }
};

// Loads 16 bytes or zeros; stores 16 bytes or nothing. By predicate: loads inside branches would be
// waited for one by one.
__device__ __forceinline__ uint4 load_if(const void* from, bool there) {
  uint4 words = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0;\n@p ld.global.v4.b32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
               : "l"(from), "r"(static_cast<int>(there)));
  return words;
}
__device__ __forceinline__ void store_if(void* to, const uint4& words, bool there) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%4], {%0,%1,%2,%3};}" ::"r"(
          words.x),
      "r"(words.y), "r"(words.z), "r"(words.w), "l"(to), "r"(static_cast<int>(there))
      : "memory");
}

// One lane of a share: its pieces of the sums of a key, the row of dk, then that of dv, as in
// scratch.slots.
template <class T, int kPitch>
struct Share {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kLanes = kPitch / 8, kShares = kThreads / kLanes;
  static constexpr int kVectors = 2 * kPitch / (kLanes * kVector);
  static constexpr int kAhead = kVectors > 2 ? 2 : 3;  // entries in flight: latency is high
  using Border = float[2][2 * kPitch];  // sums of a share's first and last key, if cut
  const KeyTileLists<T>& block;
  const EntryMemory& memory;
  Border* borders;
  Rows<T> rows[2];  // of dk and dv for the tile's keys; no data when the tensor is absent
  bool fast;        // they are read and written 16 bytes at a time
  float sum[kVectors][kVector] = {};

  __device__ Share(const KeyTileLists<T>& b, const EntryMemory& m, Border* to)
      : block(b), memory(m), borders(to) {
    const BackwardArgs<T>& args = block.args;
    const ItemChunk& keys = block.keys;
    const int first = keys.span.begin + keys.begin;
    rows[0] = args.dk.rows(keys.span.batch, block.key_head, first);
    rows[1] = args.dv.rows(keys.span.batch, block.key_head, first);
    if (!args.dk.data) rows[0].data = nullptr;
    if (!args.dv.data) rows[1].data = nullptr;
    fast = (!rows[0].data || in_vectors(rows[0])) && (!rows[1].data || in_vectors(rows[1]));
  }

  struct Words {
    uint4 slot[kVectors], old[kVectors];
  };
  __device__ static int place(int n) {
    return kVector * (static_cast<int>(threadIdx.x) % kLanes + kLanes * n);
  }
  __device__ static constexpr int tensor(int n) { return n / (kVectors / 2); }
  __device__ static int column(int n) { return place(n % (kVectors / 2)); }
  // Whether a piece is inside a row, and its address in a key's row.
  __device__ bool inside(int n) const {
    return rows[tensor(n)].data && column(n) < rows[tensor(n)].width;
  }
  __device__ T* at(int n, int key) const {
    return row_address(rows[tensor(n)].data + column(n), key, pitch_bytes(rows[tensor(n)]));
  }

  // A key's row, or zeros where `there` is false.
  __device__ void load_old(uint4 (&words)[kVectors], int key, bool there) const {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) words[n] = load_if(at(n, key), there && fast && inside(n));
    if (fast || !there) return;
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      if (inside(n)) {
        const Rows<T>& from = rows[tensor(n)];
        words[n] = load_slowly(from.row(key) + column(n), from.width - column(n));
      }
  }
  // Row `unit` of an entry's slot.
  __device__ void load_slot(uint4 (&words)[kVectors], int entry, int unit, bool there) const {
    const UnitPlaces& units = memory.units[entry];
    const std::int64_t place_of = unit == 0 ? units.first : units.second + unit - 1;
    const std::int64_t slot = place_of * block.args.shape.topk + slot_of(memory.found[entry]);
    const T* from = block.args.scratch.slots + slot * 2 * kPitch;
#pragma unroll
    for (int n = 0; n < kVectors; ++n) words[n] = load_if(from + place(n), there);
  }
  // Whether an entry is its key's last one, and all of the key's are in the share from `first` on.
  __device__ bool completes(int entry, int first) const {
    const int key = memory.key(entry);
    return memory.ends[key] == entry + 1 && memory.begin(key) >= first;
  }
  __device__ void load(Words& words, int entry, int first, bool there) const {
    load_slot(words.slot, entry, 0, there && memory.units[entry].units > 0);
    load_old(words.old, memory.key(entry), there && completes(entry, first));
  }
  __device__ void add(const Words& words, int entry) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) add_chunk<T>(sum[n], words.slot[n]);
    for (int unit = 1; unit < memory.units[entry].units; ++unit) {
      uint4 more[kVectors];
      load_slot(more, entry, unit, true);
#pragma unroll
      for (int n = 0; n < kVectors; ++n) add_chunk<T>(sum[n], more[n]);
    }
  }
  // If the key is `complete`, writes its row and clears the sums.
  __device__ void write(const uint4 (&old)[kVectors], int key, bool complete) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      float total[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        total[i] = sum[n][i];
        sum[n][i] = complete ? 0.0f : sum[n][i];
      }
      add_chunk<T>(total, old[n]);
      const uint4 words = pack_chunk<T>(total);
      store_if(at(n, key), words, complete && fast && inside(n));
      if (!fast && complete && inside(n)) {
        const Rows<T>& to = rows[tensor(n)];
        store_slowly(to.row(key) + column(n), words, to.width - column(n));
      }
    }
  }
  __device__ void to_border(float (&border)[2 * kPitch]) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4)
        *reinterpret_cast<float4*>(border + place(n) + i) =
            make_float4(sum[n][i], sum[n][i + 1], sum[n][i + 2], sum[n][i + 3]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[n][i] = 0.0f;
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
      for (int a = 0; a < kAhead; ++a) load(ahead[a], min(e + a, end - 1), first, e + a < end);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (e + a >= end) break;
        const int key = memory.key(e + a);
        const bool complete = completes(e + a, first);
        add(ahead[a], e + a);
        write(ahead[a].old, key, complete);
        if (!complete && (memory.ends[key] == e + a + 1 || e + a + 1 == end))
          to_border(borders[number][memory.begin(key) >= first]);
      }
    }
  }
  // Adds up the last key of these lanes' share, if it continues in the next ones.
  __device__ void add_borders(int first, int end, int size) {
    if (first >= end) return;
    const int key = memory.key(end - 1), key_end = memory.ends[key];
    if (key_end <= end || memory.begin(key) < first) return;
    uint4 old[kVectors];
    load_old(old, key, true);
    int number = static_cast<int>(threadIdx.x) / kLanes;
    add_border(borders[number][1]);
    for (int begin = end; begin < key_end; begin += size) add_border(borders[++number][0]);
    write(old, key, true);
  }
};

// Shared memory of a block of top_key_gradient_kernel.
template <class T, int kPitch>
struct TileMemory {
  union {
    Entry entries[kEntries];  // while they are sorted
    typename Share<T, kPitch>::Border borders[Share<T, kPitch>::kShares];
  };
  EntryMemory memory;
};

template <class T, int kPitch>
__global__ void __launch_bounds__(kThreads, 2)
    top_key_gradient_kernel(const __grid_constant__ BackwardArgs<T> args, ItemChunks tiles,
                            bool beside_broadcast) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<TileMemory<T, kPitch>*>(bytes);
  EntryMemory& memory = shared.memory;
  const BackwardShape& shape = args.shape;
  KeyTileLists<T> block{args, tiles.find(shape.spans.k, blockIdx.x), static_cast<int>(blockIdx.y)};
  const ItemChunk& keys = block.keys;
  if (keys.begin >= keys.end) return await_writes();
  block.queries = shape.spans.q.span(keys.item);
  Share<T, kPitch> share(block, memory, shared.borders);
  const int lists = shape.group * shape.clusters;
  int step = lists;
  for (int first = 0; first < lists; first += step) {
    int count = block.find(memory, first, min(first + step, lists));
    if (count > kEntries) {  // fewer lists at a time, so that all of their slots fit
      step = kEntries / shape.topk;
      count = block.find(memory, first, min(first + step, lists));
    }
    block.sort(memory, shared.entries, count);
    // The lists existed before. After broadcast_gradients, which lets this kernel start once all
    // kernels before it have ended, the only wait is the one at the end.
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
void sum_top_key_gradients(const BackwardArgs<T>& args, bool beside_broadcast,
                           cudaStream_t stream) {
  const BackwardShape& shape = args.shape;
  // At least one block per multiprocessor, if the sequences are long enough.
  const std::int64_t rows = static_cast<std::int64_t>(shape.B) * (shape.H / shape.group) * shape.S;
  int size = kMostKeys;
  while (size > kLeastKeys && rows / size < multiprocessors()) size /= 2;
  const ItemChunks tiles = shape.key_tiles(size);
  if (tiles.slots == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles.slots), static_cast<unsigned>(shape.H / shape.group));
  dispatch_head_dim("i-clustered", shape.pitch, [&](auto width) {
    launch_early("top_key_gradient", top_key_gradient_kernel<T, decltype(width)::value>, grid,
                 kThreads, sizeof(TileMemory<T, decltype(width)::value>), stream, args, tiles,
                 beside_broadcast);
  });
}

template void sum_top_key_gradients(const BackwardArgs<float>&, bool, cudaStream_t);
template void sum_top_key_gradients(const BackwardArgs<Bf16>&, bool, cudaStream_t);
template void sum_top_key_gradients(const BackwardArgs<F16>&, bool, cudaStream_t);

}  // namespace coterie::cuda
