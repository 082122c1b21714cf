// SPDX-License-Identifier: MIT
// The backward pass of the attention inside CAST's clusters. With p the weights inside a cluster,
// dp_ij = g_i . v_j and dot_i = sum_j p_ij dp_ij,
//   dq_i = alpha_i scale sum_j p_ij (dp_ij - dot_i) k_j,
//   dk_j = scale sum_i alpha_i p_ij (dp_ij - dot_i) q_i,   dv_j = sum_i alpha_i p_ij g_i.
// One kernel over the owned side: first queries (InnerQueries), then keys (InnerKeys), because keys
// need the gradients of summaries, which follow from the queries. The contributions of membership
// to the gradients of mix and summaries are computed along the way (stages.h).
//
// Grid: resident blocks take clusters in turn, in tiles of 64 members. Two warpgroups own tiles of
// two matrices in turn (queries and gradients, or keys and values) and walk all tiles of the other
// two (walk.cuh), which they share through a ring. One more warpgroup loads. Shared memory: a ring
// of 8 pairs of tiles and 4 own pairs of 16 KiB each, 210 KiB in total; 216 registers for threads
// that compute, 72 for those that load.
// Preconditions: Hopper, 16-bit types, softmax, lists of up to 256 members (kCastResident), aligned
// rows of up to 64 elements. Else member_backward.cu and lists.cu.
#include "cuda/cast/walk.cuh"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

template <class T>
struct InnerArgs {
  CastShape shape;
  CastBackward pass;
  Tensor4<const T> q, k, v, grad_out;

  __device__ int clusters() const { return shape.items * shape.H * shape.clusters; }
  __device__ int tiles() const { return (shape.width + 63) / 64; }
  __device__ const float* surrogate(int cluster) const {  // of (item, head, cluster)
    const int heads = shape.H * shape.clusters;
    return shape.surrogates + static_cast<std::int64_t>(cluster % heads) * shape.D;
  }
};

// Row metadata for a computing warpgroup; zeros if there is no row, except for an infinite lse.
struct alignas(16) InnerRow {
  float lse;     // queries: of the scores, base 2
  float factor;  // of the logits of the mix, or of the summary
  float other;   // queries: log-sum-exp of the mix; keys: present value of dgate_slots
  float slope;   // derivative of the factor by the gate
};
// Data of a cluster. For keys, `summary` is its gradient; lse and dot are for keys only.
struct alignas(16) InnerFloats {
  float surrogate[64], summary[64], lse, dot;
};

// One cluster and its data.
template <class T>
struct InnerCluster {
  int number, item, head, cluster;  // number: of (item, head, cluster)
  ItemSpan span;
  std::int64_t first_slot;
  const std::int32_t* list;

  __device__ InnerCluster(const InnerArgs<T>& args, int n) {
    const CastShape& shape = args.shape;
    cluster = n % shape.clusters;
    head = n / shape.clusters % shape.H;
    item = n / shape.clusters / shape.H;
    span = shape.tokens.span(item);
    number = n;
    first_slot = static_cast<std::int64_t>(n) * shape.width;
    list = shape.list(item, head, cluster);
  }
};

template <class T>
struct InnerMemory {
  static constexpr int kGroups = 2, kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr int kRing = 8, kOwn = 2 * kGroups;  // tiles: two clusters of 256 members
  using Tiles = TilePair<T, 64>;
  // Next to a tile of the ring: a tile of 8 rows, of which up to four are the cluster's; the rest
  // holds metadata of the 64 rows.
  static constexpr int kBeside = 1024, kFactsAt = 512;
  static constexpr int kOwnAt = kRing * Tiles::kBytes, kBesideAt = kOwnAt + kOwn * Tiles::kBytes;
  static constexpr int kSumsAt = kBesideAt + kRing * kBeside;  // 8 rows per group: weights of sums
  static constexpr int kRowsAt = kSumsAt + kGroups * 1024;
  static constexpr int kClustersAt = kRowsAt + kOwn * 64 * static_cast<int>(sizeof(InnerRow));
  static constexpr int kBarriersAt = kClustersAt + kRing * static_cast<int>(sizeof(InnerFloats));
  static constexpr int kCountsAt = kBarriersAt + 16 * (kRing + kOwn);
  static constexpr int kBytes = kCountsAt + 4 * kRing;
  unsigned char* memory;
  std::uint32_t base;

