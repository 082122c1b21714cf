// SPDX-License-Identifier: MIT
// CAST's mix with Hopper's warpgroup products: with alpha the softmax over clusters of a token,
//   out_i = sum over other clusters of alpha_ic summary_c + sum over its slots of alpha_ic
//           inner_slot.
// The weights of a token's own clusters are removed from the softmax weights before these are
// multiplied by the summaries, and multiply the inner outputs instead.
//
// Grid: one block per multiprocessor takes runs of tiles of one (item, head), whose surrogates and
// summaries stay in shared memory. Its one to three warpgroups take tiles of 64 tokens in turn;
// each warp loads the queries of 16 tokens and the inner outputs of their slots, of this tile and
// the next. Shared memory: up to 227 KiB (MixMemory).
// Preconditions: Hopper, 16-bit types, softmax, aligned rows, all clusters of a head in shared
// memory (cast_mix_fits_sm90a). Else cast_mix in lists.cu.
#include <cstdint>

#include "cuda/api/padding.h"
#include "cuda/cast/cast.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/bands.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/wgmma.cuh"

namespace coterie::cuda {
namespace {

template <class T>
struct MixArgs {
  CastShape shape;
  TokenSlots slots;
  ItemChunks tiles;
  Tensor4<const T> q;
  Tensor4<T> out;
  const T *surrogates, *summaries;  // (H, C, D), (items, H, C, D)
  const T* inner;                   // (slots, D)
  const float* summary_lse;         // (items, H, C), or null
  float* lse;                       // (B, H, N)
};

constexpr int kMixRows = 64;  // tokens per tile, clusters per tile

template <class T, int kDim>
struct MixMemory {
  static constexpr int kMost = kDim == 64 ? 3 : 2;     // warpgroups
  static constexpr int kQueries = kDim == 64 ? 2 : 1;  // tiles of queries
  static constexpr int kSlots = kDim == 64 ? 32 : 24;  // slots per warp that fit
  static constexpr int kBand = kMixRows * 128;         // 64 columns of a tile
  static constexpr int kTile = kDim / 64 * kBand;
  static constexpr int kInnerBand = kSlots * 128;
  static constexpr int kWeights = 16 * 128;  // for a tile of clusters
  static constexpr int kWarp = kDim / 64 * kInnerBand + kWeights;
  static constexpr int kGroup = kQueries * kTile + kWarp * (kWarpgroup / 32);
  static constexpr int kPointers = 80;

  static constexpr int bytes(int tiles, int groups) {
    return tiles * (2 * kTile + 8) + groups * kGroup + kPointers;
  }
  // How many warpgroups fit.
  static int groups(int tiles) {
    return min((device_limits().shared_per_block - bytes(tiles, 0)) / kGroup, kMost);
  }

  std::uint32_t base, group, own;  // of the block, of the warpgroup, of the warp
  int tiles;

  __device__ MixMemory(std::uint32_t shared, int count)
      : base(shared),
        group(shared + 2 * count * kTile + static_cast<int>(threadIdx.x) / kWarpgroup * kGroup),
        own(group + kQueries * kTile + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * kWarp),
        tiles(count) {}

  // Surrogates (0) or summaries (1) of 64 clusters.
  __device__ std::uint32_t clusters(int tile, int which) const {
    return base + (2 * tile + which) * kTile;
  }
  __device__ std::uint32_t queries(int turn) const { return group + turn % kQueries * kTile; }
  __device__ std::uint32_t weights() const { return own; }
  __device__ std::uint32_t inner() const { return own + kWeights; }
  // Which clusters of a tile take part: 64 bits.
  __device__ std::uint32_t bits(int tile) const {
    return clusters(tiles, 0) + static_cast<int>(blockDim.x) / kWarpgroup * kGroup + tile * 8;
  }
  __device__ std::uint32_t pointers() const { return bits(tiles); }
};

// Tiles of one (item, head) that a block works on: first .. end - 1 in the item.
struct MixRun {
  int item, head, first, end;
  ItemSpan span;
};

// Start addresses of a run's tensors, kept in shared memory to save registers.
struct MixPointers {
  enum Field { entries, tokens, first, count, gates, queries, inner, out, lse };

