// SPDX-License-Identifier: MIT
// Adds the gradients of the clusters' top keys (slots, clustered_bwd.h) to the rows of dk and dv,
// and what the centroid kernels got wrong for them: coefficients of the cluster's mean and dout. A
// block owns a tile of keys. It looks through the lists of all clusters for keys of its tile and
// sorts what it finds by key, then by head and cluster. Quarters of its warps add up equal shares
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

// sum += factor times the elements of a 16-byte vector.
template <class T>
__device__ __forceinline__ void add_vector(float (&sum)[16 / sizeof(T)], const uint4& vector,
                                           float factor) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if constexpr (sizeof(T) == 2) {
      const float2 two = unpack2<T>(words[i]);
      sum[2 * i] = fmaf(factor, two.x, sum[2 * i]);
      sum[2 * i + 1] = fmaf(factor, two.y, sum[2 * i + 1]);
    } else {
      sum[i] = fmaf(factor, __uint_as_float(words[i]), sum[i]);
    }
}

// A share's lane: its piece of the sums of a key, rows of dk and dv side by side.
template <class T, int kPitch>
struct Share {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kVectors = 2 * kPitch / (kRowLanes * kVector);
  static constexpr int kAhead = kVectors <= 2 ? 2 : 1;  // entries on their way: they come from far
  using Border = float[2][2 * kPitch];  // sums of a share's first and last key, where not all of it
  const FoldBlock<T>& block;
  const FoldMemory& memory;
  Border* borders;
  Rows<T> rows;               // of dk or dv for the tile's keys; no data when the tensor is absent
  const T* addends;           // rows of the clusters, mean or dout,
  const float* coefficients;  // and what to multiply them with, by slot
  float sum[kVectors][kVector] = {};

  struct Words {
    uint4 slot[kVectors], row[kVectors], old[kVectors];
    float coefficient;
  };
  // Pieces lie in the order of scratch.slots: 16 columns of dk, the same ones of dv, and so on. A
  // lane has pieces of one of the two.
  __device__ static int place(int n) {
    return kVector * (static_cast<int>(threadIdx.x) % kRowLanes + kRowLanes * n);
  }
  static_assert(kVector * kRowLanes % 32 == 0, "all of a lane's pieces are of one tensor");
  __device__ static bool of_dk() { return place(0) % 32 < 16; }
  __device__ static int column(int n) { return place(n) / 32 * 16 + place(n) % 16; }
  // How many elements of a piece are there.
  __device__ int there(int n) const {
    return rows.data ? min(max(rows.width - column(n), 0), kVector) : 0;
  }

  __device__ void load_old(uint4 (&words)[kVectors], int key) const {
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      words[n] = there(n) > 0 ? load_elements<T>(rows.row(key) + column(n), there(n), rows.aligned)
                              : make_uint4(0, 0, 0, 0);
  }
  // Row `unit` of an entry's slot.
  __device__ void load_slot(uint4 (&words)[kVectors], int entry, int unit) const {
    const std::int64_t slot =
        memory.rows[entry].first + static_cast<std::int64_t>(unit) * block.args.shape.topk;
    const T* from = block.args.scratch.slots + slot * 2 * kPitch;
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      words[n] = __ldcs(reinterpret_cast<const uint4*>(from + place(n)));
  }
  // `last`: the entry is its key's last one.
  __device__ void load(Words& words, int entry, bool last) const {
    const BackwardArgs<T>& args = block.args;
    if (last) load_old(words.old, memory.key(entry));
    if (memory.rows[entry].units == 0) {  // no members, no slots
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        words.slot[n] = words.row[n] = make_uint4(0, 0, 0, 0);
      }
      words.coefficient = 0.0f;
      return;
    }
    load_slot(words.slot, entry, 0);
    if (args.shape.causal) return;
    const std::int64_t row = block.first_row() + list_of(memory.found[entry]);
    words.coefficient = coefficients[row * args.shape.topk + slot_of(memory.found[entry])];
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      words.row[n] = *reinterpret_cast<const uint4*>(addends + row * kPitch + column(n));
  }
  __device__ void add(const Words& words, int entry) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      add_vector<T>(sum[n], words.slot[n], 1.0f);
      if (!block.args.shape.causal) add_vector<T>(sum[n], words.row[n], words.coefficient);
    }
    for (int unit = 1; unit < memory.rows[entry].units; ++unit) {
      uint4 more[kVectors];
      load_slot(more, entry, unit);
#pragma unroll
      for (int n = 0; n < kVectors; ++n) add_vector<T>(sum[n], more[n], 1.0f);
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
      add_vector<T>(sum[n], old[n], 1.0f);
      if (there(n) > 0)
        store_elements<T>(rows.row(key) + column(n), sum[n], there(n), rows.aligned);
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
    const int number = static_cast<int>(threadIdx.x) / kRowLanes;
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
    int number = static_cast<int>(threadIdx.x) / kRowLanes;
    add_border(borders[number][1]);
    for (int begin = end; begin < key_end; begin += size) add_border(borders[++number][0]);
    write(old, key);
  }
};