  __device__ explicit InnerMemory(unsigned char* shared)
      : memory(shared), base(shared_address(shared)) {}
  __device__ Tiles ring(int place) const { return Tiles(base + place * Tiles::kBytes); }
  __device__ Tiles own(int place) const { return Tiles(base + kOwnAt + place * Tiles::kBytes); }
  __device__ Tile<T, 64> beside(int place) const { return {base + kBesideAt + place * kBeside}; }
  __device__ Tile<T, 64> sums(int group) const { return {base + kSumsAt + group * 1024}; }
  __device__ float* facts(int place) const {  // 64 shifts, 64 deltas
    return reinterpret_cast<float*>(memory + kBesideAt + place * kBeside + kFactsAt);
  }
  __device__ int& count(int place) const {  // members of a tile in the ring
    return reinterpret_cast<int*>(memory + kCountsAt)[place];
  }
  __device__ InnerRow* rows(int place) const {  // of a group's own rows
    return reinterpret_cast<InnerRow*>(memory + kRowsAt) + place * 64;
  }
  __device__ InnerFloats& cluster(int place) const {  // stored with its first tile in the ring
    return reinterpret_cast<InnerFloats*>(memory + kClustersAt)[place];
  }
  __device__ std::uint32_t ring_full(int place) const { return base + kBarriersAt + 16 * place; }
  __device__ std::uint32_t ring_empty(int place) const { return ring_full(place) + 8; }
  __device__ std::uint32_t own_full(int place) const { return ring_full(kRing + place); }
  __device__ std::uint32_t own_empty(int place) const { return own_full(place) + 8; }

  // Called by one thread; all threads of the block wait for it.
  __device__ void start() const {
    for (int i = 0; i < kRing + kOwn; ++i) {
      // Copies by lanes, and a warp's own writes.
      mbarrier_init(ring_full(i), 32 + kWarpArrivals);
      mbarrier_init(ring_empty(i), (i < kRing ? 4 * kGroups : 4) * kWarpArrivals);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Waits for tile `turn` of a group's own.
  __device__ void wait_own(int group, int turn) const {
    mbarrier_wait(own_full(2 * group + turn % 2), turn / 2 & 1);
  }
};

// The rows of 64 members. Each lane holds two of their tokens.
struct MemberRows {
  int token[2];

  __device__ MemberRows(const std::int32_t* list, int first, int width) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = first + 32 * half + lane;
      token[half] = place < width ? list[place] : -1;
    }
  }
  __device__ int count() const {
    return __popc(__ballot_sync(~0u, token[0] >= 0)) + __popc(__ballot_sync(~0u, token[1] >= 0));
  }
  // Copies rows of two matrices. Called by a warp.
  template <class T>
  __device__ void copy(const TilePair<T, 64>& to, const Rows<const T>& a,
                       const Rows<const T>& b) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % 8, above = lane / 8;
    const bool inside = chunk * 8 < a.width;
    const int members = count(), end = inside ? members - above : 0;
    const T *from_a = a.data + (inside ? chunk * 8 : 0),
            *from_b = b.data + (inside ? chunk * 8 : 0);
    const int pitch_a = static_cast<int>(a.pitch) * 2, pitch_b = static_cast<int>(b.pitch) * 2;
    const std::uint32_t even = to.first.base + above * 128 + ((chunk ^ above) << 4);
    const std::uint32_t odd = even ^ 64;
    constexpr int kSecond = TilePair<T, 64>::Matrix::kBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tokens = max(token[half], 0);
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const int row = __shfl_sync(~0u, tokens, 4 * step + above);
        const int bytes = 32 * half + 4 * step < end ? 16 : 0;
        const std::uint32_t place = (step % 2 ? odd : even) + (8 * half + step) * 512;
        cp_async16(place, row_address(from_a, row, pitch_a), bytes);
        cp_async16(place + kSecond, row_address(from_b, row, pitch_b), bytes);
      }
    }
  }

 private:
  // One instruction; the compiler needs several.
  __device__ static const void* row_address(const void* base, int row, int pitch) {
    std::uint64_t address;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(pitch), "l"(base));
    return reinterpret_cast<const void*>(address);
  }
};