  std::uint32_t base;

  template <class Pointer>
  __device__ Pointer get(Field field) const {
    std::uint64_t address;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(address) : "r"(base + 8 * field) : "memory");
    return reinterpret_cast<Pointer>(address);
  }
  __device__ void set(Field field, const void* pointer) const {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(base + 8 * field), "l"(pointer) : "memory");
  }
  // Called by one thread.
  template <class T>
  __device__ void set_all(const MixArgs<T>& args, const MixRun& run) const {
    const CastShape& shape = args.shape;
    const int list_head = shape.list_head(run.head);
    const std::int64_t start = args.slots.start(run.item, run.span, list_head);
    const std::int64_t row = args.slots.row(run.span, list_head, 0);
    set(entries, args.slots.slots + start);
    set(tokens, args.slots.index + start);
    set(first, args.slots.first + row);
    set(count, args.slots.count + row);
    set(gates, shape.gates(run.span));
    set(queries, args.q.rows(run.span.batch, run.head, run.span.begin).data);
    set(inner, args.inner + shape.cluster(run.item, run.head, 0) * shape.width * shape.D);
    set(out, args.out.rows(run.span.batch, run.head, run.span.begin).data);
    set(lse, args.lse + shape.row(run.span, run.head));
  }
};

// Loads of a warp. Slots are looked up two tiles ahead, their entries and the queries one tile
// ahead; the inner outputs are in flight while the clusters are multiplied.
template <class T, int kDim>
struct MixLoader {
  using Memory = MixMemory<T, kDim>;
  using Index = const std::int32_t*;

  // Slots of the warp's tokens.
  struct Range {
    int begin, count;
  };

  const MixArgs<T>& args;
  const Memory memory;
  MixPointers pointers;
  int lane, warp_row, end, length;  // end of the tiles, tokens of the item

  __device__ MixLoader(const MixArgs<T>& all, const Memory& shared, const MixRun& run)
      : args(all),
        memory(shared),
        pointers{memory.pointers()},
        lane(static_cast<int>(threadIdx.x) % 32),
        warp_row(static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16),
        end(run.end),
        length(run.span.length) {}

