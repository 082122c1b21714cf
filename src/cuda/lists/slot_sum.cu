// SPDX-License-Identifier: MIT
// Rows of tokens as sums of the rows of their slots: to[token] = factor (sum over its slots of
// values[slot]), in ascending order of slots.
//
// Grid (256 or 512 neighbouring tokens of an item, heads of up to three sums), 256 threads. The
// slots of a block's tokens are concatenated, and groups of lanes take equal shares of that list,
// however the slots are distributed over tokens: 73 of 100 may have none, and some fifty. A token
// shared by several groups is finished at the end by the group that has its first slot. Shared
// memory: partial sums of groups and first slots, 10 KB; at most 64 registers. Unaligned rows take
// the same path one row at a time.
#include <cstdint>
#include <type_traits>

#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/slot_sum.h"
#include "cuda/lists/slots.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/row_chunk.cuh"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/splits.cuh"

namespace coterie::cuda {
namespace {

constexpr int kSumThreads = 256;
constexpr int kSumTokens = 512;  // maximum per block
constexpr int kSumBatch = 8;     // rows of a group in flight

static __device__ const uint4 kZeros[32] = {};  // a row

template <class T>
struct SumArgs {
  TokenSlots tokens;
  ItemChunks tiles;
  const T* values;
  int heads, value_heads;
  Tensor4<T> to;
  int parts;  // rows per slot: of several heads, or the present value and its own
  bool added, zeroed, mean;
  float eps;
  float* weights;

  __device__ float factor(int slots) const {
    if (slots == 0) return 0.0f;
    return mean ? __fdividef(1.0f, static_cast<float>(slots) + eps) : 1.0f;
  }
};

template <class T>
struct SumSet {
  static constexpr int kMost = 3;
  SumArgs<T> sum[kMost];
  SlotSumStart start;
};

// The tokens of a block.
template <class T, int kWidth>
struct TokenSums {
  using Lanes = RowLanes<T, kWidth>;
  using Values = typename Lanes::Values;
  static constexpr int kGroups = kSumThreads / Lanes::kLanes;
  static_assert(Lanes::kLanes >= kSumBatch, "a lane knows one of a batch");
  struct Shared {
    // A group's part of a token that an earlier group has begun.
    alignas(16) float open[kGroups][kWidth];
    int firsts[kSumTokens + 1];  // start of each token's slots in the list
  };

  const SumArgs<T>& args;
  const ItemChunk& tile;
  Shared& shared;
  int head;
  int count, padding;  // rows of the block; the last `padding` are no tokens
  Rows<T> rows;
  std::uint32_t pitch;  // in bytes, if aligned
  const T* values;
  const std::int32_t* slots;

  __device__ TokenSums(const SumArgs<T>& a, const ItemChunk& t, int h, Shared& s)
      : args(a), tile(t), shared(s), head(h) {
    const TokenSlots& tokens = args.tokens;
    // Rows after the last token belong to the last item.
    const bool last = !tokens.spans.cu_seqlens || tile.item + 1 == tokens.items;
    const int length = last ? tokens.spans.rows - tile.span.begin : tile.span.length;
    const int begin = tile.split * args.tiles.chunk;
    count = max(min(length - begin, args.tiles.chunk), 0);
    padding = min(max(begin + count - tile.span.length, 0), count);
    rows = args.to.rows(tile.span.batch, head, tile.span.begin + begin);
    pitch = static_cast<std::uint32_t>(rows.pitch * sizeof(T));
    TokenSlots of_values = tokens;
    of_values.heads = args.value_heads;
    const int first = args.added ? head : head * args.parts;
    values = args.values + of_values.start(tile.item, tile.span, first) * args.to.width;
    slots = tokens.slots + tokens.start(tile.item, tile.span, list_head());
  }
  __device__ int list_head() const { return args.tokens.heads == 1 ? 0 : head; }
  __device__ int slots_of(int token) const {
    return shared.firsts[token + 1] - shared.firsts[token];
  }
  // Where a token's rows begin among those of the block.
  __device__ int begin(int token) const {
    return (shared.firsts[token] - shared.firsts[0]) * args.parts;
  }