// The loading warpgroup: each warp does one job, then they synchronise, so that none gets a full
// phase of a place ahead. load_own(cluster, tile, place) and load_ring(cluster, tile, place) are
// called by a warp.
template <class T, class Own, class Ring>
__device__ __forceinline__ void load_clusters(const InnerArgs<T>& args,
                                              const InnerMemory<T>& memory, int begin, int end,
                                              const Own& load_own, const Ring& load_ring) {
  using M = InnerMemory<T>;
  const int tiles = args.tiles(), warp = static_cast<int>(threadIdx.x) / 32 % 4;
  // Order within a cluster: its first own tile, its ring tiles, its other own tiles.
  const auto load = [&](int number, int i) {
    const bool shared = i > 0 && i <= tiles;
    const int tile = i == 0 ? 0 : shared ? i - 1 : i - tiles;
    const int t = number * tiles + tile, turn = t / M::kGroups;
    const int place = shared ? t % M::kRing : t % M::kGroups * 2 + turn % 2;
    if (shared && t >= M::kRing)
      mbarrier_wait(memory.ring_empty(place), (t / M::kRing + 1) & 1);
    else if (!shared && turn >= 2)
      mbarrier_wait(memory.own_empty(place), (turn / 2 + 1) & 1);
    if (shared)
      load_ring(begin + number, tile, place);
    else
      load_own(begin + number, tile, place);
    arrive_filled(shared ? memory.ring_full(place) : memory.own_full(place));
  };
  const int jobs = (end - begin) * 2 * tiles;
#pragma unroll 1
  for (int first = 0; first < jobs; first += 4) {
    const int job = first + warp;
    if (job < jobs) load(job / (2 * tiles), job % (2 * tiles));
    sync_group();
  }
}

// The tiles that one computing warpgroup owns: calls body(first tile of the cluster in the ring,
// tile, place of its own) when all data is ready, and releases it afterwards.
template <class T, class Body>
__device__ __forceinline__ void for_own_tiles(const InnerArgs<T>& args,
                                              const InnerMemory<T>& memory, int begin, int end,
                                              const Body& body) {
  using M = InnerMemory<T>;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int tiles = args.tiles(), total = (end - begin) * tiles;
  struct Cursor {  // a tile of the ring
    int number = 0, place = 0, phase = 0;
    __device__ void step() {
      ++number;
      if (++place == M::kRing) {
        place = 0;
        phase ^= 1;
      }
    }
  } ready, given;  // the first not waited for, or not released
  const auto wait_below = [&](int n) {
#pragma unroll 1
    for (; ready.number < n; ready.step())
      mbarrier_wait(memory.ring_full(ready.place), ready.phase);
  };
  int ring = 0, tile = group;  // first tile of the cluster in the ring; own tile
  for (; tile >= tiles; tile -= tiles) ring += tiles;
#pragma unroll 1
  for (int turn = 0; ring < total; ++turn) {
    const int place = 2 * group + turn % 2;
    memory.wait_own(group, turn);
    wait_below(ring + tiles);
    fence_async_proxy();
    body(ring, tile, place);
    mbarrier_arrive_warp(memory.own_empty(place));
    for (tile += M::kGroups; tile >= tiles; tile -= tiles) ring += tiles;
    if (ring >= total) break;
    wait_below(ring);
#pragma unroll 1
    for (; given.number < ring; given.step()) mbarrier_arrive_warp(memory.ring_empty(given.place));
  }
}

// A lane's two of up to 64 floats.
__device__ __forceinline__ float2 lane_pair(const float* from, int D) {
  const int column = static_cast<int>(threadIdx.x) % 32 * 2;
  return column < D ? *reinterpret_cast<const float2*>(from + column) : make_float2(0.0f, 0.0f);
}
// Called by a warp: stores a row of such pairs as floats and as two rows of T whose sum it is.
template <class T>
__device__ __forceinline__ void split_row(float (&floats)[64], const Tile<T, 64>& to, int row,
                                          const float2& two) {
  const int column = static_cast<int>(threadIdx.x) % 32 * 2;
  const std::uint32_t high = pack2<T>(two.x, two.y);
  const T* part = reinterpret_cast<const T*>(&high);
  const std::uint32_t low = pack2<T>(two.x - to_float(part[0]), two.y - to_float(part[1]));
  *reinterpret_cast<float2*>(floats + column) = two;
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to.address(row, column)), "r"(high) : "memory");
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to.address(row + 1, column)), "r"(low) : "memory");
}