  __device__ int first_row(int tile) const { return tile * kMixRows + warp_row; }
  // Lane 0: where the slots of the warp's first row begin; lanes 1 and 2: begin and number of those
  // of the last row.
  __device__ int fetch_bounds(int tile) const {
    const int begin = first_row(tile), last = min(begin + 16, length) - 1;
    if (tile >= end || begin > last || lane > 2) return 0;
    const MixPointers::Field field = lane == 2 ? MixPointers::count : MixPointers::first;
    return pointers.get<Index>(field)[lane == 0 ? begin : last];
  }
  __device__ static Range range(int bounds) {
    const int begin = __shfl_sync(~0u, bounds, 0);
    return {begin, __shfl_sync(~0u, bounds, 1) + __shfl_sync(~0u, bounds, 2) - begin};
  }
  __device__ int fetch_entry(const Range& range, int slot) const {
    return slot < range.count ? pointers.get<Index>(MixPointers::entries)[range.begin + slot] : 0;
  }
  __device__ int fetch_token(int entry) const {
    return pointers.get<Index>(MixPointers::tokens)[entry];
  }
  // For row l % 16.
  __device__ float fetch_gate(int tile) const {
    return pointers.get<const float*>(
        MixPointers::gates)[min(first_row(tile) + lane % 16, length - 1)];
  }
  // Starts copying rows lane / 8, lane / 8 + 4, ..., a chunk of each, zeros for missing rows.
  // row(i) returns the address of row lane / 8 + i and whether it exists.
  template <int kRows, class Row>
  __device__ void copy(std::uint32_t tile, int band_bytes, const Row& row) const {
    // Rows four apart differ in the permutation of the chunks.
    const std::uint32_t even = Tile<T, 64>{tile}.chunk(lane / 8, lane % 8), odd = even ^ 64;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      bool there;
      const char* from = row(i, there);
#pragma unroll
      for (int band = 0; band < kDim / 64; ++band) {
        const bool inside = there && band * 64 + lane % 8 * 8 < args.shape.D;
        cp_async16((i % 8 == 0 ? even : odd) + i * 128 + band * band_bytes, from + band * 128,
                   inside ? 16 : 0);
      }
    }
  }
  __device__ void copy_queries(int turn, int tile) const {
    const int first = first_row(tile) + lane / 8;
    const auto pitch = static_cast<unsigned>(args.q.row * sizeof(T));
    const char* start = pointers.get<const char*>(MixPointers::queries) + lane % 8 * 16 +
                        static_cast<std::uint64_t>(pitch) * static_cast<unsigned>(first);
    copy<16>(memory.queries(turn) + warp_row * 128, Memory::kBand, [&](int i, bool& there) {
      there = first + i < length;
      return start + static_cast<std::uint64_t>(pitch) * i;
    });
    cp_async_commit();
  }
  // Lane i holds the entry of slot i.
  __device__ void copy_inner(int slots, int entry) const {
    const auto pitch = static_cast<unsigned>(args.shape.D * sizeof(T));
    const char* start = pointers.get<const char*>(MixPointers::inner) + lane % 8 * 16;
    const auto copy_some = [&](auto count, int first) {
      copy<decltype(count)::value>(
          memory.inner() + first * 128, Memory::kInnerBand, [&](int i, bool& there) {
            const int slot = first + i + lane / 8;
            there = slot < slots;
            return start + static_cast<std::uint64_t>(pitch) *
                               static_cast<unsigned>(__shfl_sync(~0u, entry, slot));
          });
    };
    copy_some(std::integral_constant<int, 16>(), 0);
    if (slots > 16) copy_some(std::integral_constant<int, Memory::kSlots - 16>(), 16);
    cp_async_commit();
  }
};

// The tokens of a warpgroup, by warps of 16; a thread has two rows.
template <class T, int kDim>
struct MixTokens {
  using Memory = MixMemory<T, kDim>;
  using Loader = MixLoader<T, kDim>;
  const MixArgs<T>& args;
  const Memory memory;
  const Loader loader;
  RowSoftmax softmax[2];
  float factor;       // of the logits of row l % 16, in base 2 for the softmax
  float exponent[2];  // of this thread's rows, without the sign
  float out[kDim / 64][32];
  std::uint32_t queries, q[kDim / 16][4];
  int lane;
  // Slot l of the warp's tokens, if it exists: row, cluster, and the weight once it is known.
  int slot_row, slot_cluster;
  float slot_weight;