// What a block of fold_slots_kernel has in shared memory.
template <int kPitch>
struct FoldShared {
  union {
    Entry entries[kEntries];  // while they are sorted
    float borders[kShares][2][2 * kPitch];
  };
  FoldMemory memory;
};

template <class T, int kPitch>
__global__ void __launch_bounds__(kFoldThreads, Share<T, kPitch>::kVectors <= 4 ? 2 : 1)
    fold_slots_kernel(const __grid_constant__ BackwardArgs<T> args, KeyChunks tiles) {
  release_next();
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<FoldShared<kPitch>*>(bytes);
  FoldMemory& memory = shared.memory;
  const BackwardShape& shape = args.shape;
  FoldBlock<T> block{args, tiles.find(shape.spans.k, blockIdx.x), static_cast<int>(blockIdx.y)};
  const KeyChunk& keys = block.keys;
  if (keys.begin >= keys.end) return;
  block.queries = shape.spans.q.span(keys.item);
  const bool dk = Share<T, kPitch>::of_dk();
  Share<T, kPitch> share{block, memory, shared.borders};
  share.rows = dk ? args.dk.rows(keys.keys.batch, block.key_head, keys.keys.begin + keys.begin)
                  : args.dv.rows(keys.keys.batch, block.key_head, keys.keys.begin + keys.begin);
  if (!(dk ? args.dk.data : args.dv.data)) share.rows.data = nullptr;
  share.addends = dk ? args.scratch.mean : args.scratch.dout;
  share.coefficients = dk ? args.scratch.top_ds : args.scratch.top_weight;
  const int lists = shape.group * shape.clusters;
  int step = lists;
  for (int first = 0; first < lists; first += step) {
    int count = block.find(memory, first, min(first + step, lists));
    if (count > kEntries) {  // fewer lists at a time, so that all of their slots have room
      step = kEntries / shape.topk;
      count = block.find(memory, first, min(first + step, lists));
    }
    sort_entries(block, memory, shared.entries, count);
    await_writes();  // the lists were there before
    const int size = (count + kShares - 1) / kShares;
    const int begin = min(static_cast<int>(threadIdx.x) / kRowLanes * size, count);
    share.add_entries(begin, min(begin + size, count));
    __syncthreads();
    share.add_borders(begin, min(begin + size, count), size);
  }
}

}  // namespace

template <class T>
void fold_slots(const BackwardArgs<T>& args, cudaStream_t stream) {
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
                 sizeof(FoldShared<decltype(width)::value>), stream, args, tiles);
  });
}

#define COTERIE_INSTANTIATE(T) template void fold_slots(const BackwardArgs<T>&, cudaStream_t);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(__nv_bfloat16)
COTERIE_INSTANTIATE(__half)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cuda