template <class T>
__device__ __forceinline__ void copy_keys(const InnerArgs<T>& args, const InnerCluster<T>& cluster,
                                          const MemberRows& rows, const TilePair<T, 64>& to) {
  const int head = cluster.head / args.shape.group;
  rows.copy(to, args.k.rows(cluster.span.batch, head, cluster.span.begin),
            args.v.rows(cluster.span.batch, head, cluster.span.begin));
}
template <class T>
__device__ __forceinline__ void copy_queries(const InnerArgs<T>& args,
                                             const InnerCluster<T>& cluster, const MemberRows& rows,
                                             const TilePair<T, 64>& to) {
  rows.copy(to, args.q.rows(cluster.span.batch, cluster.head, cluster.span.begin),
            args.grad_out.rows(cluster.span.batch, cluster.head, cluster.span.begin));
}
// Metadata of a group's own rows: make(gate, token, row) for those that exist.
template <class T, class Make>
__device__ __forceinline__ void load_row_facts(const InnerArgs<T>& args,
                                               const InnerCluster<T>& cluster,
                                               const MemberRows& rows, InnerRow* to,
                                               const Make& make) {
  const float4* gates = args.pass.gates +
                        static_cast<std::int64_t>(cluster.span.batch) * args.shape.N +
                        cluster.span.begin;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = rows.token[half], row = 32 * half + static_cast<int>(threadIdx.x) % 32;
    InnerRow fact{INFINITY, 0.0f, 0.0f, 0.0f};  // no weight
    if (token >= 0) fact = make(gates[token], token, row);
    to[row] = fact;
  }
}

// Starts products of a group's own rows with the rows of their cluster.
template <class T>
__device__ __forceinline__ void narrow_products(float (&first)[4], float (&second)[4],
                                                const TilePair<T, 64>& own, std::uint32_t cluster) {
  const Bands<T, 64, 64> rows{cluster};
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] = second[i] = 0.0f;
  wgmma_settle(first);
  wgmma_settle(second);
  wgmma_fence();
#pragma unroll
  for (int depth = 0; depth < 4; ++depth) {
    wgmma<T, 1, 0>(first, own.first.by_columns(0, depth), rows.by_columns(0, depth));
    wgmma<T, 1, 0>(second, own.second.by_columns(0, depth), rows.by_columns(0, depth));
  }
  wgmma_commit();
}
// Weights of rows in shared memory, and the sums of a group's own rows with them: entry (column of
// the rows, index of the weight). A float is split into two weights.
template <class T>
__device__ __forceinline__ void store_weight(const Tile<T, 64>& to, int number, int row,
                                             float value) {
  const T high = from_float<T>(value);
  const T part = number % 2 == 0 ? high : from_float<T>(value - to_float(high));
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to.address(number, row)),
               "h"(*reinterpret_cast<const std::uint16_t*>(&part))
               : "memory");
}
template <class T>
__device__ __forceinline__ void add_weighted_rows(float (&sums)[4], const Bands<T, 64, 64>& own,
                                                  std::uint32_t weights) {
  const Bands<T, 64, 64> factors{weights};
#pragma unroll
  for (int depth = 0; depth < 4; ++depth)
    wgmma<T, 1, 0, 1>(sums, own.by_rows(16 * depth, 0), factors.by_columns(0, depth));
}

// Queries own the rows. The effect of membership on the mix's gradients is computed along the way
// (stages.h): a token's logit and dalpha in its own cluster are products with the cluster's
// surrogate and summary, rounded.
template <class T>
struct InnerQueries {
  static constexpr bool kBeside = true;  // overlaps the search of the slots
  using Memory = InnerMemory<T>;
  const InnerArgs<T>& args;
  const Memory& memory;