  __device__ MixTokens(const MixArgs<T>& all, const Memory& shared, const MixRun& run)
      : args(all),
        memory(shared),
        loader(all, shared, run),
        lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void begin(int turn, float gate, int entry) {
    slot_cluster = entry >= 0 ? entry / args.shape.width : -1;
    slot_weight = 0.0f;
    queries = memory.queries(turn);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      ldmatrix_x4(q[d],
                  row_chunk<kMixRows>(queries, loader.warp_row + lane % 16, 2 * d + lane / 16));
    if (args.shape.scale < 0.0f)
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) q[i / 4][i % 4] ^= 0x80008000u;
    const float soft = fmaxf(gate, 0.0f) + kLn2 * __log2f(1.0f + __expf(-fabsf(gate)));
    factor = args.shape.scale * kLog2e * (args.shape.gate_scale ? 1.0f + soft : 1.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      exponent[half] = fmaxf(fabsf(__shfl_sync(~0u, factor, lane / 4 + 8 * half)), 1e-30f);
      softmax[half] = {};
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) out[i / 32][i % 32] = 0.0f;
  }
  // Starts s = Q Sᵀ.
  __device__ void scores(float (&s)[32], int tile) const {
    row_products(s, q, Bands<T, kDim, kMixRows>{memory.clusters(tile, 0)}, 0);
  }
  // Starts out += P R.
  __device__ void add_products(const std::uint32_t (&p)[4][4], int tile) {
    cuda::add_products(out, p, Bands<T, kDim, kMixRows>{memory.clusters(tile, 1)}, 0);
  }
  __device__ void raise(const float (&s)[32]) {
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 16; ++i) top[i % 2] = fmaxf(top[i % 2], s[i / 2 * 4 + 2 * half + i % 2]);
      factors[half] = softmax[half].raise(quad_max(fmaxf(top[0], top[1])), exponent[half]);
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i)
        out[i / 16][i % 16 / 2 * 4 + 2 * half + i % 2] *= factors[half];
    }
    slot_weight *= of_row(factors, slot_row);
  }
  // Sets a row's shift from the first of its logits: the largest is rarely far above it.
  __device__ void set_shifts(const float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* few = s + 2 * half;
      const float top = fmaxf(fmaxf(few[0], few[1]), fmaxf(few[4], few[5]));
      softmax[half].shift = quad_max(top) * exponent[half];
    }
    const bool absent = softmax[0].shift == -INFINITY || softmax[1].shift == -INFINITY;
    if (__any_sync(~0u, absent)) raise(s);
  }
  // The value of a row, given the two rows of each thread.
  __device__ static float of_row(const float (&values)[2], int row) {
    const float low = __shfl_sync(~0u, values[0], row % 8 * 4);
    const float high = __shfl_sync(~0u, values[1], row % 8 * 4);
    return row < 8 ? low : high;
  }
  // Computes weights as left factors. The shift is kept unless a weight is large; then they are
  // computed again.
  __device__ void weigh(std::uint32_t (&p)[4][4], float (&s)[32], int tile) {
    constexpr float kLarge = 8192.0f;  // twice this is far below the largest f16
    std::uint32_t low, high;
    load_shared64(low, high, memory.bits(tile));
    if ((low & high) != ~0u) {
      __syncwarp();  // keeps the compiler from doing this for all tiles
      const unsigned long long bits = static_cast<unsigned long long>(high) << 32 | low;
      const unsigned long long own = bits >> (lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (!(own >> (i / 4 * 8 + i % 2) & 1)) s[i] = -INFINITY;
    }
    if (tile == 0) set_shifts(s);
    float sums[2][2];
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      sums[0][0] = sums[0][1] = sums[1][0] = sums[1][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int half = i % 2;
        const float low = exp2_approximate(fmaf(s[2 * i], exponent[half], -softmax[half].shift));
        const float high =
            exp2_approximate(fmaf(s[2 * i + 1], exponent[half], -softmax[half].shift));
        sums[half][0] += low;
        sums[half][1] += high;
        p[i / 4][i % 4] = pack2<T>(low, high);
      }
      const bool fine = sums[0][0] + sums[0][1] <= kLarge && sums[1][0] + sums[1][1] <= kLarge;
      if (attempt == 1 || __all_sync(~0u, fine)) break;
      raise(s);
    }
    softmax[0].sum += sums[0][0] + sums[0][1];
    softmax[1].sum += sums[1][0] + sums[1][1];
    if (__any_sync(~0u, slot_cluster / kMixRows == tile && slot_cluster >= 0))
      take_weights(p, tile);
  }
  // Moves the weights of the slots out of the others.
  __device__ void take_weights(std::uint32_t (&p)[4][4], int tile) {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) store_matrices(memory.weights(), 0, 2 * k, p[k]);
    __syncwarp();
    if (slot_cluster >= 0 && slot_cluster / kMixRows == tile) {
      const std::uint32_t place =
          Tile<T, 64>{memory.weights()}.address(slot_row, slot_cluster % kMixRows);
      std::uint16_t bits;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(place) : "memory");
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(place), "h"(std::uint16_t{0}) : "memory");
      slot_weight = to_float(reinterpret_cast<const T&>(bits));
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ldmatrix_x4(p[k], row_chunk<16>(memory.weights(), lane % 16, 2 * k + lane / 16));
  }
  // Stores 16 rows of a tile from `row` on, two chunks of each.
  __device__ void store_matrices(std::uint32_t tile, int row, int chunk,
                                 const std::uint32_t (&r)[4]) const {
    stmatrix_x4(row_chunk<kMixRows>(tile, row + lane % 16, chunk + lane / 16), r);
  }
  __device__ void sum_clusters() {
    float s[32];
    std::uint32_t p[4][4];
    wgmma_fence();
    scores(s, 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(s);
    int tile = 0;
#pragma unroll 1
    for (; tile + 1 < memory.tiles; ++tile) {
      weigh(p, s, tile);
      wgmma_fence();
      add_products(p, tile);
      scores(s, tile + 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_settle(s);
      settle_out();
    }
    weigh(p, s, tile);
    wgmma_fence();
    add_products(p, tile);
    wgmma_commit();
    wgmma_wait<0>();
    settle_out();
  }
  __device__ void settle_out() {
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) wgmma_settle(out[band]);
  }

  // The address of this lane's 16 bytes of a row, for ldmatrix of rows chosen by the lanes.
  template <int kRows>
  __device__ static std::uint32_t row_chunk(std::uint32_t tile, int row, int chunk) {
    return Tile<T, 64>{tile + chunk / 8 * (kRows * 128)}.chunk(row, chunk % 8);
  }

  // Weights of 16 slots as a left factor, one per column; lane i has weight and row of slot i % 16.
  __device__ FragmentA<T> spread(float weight, int row) const {
    const T rounded = from_float<T>(weight);
    const std::uint32_t own =
        static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t&>(rounded)) << 16 | row;
    FragmentA<T> a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t even = __shfl_sync(~0u, own, lane % 4 * 2 + 8 * i);
      const std::uint32_t odd = __shfl_sync(~0u, own, lane % 4 * 2 + 1 + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t at = lane / 4 + 8 * half;
        a.r[2 * i + half] =
            ((even & 15u) == at ? even >> 16 : 0u) | ((odd & 15u) == at ? odd & 0xffff0000u : 0u);
      }
    }
    return a;
  }
  // Adds weights times rows; rows(d) are columns from 16 d on.
  template <class Values>
  __device__ void add_rows(const FragmentA<T>& weights, const Values& rows) {
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      Accumulator sums;
      float* to = out[d / 4] + d % 4 * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = to[i];
      multiply_add(sums, weights, rows(d));
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = sums[i / 4][i % 4];
    }
  }
  // Adds the contributions of the tokens' own clusters.
  __device__ void sum_slots(const typename Loader::Range& range) {
    const int here = min(range.count, Memory::kSlots);
#pragma unroll 1
    for (int slot = 0; slot < here; slot += 16) {
      const int from = slot + lane % 16, last = min(from, here - 1);
      const float weight = __shfl_sync(~0u, slot_weight, from);
      const FragmentA<T> weights = spread(weight, __shfl_sync(~0u, slot_row, from));
      add_rows(weights, [&](int d) {
        FragmentB<T> b;
        ldmatrix_x4_trans(b.r, row_chunk<Memory::kSlots>(memory.inner(), last, 2 * d + lane / 16));
        return b;
      });
    }
    if (range.count > here) sum_rest(range, here);
  }
  // The weight of slot i % 16 from its row and cluster: the diagonal of the products of gathered
  // rows.
  __device__ float weight_of(int row, int cluster) const {
    const std::uint32_t table = memory.clusters(cluster / kMixRows, 0);
    Accumulator product = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      FragmentA<T> a;
      std::uint32_t s[4];
      ldmatrix_x4(a.r, row_chunk<kMixRows>(queries, loader.warp_row + row, 2 * d + lane / 16));
      ldmatrix_x4(s, row_chunk<kMixRows>(table, cluster % kMixRows, 2 * d + lane / 16));
      const FragmentB<T> b{{s[0], s[2], s[1], s[3]}};
      multiply_add(product, a, b);
    }
    // Lane 4 r + r / 2 has the elements of rows r and r + 8.
    const bool odd = lane / 4 % 2;
    const int from = lane % 8 * 4 + lane % 8 / 2;
    const float low = __shfl_sync(~0u, odd ? product[0][1] : product[0][0], from);
    const float high = __shfl_sync(~0u, odd ? product[1][3] : product[1][2], from);
    const float shifts[2] = {softmax[0].shift, softmax[1].shift};
    return exp2_approximate(
        fmaf(lane % 16 < 8 ? low : high, __shfl_sync(~0u, factor, row), -of_row(shifts, row)));
  }
  // Slots that do not fit, straight from global memory; the sums contain their clusters' summaries.
  __device__ __forceinline__ void sum_rest(const typename Loader::Range& range, int slot) {
    const int D = args.shape.D;
    const T* inner = loader.pointers.template get<const T*>(MixPointers::inner);
#pragma unroll 1
    for (; slot < range.count; slot += 16) {
      const int count = min(range.count - slot, 16);
      const int entry = loader.fetch_entry(range, slot + min(lane % 16, count - 1));
      const int row = loader.fetch_token(entry) % 16, cluster = entry / args.shape.width;
      const float weight = weight_of(row, cluster);
      FragmentA<T> weights = spread(lane % 16 < count ? weight : 0.0f, row);
      const T* rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int other = __shfl_sync(~0u, entry, lane % 4 * 2 + i % 2 + i / 2 * 8);
        rows[i] = inner + static_cast<std::int64_t>(other) * D;
      }
      add_rows(weights, [&](int d) {
        FragmentB<T> b;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = 16 * d + i / 2 * 8 + lane / 4;
          const auto element = [&](const T* from) {
            return column < D ? *reinterpret_cast<const std::uint16_t*>(from + column)
                              : std::uint16_t{0};
          };
          b.r[i] = element(rows[i % 2 * 2]) |
                   static_cast<std::uint32_t>(element(rows[i % 2 * 2 + 1])) << 16;
        }
        return b;
      });