  __device__ void find_slots() const {
    const int begin = tile.split * args.tiles.chunk, tokens = count - padding;
    const std::int64_t row = args.tokens.row(tile.span, list_head(), begin);
    int end = 0;
    if (tokens > 0) end = args.tokens.first[row + tokens - 1] + args.tokens.count[row + tokens - 1];
#pragma unroll 1
    for (int i = threadIdx.x; i <= count; i += kSumThreads)
      shared.firsts[i] = i < tokens ? args.tokens.first[row + i] : end;
    __syncthreads();
  }
  // Finishes tokens without slots.
  __device__ void finish_empty() const {
    const int begin = tile.split * args.tiles.chunk;
    const Values zero = {};
    if (!args.added && !args.zeroed)
#pragma unroll 2
      for (int i = threadIdx.x / Lanes::kLanes; i < count; i += kGroups)
        if (slots_of(i) == 0) Lanes::store(rows, i, zero);
    if (args.weights) {
      float* weights = args.weights + args.tokens.row(tile.span, head, begin);
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += kSumThreads) weights[i] = args.factor(slots_of(i));
    }
  }
  // The token at a place of the list.
  __device__ int token_at(int place) const {
    int token = 0;
#pragma unroll
    for (int step = kSumTokens / 2; step > 0; step /= 2)
      if (token + step < count && shared.firsts[token + step] <= place) token += step;
    return token;
  }
  // The row known to a lane, one of the group's from `first` on, or zeros; its token, whether the
  // token ends with it, and whether the token begins before the group's rows.
  struct Known {
    static constexpr int kEnds = 1 << 16, kOpen = 1 << 17, kToken = kEnds - 1;
    const T* row;
    int token;
  };
  __device__ Known find_row(int number, int first) const {
    int place = number, part = 0;
    if (args.parts > 1) {
      place = number / args.parts;
      part = number - place * args.parts;
    }
    place += shared.firsts[0];
    const int slot = slots[place], token = token_at(place);
    const bool ends = place + 1 == shared.firsts[token + 1] && part + 1 == args.parts;
    Known known{reinterpret_cast<const T*>(kZeros), token};
    if (ends) known.token |= Known::kEnds;
    if (begin(token) < first) known.token |= Known::kOpen;
    if (!args.added)
      known.row = values + (slot + part * args.tokens.block) * args.to.width;
    else if (part == 1)
      known.row = values + static_cast<std::int64_t>(slot) * args.to.width;
    else if (place == shared.firsts[token])
      known.row = rows.row(token);
    return known;
  }

  __device__ float4* open(int group) const {
    return reinterpret_cast<float4*>(&shared.open[group][Lanes::column()]);
  }
  template <bool kAligned>
  __device__ void store(int known, const Values& sum) const {
    if (known & Known::kOpen) {
      float4* to = open(static_cast<int>(threadIdx.x) / Lanes::kLanes);
#pragma unroll
      for (int d = 0; d < Lanes::kVector; d += 4)
        to[d / 4] = make_float4(sum[d], sum[d + 1], sum[d + 2], sum[d + 3]);
      return;
    }
    const int token = known & Known::kToken;
    Values scaled;
    const float factor = args.mean ? args.factor(slots_of(token)) : 1.0f;
#pragma unroll
    for (int d = 0; d < Lanes::kVector; ++d) scaled[d] = sum[d] * factor;
    if constexpr (kAligned) {
      char* to = reinterpret_cast<char*>(rows.data + Lanes::column());
      if (Lanes::column() < rows.width)
        *reinterpret_cast<uint4*>(to + static_cast<std::uint64_t>(token) * pitch) =
            pack_chunk<T>(scaled);
    } else {
      Lanes::store(rows, token, scaled);
    }
  }

  // This lane's part of the rows known to the group; lanes beyond the width read column 0.
  template <int kStep>
  __device__ void load(const T* known, uint4 (&words)[kStep]) const {
    const int column = Lanes::column() < args.to.width ? Lanes::column() : 0;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const auto* row = reinterpret_cast<const T*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(known), i, Lanes::kLanes));
      words[i] = kStep > 1 ? __ldcs(reinterpret_cast<const uint4*>(row + column))
                           : load_chunk(row, Lanes::column(), args.to.width);
    }
  }

  // Adds kStep rows of a group at a time; one if rows are not whole vectors. If `waits`, waits for
  // the preceding kernel before reading or writing a row.
  template <int kStep>
  __device__ void add(bool waits) {
    constexpr bool kAligned = kStep > 1;
    if (kAligned) rows.aligned = true;
    find_slots();
    const int group = static_cast<int>(threadIdx.x) / Lanes::kLanes;
    const int lane = static_cast<int>(threadIdx.x) % Lanes::kLanes;
    const int all = begin(count), each = (all + kGroups - 1) / kGroups;
    const int first = min(group * each, all), last = min(first + each, all);
    const auto find = [&](int base) {
      if (lane < kStep && base + lane < last) return find_row(base + lane, first);
      return Known{reinterpret_cast<const T*>(kZeros), 0};
    };
    Values sum = {};
    int latest = Known::kEnds;  // of the group's rows
    Known known = find(first);
    if (waits) await_writes();
    finish_empty();
#pragma unroll 1
    for (int base = first; base < first + each; base += kStep) {
      uint4 words[kStep];
      load(known.row, words);
      const Known next = find(base + kStep);  // while the rows are loading
      const int lately = min(max(last - base, 1), kStep) - 1;
      const int token = __shfl_sync(~0u, known.token, lately, Lanes::kLanes);
      if (base < last) latest = token;
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int own = __shfl_sync(~0u, known.token, i, Lanes::kLanes);
        add_words(words[i], sum);
        if (own & Known::kEnds) {
          store<kAligned>(own, sum);
#pragma unroll
          for (int d = 0; d < Lanes::kVector; ++d) sum[d] = 0.0f;
        }
      }
      known = next;
    }
    // The group's last token may continue: the groups that follow have kept their parts of it.
    const bool goes_on = !(latest & Known::kEnds);
    if (goes_on && latest & Known::kOpen) store<kAligned>(latest, sum);
    __syncthreads();
    if (!goes_on || latest & Known::kOpen) return;
    const int end = begin((latest & Known::kToken) + 1);