  __device__ void load_own(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                           int place) const {
    const CastShape& shape = args.shape;
    copy_queries(args, cluster, rows, memory.own(place));
    const float* lse = args.pass.saved.member_lse + cluster.first_slot + 64 * tile;
    const float* combine_lse = args.pass.saved.combine_lse + shape.row(cluster.span, cluster.head);
    load_row_facts(args, cluster, rows, memory.rows(place),
                   [&](const float4& gate, int token, int row) {
                     return InnerRow{lse[row] * kLog2e, shape.scale * gate.x, combine_lse[token],
                                     shape.scale * gate.y};
                   });
  }
  __device__ void load_ring(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                            int place) const {
    const CastShape& shape = args.shape;
    copy_keys(args, cluster, rows, memory.ring(place));
    const int count = rows.count();
    if (tile == 0) {
      InnerFloats& floats = memory.cluster(place);
      split_row(floats.surrogate, memory.beside(place), 0,
                lane_pair(args.surrogate(cluster.number), shape.D));
      split_row(
          floats.summary, memory.beside(place), 2,
          lane_pair(args.pass.saved.summary + static_cast<std::int64_t>(cluster.number) * shape.D,
                    shape.D));
    }
    if (threadIdx.x % 32 == 0) memory.count(place) = count;
  }

  __device__ void compute(int n, int tile, int ring, int place) const {
    const auto own = memory.own(place);
    const float exponent = args.shape.scale * kLog2e;
    const float lse[2] = {memory.rows(place)[group_row(0)].lse,
                          memory.rows(place)[group_row(1)].lse};
    TileSum<64> sum, mean;
    declare<64>(sum);
    declare<64>(mean);
    float error[2] = {0.0f, 0.0f}, guess[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int step = 0; step < args.tiles(); ++step) {
      const int at = (ring + step) % Memory::kRing;
      const int count = __shfl_sync(~0u, memory.count(at), 0);
      if (count == 0 && step > 0) break;
      const auto keys = memory.ring(at);
      const auto weigh = [&](float(&s)[32]) {
#pragma unroll
        for (int j = 0; j < 32; ++j) s[j] = exp2_approximate(fmaf(s[j], exponent, -lse[j / 2 % 2]));
        if (count == 64) return;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          if (j / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + j % 2 >= count) s[j] = 0.0f;
      };
      const auto derive = [&](float(&d)[32], const float(&s)[32]) {
        if (step == 0) guess_deltas(guess, d, s);
        float part[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          d[j] = s[j] * (d[j] - guess[j / 2 % 2]);
          part[j / 2 % 2][j % 2] += d[j];
        }
        error[0] += part[0][0] + part[0][1];
        error[1] += part[1][0] + part[1][1];
      };
      walk<T, 64>(own, keys, keys.first, sum, mean, step, weigh, derive);
    }
    wgmma_wait<0>();
    settle<64>(sum);
    settle<64>(mean);
    finish(n, tile, ring, place, sum, mean, error, guess);
  }
  __device__ void finish(int n, int tile, int ring, int place, TileSum<64>& sum,
                         const TileSum<64>& mean, const float (&error)[2],
                         const float (&guess)[2]) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const int lane = static_cast<int>(threadIdx.x) % 4, D = shape.D;
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    const int count = memory.count((ring + tile) % Memory::kRing);
    const auto own = memory.own(place);
    float logits[4], dalphas[4];
    narrow_products<T>(logits, dalphas, own, memory.beside(ring % Memory::kRing).base);
    wgmma_wait<0>();
    wgmma_settle(logits);
    wgmma_settle(dalphas);
    const std::int64_t first = static_cast<std::int64_t>(n) * shape.width + 64 * tile;
    const float2* surrogate =
        reinterpret_cast<const float2*>(memory.cluster(ring % Memory::kRing).surrogate) + lane;
    float4 facts[2];  // stored after the fence, which would wait for them
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const bool there = row < count;
      const InnerRow query = memory.rows(place)[row];
      const float e = quad_sum(error[side]), dot = guess[side] + e;
      const float product = __shfl_sync(~0u, logits[2 * side], 0, 4);
      const float dalpha = __shfl_sync(~0u, dalphas[2 * side], 1, 4);
      const float exponent = fmaf(product, query.factor, -query.other) * kLog2e;
      const float weight = there ? exp2_approximate(exponent) : 0.0f;
      const float excess = there ? weight * (dot - dalpha) : 0.0f;
      const float factor = query.factor * excess, scale = shape.scale * weight;
      facts[side] = make_float4(query.lse - exponent, dot, excess, query.slope * excess * product);
      store_weight(memory.sums(group), lane, row, lane < 2 ? factor : -weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 two = surrogate[4 * i];
        float* value = sum[0] + 4 * i + 2 * side;
        const float* own_mean = mean[0] + 4 * i + 2 * side;
        value[0] = fmaf(scale, fmaf(-e, own_mean[0], value[0]), factor * two.x);
        value[1] = fmaf(scale, fmaf(-e, own_mean[1], value[1]), factor * two.y);
      }
    }
    // Contribution of membership to the gradients of the surrogate and the summary.
    float members[2][4] = {};
    fence_async_proxy();
    sync_group();
    wgmma_settle(members[0]);
    wgmma_settle(members[1]);
    wgmma_fence();
    add_weighted_rows<T>(members[0], own.first, memory.sums(group).base);
    add_weighted_rows<T>(members[1], own.second, memory.sums(group).base);
    wgmma_commit();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      if (row >= count || lane != 0) continue;
      pass.shifts[first + row] = facts[side].x;
      pass.dots[first + row] = facts[side].y;
      pass.excess[first + row] = facts[side].z;
      if (shape.gate_scale) pass.dgate_slots[first + row] = facts[side].w;
    }
    wgmma_wait<0>();
    wgmma_settle(members[0]);
    wgmma_settle(members[1]);
    float* to =
        pass.member_parts + ((static_cast<std::int64_t>(n) * args.tiles() + tile) * 2 + lane) * D;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float value = lane == 0 ? members[0][2 * side] + members[0][2 * side + 1]
                                    : members[1][2 * side] + members[1][2 * side + 1];
      if (lane < 2 && group_row(side) < D) to[group_row(side)] = value;
    }
    sync_group();  // rows and weights have been read
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
    store_rows(static_cast<T*>(pass.dq_slots) + (first + row) * D, D, count - row, D,
               own.first.base, sum[0]);
  }
};