#pragma unroll
      for (int i = 0; i < 4; ++i) weights.r[i] ^= 0x80008000u;
      const std::uint32_t table = memory.clusters(cluster / kMixRows, 1);
      add_rows(weights, [&](int d) {
        FragmentB<T> b;
        ldmatrix_x4_trans(b.r, row_chunk<kMixRows>(table, cluster % kMixRows, 2 * d + lane / 16));
        return b;
      });
    }
  }
  // Rows are staged in the place of the queries, which this warp has read.
  __device__ void finish(int tile) {
    const int first = loader.first_row(tile), left = loader.length - first;
    float* lse = loader.pointers.template get<float*>(MixPointers::lse) + first + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(softmax[half].sum);
      float inverse = reciprocal_approximate(total);
      const float log2 = log2_approximate(total);
      if (!(total > 0.0f)) inverse = 0.0f;
      if (lane % 4 == 0 && lane / 4 + 8 * half < left)
        lse[8 * half] = (softmax[half].shift + log2) * kLn2;
#pragma unroll
      for (int j = 0; j < kDim / 4; ++j) out[j / 16][j % 16 / 2 * 4 + 2 * half + j % 2] *= inverse;
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const float* eight = out[d / 4] + d % 4 * 8;
      const std::uint32_t words[4] = {pack2<T>(eight[0], eight[1]), pack2<T>(eight[2], eight[3]),
                                      pack2<T>(eight[4], eight[5]), pack2<T>(eight[6], eight[7])};
      store_matrices(queries, loader.warp_row, 2 * d, words);
    }
    __syncwarp();
    uint4 words[kDim / 16];
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int band = i % (kDim / 64), row = i / (kDim / 64) * 4 + lane / 8;
      words[i] = load_shared16(
          Tile<T, 64>{queries + band * Memory::kBand}.chunk(loader.warp_row + row, lane % 8));
    }
    const auto pitch = static_cast<unsigned>(args.out.row * sizeof(T));
    char* to = loader.pointers.template get<char*>(MixPointers::out) + lane % 8 * 16 +
               static_cast<std::uint64_t>(pitch) * static_cast<unsigned>(first + lane / 8);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int band = i % (kDim / 64), row = i / (kDim / 64) * 4;
      if (row + lane / 8 < left && band * 64 + lane % 8 * 8 < args.shape.D)
        *reinterpret_cast<uint4*>(to + static_cast<std::uint64_t>(pitch) * row + band * 128) =
            words[i];
    }
    __syncwarp();
  }

  // Processes this warpgroup's tiles from `tile` on; clusters() waits for the clusters.
  template <class Clusters>
  __device__ void work(int tile, const Clusters& clusters) {
    const int step = static_cast<int>(blockDim.x) / kWarpgroup;
    typename Loader::Range range = loader.range(loader.fetch_bounds(tile));
    typename Loader::Range next = loader.range(loader.fetch_bounds(tile + step));
    int bounds = loader.fetch_bounds(tile + 2 * step);
    int entry = loader.fetch_entry(range, lane), next_entry = loader.fetch_entry(next, lane);
    int token = loader.fetch_token(entry);
    float gate = loader.fetch_gate(tile);
    loader.copy_queries(0, tile);
    clusters();
#pragma unroll 1
    for (int turn = 0; tile < loader.end; tile += step, ++turn) {
      cp_async_wait<0>();
      __syncwarp();
      loader.copy_inner(range.count, entry);
      if (Memory::kQueries == 2) loader.copy_queries(turn + 1, tile + step);
      slot_row = token % 16;
      begin(turn, gate, lane < min(range.count, Memory::kSlots) ? entry : -1);
      const typename Loader::Range own = range;
      range = next;
      entry = next_entry;
      token = loader.fetch_token(entry);
      gate = loader.fetch_gate(tile + step);
      next = loader.range(bounds);
      next_entry = loader.fetch_entry(next, lane);
      bounds = loader.fetch_bounds(tile + 3 * step);
      sum_clusters();
      cp_async_wait<Memory::kQueries - 1>();
      __syncwarp();
      sum_slots(own);
      finish(tile);
      if (Memory::kQueries == 1) loader.copy_queries(turn + 1, tile + step);
    }
    cp_async_wait<0>();
  }
};