#pragma unroll 1
    for (int other = group + 1; other * each < end; ++other)
#pragma unroll
      for (int d = 0; d < Lanes::kVector; d += 4) {
        const float4 four = open(other)[d / 4];
        sum[d] += four.x, sum[d + 1] += four.y, sum[d + 2] += four.z, sum[d + 3] += four.w;
      }
    store<kAligned>(latest, sum);
  }
  __device__ static void add_words(const uint4& words, Values& sum) {
    if constexpr (std::is_same_v<T, Bf16>) {
      const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * i] += __uint_as_float(word[i] << 16);
        sum[2 * i + 1] += __uint_as_float(word[i] & 0xffff0000u);
      }
    } else {
      const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
      for (int d = 0; d < Lanes::kVector; ++d) sum[d] += to_float(elements[d]);
    }
  }
};

constexpr int kBlocks = 4;  // per multiprocessor

template <class T, int kWidth>
__global__ void __launch_bounds__(kSumThreads, kBlocks)
    sum_kernel(const __grid_constant__ SumSet<T> set) {
  release_next();
  if (set.start == SlotSumStart::behind) await_writes();
  __shared__ typename TokenSums<T, kWidth>::Shared shared;
  int number = 0, head = static_cast<int>(blockIdx.y);
  while (head >= set.sum[number].heads) head -= set.sum[number++].heads;
  const SumArgs<T>& args = set.sum[number];
  if (static_cast<int>(blockIdx.x) < args.tiles.slots) {
    const ItemChunk tile = args.tiles.find(args.tokens.spans, static_cast<int>(blockIdx.x));
    TokenSums<T, kWidth> tokens(args, tile, head, shared);
    if (args.to.aligned && args.to.row < std::int64_t{1} << 30)
      tokens.template add<kSumBatch>(set.start == SlotSumStart::slots_ready);
    else
      tokens.template add<1>(set.start == SlotSumStart::slots_ready);
  }
  await_writes();  // completion of this kernel implies that of the preceding one
}

template <class T>
SumArgs<T> sum_args(const SlotSum& sum, int chunk) {
  return {sum.tokens,
          row_tiles(sum.tokens.spans, sum.tokens.items, chunk),
          static_cast<const T*>(sum.values),
          static_cast<int>(sum.to.size(1)),
          static_cast<int>(sum.value_heads),
          tensor4<T>(sum.to),
          sum.added ? 2 : static_cast<int>(sum.value_heads / sum.to.size(1)),
          sum.added,
          sum.zeroed,
          sum.mean,
          sum.eps,
          sum.weights};
}

}  // namespace

void sum_slots(const AttentionCall& call, const std::vector<SlotSum>& sums, SlotSumStart start,
               cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      using T = typename decltype(tag)::type;
      constexpr int kWidth = decltype(width)::value;
      SumSet<T> set{};
      std::int64_t rows = 0;
      for (const SlotSum& sum : sums) rows += sum.to.size(0) * sum.to.size(1) * sum.to.size(2);
      int chunk = kSumTokens;  // less if that would not fill the GPU a few times
      while (chunk > kSumThreads && rows / chunk < 4ll * kBlocks * multiprocessors()) chunk /= 2;
      set.start = start;
      unsigned heads = 0, blocks = 0, count = 0;
      for (const SlotSum& sum : sums) {
        if (sum.to.count() == 0) continue;
        SumArgs<T>& args = set.sum[count++];
        args = sum_args<T>(sum, chunk);
        heads += static_cast<unsigned>(args.heads);
        blocks = max(blocks, static_cast<unsigned>(args.tiles.slots));
      }
      if (heads > 0 && blocks > 0)
        launch_early("slot sums", sum_kernel<T, kWidth>, dim3(blocks, heads), kSumThreads, 0,
                     stream, set);
    });
  });
}

}  // namespace coterie::cuda