// Keys own the rows. The summary contributes, with dR its gradient and dot = dR . summary,
//   dlogit_j = beta_j (dR . v_j - dot),   dv_j += beta_j dR,   dk_j += factor_j dlogit_j S.
template <class T>
struct InnerKeys {
  static constexpr bool kBeside = false;
  using Memory = InnerMemory<T>;
  const InnerArgs<T>& args;
  const Memory& memory;

  __device__ void load_own(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                           int place) const {
    const CastShape& shape = args.shape;
    copy_keys(args, cluster, rows, memory.own(place));
    const float* dgate = args.pass.dgate_slots + cluster.first_slot + 64 * tile;
    load_row_facts(args, cluster, rows, memory.rows(place), [&](const float4& gate, int, int row) {
      return InnerRow{INFINITY, shape.scale * gate.z, shape.gate_scale ? dgate[row] : 0.0f,
                      shape.scale * gate.w};
    });
  }
  __device__ void load_ring(const InnerCluster<T>& cluster, const MemberRows& rows, int tile,
                            int place) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    copy_queries(args, cluster, rows, memory.ring(place));
    const std::int64_t first = cluster.first_slot + 64 * tile;
    const int lane = static_cast<int>(threadIdx.x) % 32, count = rows.count();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 32 * half + lane;
      const bool there = rows.token[half] >= 0;
      memory.facts(place)[row] = there ? pass.shifts[first + row] : INFINITY;
      memory.facts(place)[64 + row] = there ? pass.dots[first + row] : 0.0f;
    }
    if (tile == 0) {
      InnerFloats& floats = memory.cluster(place);
      const float2 gradient =
          lane_pair(pass.dsummary + static_cast<std::int64_t>(cluster.number) * shape.D, shape.D);
      split_row(floats.surrogate, memory.beside(place), 0,
                lane_pair(args.surrogate(cluster.number), shape.D));
      split_row(floats.summary, memory.beside(place), 2, gradient);
      if (lane == 0) {
        floats.lse = pass.saved.summary_lse[cluster.number];
        floats.dot = pass.summary_dots[cluster.number];
      }
    }
    if (lane == 0) memory.count(place) = count;
  }

  __device__ void compute(int n, int tile, int ring, int place) const {
    const auto own = memory.own(place);
    const float exponent = args.shape.scale * kLog2e;
    const int lane = static_cast<int>(threadIdx.x) % 4;
    TileSum<64> dk, dv;
    declare<64>(dk);
    declare<64>(dv);
#pragma unroll 1
    for (int step = 0; step < args.tiles(); ++step) {
      const int at = (ring + step) % Memory::kRing;
      if (__shfl_sync(~0u, memory.count(at), 0) == 0 && step > 0) break;
      const auto queries = memory.ring(at);
      const float2* facts = reinterpret_cast<const float2*>(memory.facts(at)) + lane;
      const auto weigh = [&](float(&s)[32]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 shift = facts[4 * i];
#pragma unroll
          for (int j = 4 * i; j < 4 * i + 4; ++j)
            s[j] = exp2_approximate(fmaf(s[j], exponent, -(j % 2 ? shift.y : shift.x)));
        }
      };
      const auto derive = [&](float(&d)[32], const float(&s)[32]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 dot = facts[32 + 4 * i];
#pragma unroll
          for (int j = 4 * i; j < 4 * i + 4; ++j) d[j] = s[j] * (d[j] - (j % 2 ? dot.y : dot.x));
        }
      };
      walk<T, 64>(own, queries, queries.second, dk, dv, step, weigh, derive);
    }
    wgmma_wait<0>();
    settle<64>(dk);
    settle<64>(dv);
    finish(n, tile, ring, place, dk, dv);
  }
  __device__ void finish(int n, int tile, int ring, int place, TileSum<64>& dk,
                         TileSum<64>& dv) const {
    const CastShape& shape = args.shape;
    const CastBackward& pass = args.pass;
    const int lane = static_cast<int>(threadIdx.x) % 4, D = shape.D;
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    const int count = memory.count((ring + tile) % Memory::kRing);
    const auto own = memory.own(place);
    float products[4], dbetas[4];
    narrow_products<T>(products, dbetas, own, memory.beside(ring % Memory::kRing).base);
    const InnerFloats& floats = memory.cluster(ring % Memory::kRing);
    const float2* surrogate = reinterpret_cast<const float2*>(floats.surrogate) + lane;
    const float2* summary = reinterpret_cast<const float2*>(floats.summary) + lane;
    const float lse = floats.lse, dot = floats.dot;
    wgmma_wait<0>();
    wgmma_settle(products);
    wgmma_settle(dbetas);
    const std::int64_t first = static_cast<std::int64_t>(n) * shape.width + 64 * tile;
    float dgate[2];  // stored after the fence, which would wait for it
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int row = group_row(side);
      const bool there = row < count;
      const InnerRow key = memory.rows(place)[row];
      const float product = __shfl_sync(~0u, products[2 * side] + products[2 * side + 1], 0, 4);
      const float dbeta = __shfl_sync(~0u, dbetas[2 * side] + dbetas[2 * side + 1], 1, 4);
      const float beta = there ? exp2_approximate(fmaf(product, key.factor, -lse) * kLog2e) : 0.0f;
      const float dlogit = there ? beta * (dbeta - dot) : 0.0f, factor = key.factor * dlogit;
      dgate[side] = key.other - key.slope * dlogit * product;
      if (lane < 2) store_weight(memory.sums(group), lane, row, factor);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 a = surrogate[4 * i], b = summary[4 * i];
        float *key_row = dk[0] + 4 * i + 2 * side, *value_row = dv[0] + 4 * i + 2 * side;
        key_row[0] = fmaf(shape.scale, key_row[0], factor * a.x);
        key_row[1] = fmaf(shape.scale, key_row[1], factor * a.y);
        value_row[0] = fmaf(beta, b.x, value_row[0]);
        value_row[1] = fmaf(beta, b.y, value_row[1]);
      }
    }
    // Contribution of keys to the gradient of the surrogate.
    float keys[4] = {};
    fence_async_proxy();
    sync_group();
    wgmma_settle(keys);
    wgmma_fence();
    add_weighted_rows<T>(keys, own.first, memory.sums(group).base);
    wgmma_commit();