// Loads surrogates and summaries of a run with all threads.
template <class T, int kDim>
__device__ void load_clusters(const MixArgs<T>& args, const MixMemory<T, kDim>& memory,
                              const MixRun& run) {
  using Memory = MixMemory<T, kDim>;
  const CastShape& shape = args.shape;
  const T* tables[2] = {
      args.surrogates + static_cast<std::int64_t>(run.head) * shape.clusters * shape.D,
      args.summaries + shape.cluster(run.item, run.head, 0) * shape.D};
  for (int i = 0; i < 2 * memory.tiles; ++i)
#pragma unroll
    for (int band = 0; band < kDim / 64; ++band) {
      const Tile<T, 64> to{memory.clusters(i / 2, i % 2) + band * Memory::kBand};
      const int chunk = static_cast<int>(threadIdx.x) % 8, column = band * 64 + chunk * 8;
      for (int r = static_cast<int>(threadIdx.x) / 8; r < kMixRows; r += blockDim.x / 8) {
        const int row = i / 2 * kMixRows + r;
        const bool there = row < shape.clusters && column < shape.D;
        cp_async16(to.chunk(r, chunk),
                   tables[i % 2] + (there ? static_cast<std::int64_t>(row) * shape.D + column : 0),
                   there ? 16 : 0);
      }
    }
  cp_async_commit();
  for (int tile = static_cast<int>(threadIdx.x) / 32; tile < memory.tiles;
       tile += static_cast<int>(blockDim.x) / 32) {
    const ClusterBits there(
        args.summary_lse ? args.summary_lse + shape.cluster(run.item, run.head, 0) : nullptr,
        tile * kMixRows, shape.clusters);
    if (threadIdx.x % 32 == 0)
      asm volatile("st.shared.b64 [%0], %1;" ::"r"(memory.bits(tile)), "l"(there.bits) : "memory");
  }
  cp_async_wait<0>();
  fence_async_proxy();
  __syncthreads();
}

