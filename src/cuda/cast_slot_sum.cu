// SPDX-License-Identifier: MIT
// The sums over complete slots (pass.resident) that make CAST's gradients of tokens, in ascending
// order.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/launch.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256;

// 8 lanes side by side have the three gradients of tokens,
// one after the other, head by head. Three turns are under way: of one its rows, of the next its
// first slot, of the one behind where its slots begin.
template <class T>
struct SlotSums {
  static constexpr int kGroups = kThreads / 8, kTurns = 8, kTokens = kTurns * kGroups;
  CastShape shape;
  TokenSlots slots;
  KeyChunks tiles;
  Tensor4<T> dq, dk, dv;
  const T *q_slots, *k_slots, *v_slots;  // (slots, D)

  struct Row {
    float value[8];
  };
  __device__ static void add(Row& to, const uint4& words) {
    const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) to.value[i] += to_float(elements[i]);
  }
  __device__ static uint4 fetch(const T* from, bool there) {
    return there ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  __device__ static void store(T* to, const Row& row) {
    uint4 words;
    std::uint32_t* word = reinterpret_cast<std::uint32_t*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = pack2<T>(row.value[2 * i], row.value[2 * i + 1]);
    *reinterpret_cast<uint4*>(to) = words;
  }
};

// The turns of 8 lanes of a block: tokens of a tile, each with the query heads of a key head.
template <class T>
struct SlotTurns {
  using Row = typename SlotSums<T>::Row;
  const SlotSums<T>& sums;
  const KeyChunk& tile;
  int key_head, first, column;

  __device__ int head(int turn) const {
    return key_head * sums.shape.group + turn % sums.shape.group;
  }
  __device__ int token(int turn) const {
    return first + turn / sums.shape.group * SlotSums<T>::kGroups;
  }
  // Where the slots of a turn begin, and how many there are.
  __device__ int2 find(int turn) const {
    if (token(turn) >= tile.end) return make_int2(0, 0);
    const std::int64_t row =
        sums.slots.row(tile.keys, sums.shape.list_head(head(turn)), token(turn));
    return make_int2(sums.slots.first[row], sums.slots.count[row]);
  }
  __device__ int entry(int turn, int at) const {
    const int list_head = sums.shape.list_head(head(turn));
    return sums.slots.slots[sums.slots.start(tile.item, tile.keys, list_head) + at];
  }
  __device__ void run(int turns) const {
    const CastShape& shape = sums.shape;
    int2 found = find(0), next = find(1);
    int own = found.y > 0 ? entry(0, found.x) : 0;
    Row keys = {}, values = {};
#pragma unroll 1
    for (int turn = 0; turn < turns && token(turn) < tile.end; ++turn) {
      const T* none = nullptr;
      T* queries =
          sums.dq.data
              ? sums.dq.rows(tile.keys.batch, head(turn), tile.keys.begin).row(token(turn)) + column
              : nullptr;
      const std::int64_t base = shape.cluster(tile.item, head(turn), 0) * shape.width;
      const std::int64_t at = (base + own) * shape.D + column;
      const bool any = found.y > 0;
      uint4 words[4] = {SlotSums<T>::fetch(queries ? queries : none, any && queries),
                        SlotSums<T>::fetch(sums.q_slots + at, any && queries),
                        SlotSums<T>::fetch(sums.k_slots + at, any && sums.dk.data),
                        SlotSums<T>::fetch(sums.v_slots + at, any && sums.dv.data)};
      const int2 behind = find(turn + 2);
      const int own_next = next.y > 0 ? entry(turn + 1, next.x) : 0;
      Row sum = {};
      if (turn % shape.group == 0) keys = values = sum;
      SlotSums<T>::add(sum, words[0]);
      SlotSums<T>::add(sum, words[1]);
      SlotSums<T>::add(keys, words[2]);
      SlotSums<T>::add(values, words[3]);
#pragma unroll 1
      for (int i = 1; i < found.y; ++i) {
        const std::int64_t more = (base + entry(turn, found.x + i)) * shape.D + column;
        words[1] = SlotSums<T>::fetch(sums.q_slots + more, queries);
        words[2] = SlotSums<T>::fetch(sums.k_slots + more, sums.dk.data);
        words[3] = SlotSums<T>::fetch(sums.v_slots + more, sums.dv.data);
        SlotSums<T>::add(sum, words[1]);
        SlotSums<T>::add(keys, words[2]);
        SlotSums<T>::add(values, words[3]);
      }
      if (any && queries) SlotSums<T>::store(queries, sum);
      if (turn % shape.group == shape.group - 1) {
        store_key(sums.dk, turn, keys);
        store_key(sums.dv, turn, values);
      }
      found = next;
      next = behind;
      own = own_next;
    }
  }
  __device__ void store_key(const Tensor4<T>& to, int turn, const Row& row) const {
    if (!to.data) return;
    const Rows<T> rows = to.rows(tile.keys.batch, key_head, tile.keys.begin);
    SlotSums<T>::store(rows.row(token(turn)) + column, row);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    sum_slots_kernel(const __grid_constant__ SlotSums<T> sums) {
  await_previous();
  const KeyChunk tile = sums.tiles.find(sums.shape.tokens, static_cast<int>(blockIdx.x));
  const int column = static_cast<int>(threadIdx.x) % 8 * 8;
  if (column >= sums.shape.D) return;
  const SlotTurns<T> turns{sums, tile, static_cast<int>(blockIdx.y),
                           tile.begin + static_cast<int>(threadIdx.x) / 8, column};
  turns.run(SlotSums<T>::kTurns * sums.shape.group);
}

template <class T>
void sum_slots(const CastShape& shape, const CastBackward& pass, cudaStream_t stream) {
  const auto view = [](const TensorView& rows) {
    return rows.present() ? tensor4<T>(rows) : Tensor4<T>{};
  };
  const AttentionGradients& to = pass.gradients;
  const SlotSums<T> sums{shape,
                         pass.slots,
                         token_tiles(shape, SlotSums<T>::kTokens),
                         view(to.dq),
                         view(to.dk),
                         view(to.dv),
                         static_cast<const T*>(pass.dq_slots),
                         static_cast<const T*>(pass.dk_slots),
                         static_cast<const T*>(pass.dv_slots)};
  if (sums.tiles.slots == 0) return;
  launch_early(
      "cast slots", sum_slots_kernel<T>,
      dim3(static_cast<unsigned>(sums.tiles.slots), static_cast<unsigned>(shape.H / shape.group)),
      kThreads, 0, stream, sums);
}

}  // namespace

void cast_sum_slots(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                    cudaStream_t stream) {
  if (call.inputs.q.dtype == DType::bf16)
    sum_slots<__nv_bfloat16>(shape, pass, stream);
  else
    sum_slots<__half>(shape, pass, stream);
}

}  // namespace coterie::cuda