#pragma unroll
    for (int side = 0; side < 2; ++side)
      if (group_row(side) < count && lane == 0 && shape.gate_scale)
        pass.dgate_slots[first + group_row(side)] = dgate[side];
    wgmma_wait<0>();
    wgmma_settle(keys);
    float* to = pass.key_parts + (static_cast<std::int64_t>(n) * args.tiles() + tile) * D;
#pragma unroll
    for (int side = 0; side < 2; ++side)
      if (lane == 0 && group_row(side) < D)
        to[group_row(side)] = keys[2 * side] + keys[2 * side + 1];
    sync_group();  // rows and weights have been read
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
    store_rows(static_cast<T*>(pass.dk_slots) + (first + row) * D, D, count - row, D,
               own.first.base, dk[0]);
    store_rows(static_cast<T*>(pass.dv_slots) + (first + row) * D, D, count - row, D,
               own.second.base, dv[0]);
  }
};

// setmaxnreg: 384 threads start with 168 each.
constexpr int kLoadRegisters = 72, kComputeRegisters = 216;

template <class T, template <class> class Part>
__global__ void __launch_bounds__(InnerMemory<T>::kThreads, 1)
    inner_kernel(const __grid_constant__ InnerArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if (!Part<T>::kBeside) await_previous();
  const InnerMemory<T> memory(shared);
  if (threadIdx.x == 0) memory.start();
  __syncthreads();
  // The last blocks get one cluster less: preceding kernels may still occupy their multiprocessors.
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int each = args.clusters() / blocks, more = args.clusters() % blocks;
  const int begin = block * each + min(block, more), end = begin + each + (block < more);
  const Part<T> part{args, memory};
  if (threadIdx.x >= InnerMemory<T>::kGroups * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoadRegisters));
    const auto load_own = [&](int n, int tile, int place) {
      const InnerCluster<T> cluster(args, n);
      part.load_own(cluster, {cluster.list, 64 * tile, args.shape.width}, tile, place);
    };
    const auto load_ring = [&](int n, int tile, int place) {
      const InnerCluster<T> cluster(args, n);
      part.load_ring(cluster, {cluster.list, 64 * tile, args.shape.width}, tile, place);
    };
    load_clusters<T>(args, memory, begin, end, load_own, load_ring);
    if (!Part<T>::kBeside) return;
    await_writes();
    release_next();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
    const int tiles = args.tiles();
    int n = begin, at = 0;  // the cluster whose first tile in the ring is `at`
    for_own_tiles<T>(args, memory, begin, end, [&](int ring, int tile, int place) {
      for (; at < ring; at += tiles) ++n;
      part.compute(n, tile, ring, place);
    });
  }
}