// Calls body(run) for the runs of this block.
template <class T, class Body>
__device__ __forceinline__ void for_runs(const MixArgs<T>& args, const Body& body) {
  const ItemChunks& tiles = args.tiles;
  const std::int64_t units = static_cast<std::int64_t>(tiles.slots) * args.shape.H;
  int unit = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  while (unit < last) {
    const int slot = unit % tiles.slots;
    const ItemChunk tile = tiles.find(args.shape.tokens, slot);
    MixRun run{tile.item, unit / tiles.slots, tile.split, 0, tile.span};
    // The slots of an item, the last of which may be unused.
    const int next = tile.item + 1 < tiles.items
                         ? tiles.first_slot(args.shape.tokens, tile.item + 1)
                         : tiles.slots;
    const int here = min(last - unit, next - slot);
    unit += here;
    run.end = min(run.first + here, tiles.count(run.span.length));
    if (run.first >= run.end) continue;
    body(run);
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(MixMemory<T, kDim>::kMost* kWarpgroup, 1)
    mix_sm90a_kernel(const __grid_constant__ MixArgs<T> args) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char shared[];
  const MixMemory<T, kDim> memory(shared_address(shared),
                                  (args.shape.clusters + kMixRows - 1) / kMixRows);
  for_runs(args, [&](const MixRun& run) {
    __syncthreads();  // all are done with the previous run
    if (threadIdx.x == 0) MixPointers{memory.pointers()}.set_all(args, run);
    __syncthreads();
    MixTokens<T, kDim>(args, memory, run)
        .work(run.first + static_cast<int>(threadIdx.x) / kWarpgroup,
              [&] { load_clusters(args, memory, run); });
  });
}

template <class T, int kDim>
void launch(const MixArgs<T>& args, cudaStream_t stream) {
  using Memory = MixMemory<T, kDim>;
  const int tiles = (args.shape.clusters + kMixRows - 1) / kMixRows;
  const int groups = Memory::groups(tiles);
  const std::int64_t units = static_cast<std::int64_t>(args.tiles.slots) * args.shape.H;
  const std::int64_t most = (units + groups - 1) / groups;
  launch_early("cast mix", mix_sm90a_kernel<T, kDim>,
               static_cast<unsigned>(min(std::int64_t{multiprocessors()}, most)),
               groups * kWarpgroup, Memory::bytes(tiles, groups), stream, args);
}

}  // namespace

bool cast_mix_fits_sm90a(const CastShape& shape) {
  const int tiles = (shape.clusters + kMixRows - 1) / kMixRows;
  return (shape.D > 64 ? MixMemory<Bf16, 128>::groups(tiles) : MixMemory<Bf16, 64>::groups(tiles)) >
         0;
}

void cast_mix_sm90a(const CastShape& shape, const AttentionCall& call, const CastForward& pass,
                    cudaStream_t stream) {
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    const MixArgs<T> args{shape,
                          pass.slots,
                          token_tiles(shape, kMixRows),
                          tensor4<const T>(call.inputs.q),
                          tensor4<T>(pass.out),
                          static_cast<const T*>(pass.surrogates),
                          static_cast<const T*>(pass.summaries),
                          static_cast<const T*>(pass.inner),
                          pass.saved.summary_lse,
                          pass.saved.combine_lse};
    if (args.tiles.slots == 0) return;
    dispatch_head_dim(call.op, call.Dk,
                      [&](auto width) { launch<T, decltype(width)::value>(args, stream); });
  };
  if (call.inputs.q.dtype == DType::bf16)
    run(Bf16{});
  else
    run(F16{});
  zero_padding(pass.out, call.inputs.q_sequences, call.num_items(), stream);
  fill_padding(pass.saved.combine_lse, call.B, call.H, call.N, call.inputs.q_sequences,
               call.num_items(), -INFINITY, stream);
}

}  // namespace coterie::cuda