template <template <class> class Part>
void launch_inner(const char* name, const CastShape& shape, const AttentionCall& call,
                  const CastBackward& pass, cudaStream_t stream) {
  const std::int64_t clusters = static_cast<std::int64_t>(shape.items) * shape.H * shape.clusters;
  if (clusters == 0) return;
  const auto launch = [&](auto tag) {
    using T = decltype(tag);
    const InnerArgs<T> args{shape,
                            pass,
                            tensor4<const T>(call.inputs.q),
                            tensor4<const T>(call.k),
                            tensor4<const T>(call.inputs.v),
                            tensor4<const T>(pass.grad_out)};
    const dim3 grid(
        static_cast<unsigned>(min(std::int64_t{clusters}, std::int64_t{multiprocessors()})));
    launch_early(name, inner_kernel<T, Part>, grid, InnerMemory<T>::kThreads,
                 InnerMemory<T>::kBytes, stream, args);
  };
  if (call.inputs.q.dtype == DType::bf16)
    launch(Bf16{});
  else
    launch(F16{});
}

}  // namespace

void cast_inner_queries(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                        cudaStream_t stream) {
  launch_inner<InnerQueries>("cast inner queries", shape, call, pass, stream);
}

void cast_inner_keys(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                     cudaStream_t stream) {
  launch_inner<InnerKeys>("cast inner keys", shape, call, pass, stream);
}

}  // namespace coterie::cuda
