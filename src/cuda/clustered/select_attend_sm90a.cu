// SPDX-License-Identifier: MIT
// The selection of select.cu in one kernel, with Hopper's warpgroup products, and with kAttend the
// attention of the means over all keys (centroid.cu). For 16-bit types.
//
// A team of 1 to 8 blocks takes 256 or 128 means of one item's head, then the next ones; each block
// takes a part of the keys for all of them, and in the steps by means a part of the means. Launched
// cooperatively: barriers of a team are in global memory.
//
//   sample      largest scores of groups of keys                          by parts of the keys
//   thresholds  the `wanted`-th largest of them                           by means
//   keys        candidates that reach the threshold; softmax and products by parts of the keys
//   means       top keys from the candidates; parts of the outputs added  by means
//
// The attention visits all keys, because top keys are not known before its end; write_outputs
// subtracts them from its sums. Two or four warpgroups of 64 means. Shared memory: means and 6
// (rows of 128 elements: 4) stages of keys and values, in the last step replaced by the lists of
// the merge; 112 KiB for 2 warpgroups, 145 KiB for 4, 160 KiB for rows of 128. Launch bounds: 128
// registers for rows of 64, 255 for 128. If teams would leave over a quarter of the device idle, or
// if top keys are given, the attention is a separate kernel (centroid_sm90a.cu).
#include <cstdint>

#include "cuda/clustered/means_sm90a.cuh"
#include "cuda/clustered/select.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/team.cuh"

namespace coterie::cuda {
namespace {

constexpr int kPartKeys = 64;       // of a tile
constexpr int kGroupMaxima = 32;    // of a row in each part: 8 for each of the lanes that share it
constexpr int kLeastSample = 1024;  // keys of a part's sample, if it has as many
constexpr int kCloseEnough = 8;     // thresholds may leave this many more than wanted

// The keys of one block: whole tiles except at the end, and a sample of them in equal segments.
struct KeyPart {
  int begin, end;
  int segments, each, stride,
      apart;  // tiles sampled per segment, distances of tiles and of segments

  __device__ KeyPart(int keys, const Team& team) {
    const int bits = __ffs(team.size) - 1;  // the size is a power of two
    const int own = static_cast<int>(
        (static_cast<unsigned>(keys) + (kPartKeys << bits) - 1) / kPartKeys >> bits);
    const auto clamped = [&](std::int64_t part) {
      return static_cast<int>(min(part * own * kPartKeys, static_cast<std::int64_t>(keys)));
    };
    begin = clamped(team.rank);
    end = clamped(team.rank + 1);
    segments = kSelectParts >> bits;
    apart = (end - begin) / kPartKeys * team.size / kSelectParts;
    each = min(apart, max(apart / kSampleShare, kLeastSample / kPartKeys));
    stride = apart / max(each, 1);
  }
  __device__ int tiles() const { return (end - begin + kPartKeys - 1) / kPartKeys; }
  __device__ int key(int tile) const { return begin + tile * kPartKeys; }
  __device__ int sample_key(int tile) const {
    if (segments == 1) return key(tile * stride);
    return key(tile / max(each, 1) * apart + tile % max(each, 1) * stride);
  }
};

// For each row, a value that about `rank` of the warp's values reach: at least `rank`, and not many
// more if they differ.
template <int kRows, int kValues>
__device__ __forceinline__ void ranked_values(const std::uint32_t (&values)[kRows][kValues],
                                              int rank, std::uint32_t (&found)[kRows]) {
  std::uint32_t high[kRows];  // fewer reach it
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    std::uint32_t least = ~0u, most = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      least = min(least, values[r][i]);
      most = max(most, values[r][i]);
    }
    found[r] = __reduce_min_sync(~0u, least);
    high[r] = __reduce_max_sync(~0u, most) + 1;
  }
  bool open = true;
#pragma unroll 1
  while (open) {
    open = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::uint32_t probe = found[r] + (high[r] - found[r]) / 2;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) count_reached(count, values[r][i], probe);
      count = __reduce_add_sync(~0u, count);
      if (count >= rank)
        found[r] = probe;
      else
        high[r] = probe;
      if (count >= rank && count <= rank + kCloseEnough) high[r] = probe + 1;
      open |= high[r] - found[r] > 1;
    }
  }
}

// The partial results of a row: `parts` of them, the first one at place `first`.
struct RowParts {
  int parts;
  std::int64_t first, step;
};

// Weighted sums of listed rows, 64 columns of them: a lane has those of kColumns from column() on.
template <class T>
struct ListedValues {
  static constexpr int kVector = 16 / sizeof(T), kColumns = 4;
  static_assert(kVector == 8, "eight lanes for 64 columns");
  float sums[kVector] = {};

  __device__ static int column() {
    return lane_of_row() % 8 * kVector + lane_of_row() / 8 * kColumns;
  }

  // Adds weights times rows of `count` keys, columns [first, first + 64). index: complements; the
  // first one is valid even if count is 0. `most`: the larger count of both rows of the warp.
  __device__ __forceinline__ void add(const Rows<const T>& rows, const std::uint32_t* index,
                                      const float* weight, int count, int most, int first) {
    constexpr int kTogether = 16;  // rows of a lane, whose loads are in flight together
    const int lane = lane_of_row(), column = first + lane % 8 * kVector;
    if (!rows.aligned) return add_slowly(rows, index, weight, count, column);
    const int place = column < rows.width ? column : 0;
#pragma unroll 1
    for (int begin = lane / 8; begin < most; begin += 2 * kTogether) {
      uint4 words[kTogether];
      float factors[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int at = max(min(begin + 2 * u, count - 1), 0);
        words[u] = *reinterpret_cast<const uint4*>(rows.row(static_cast<int>(~index[at])) + place);
        factors[u] = begin + 2 * u < count ? weight[at] : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          sums[i] = fmaf(factors[u], to_float(reinterpret_cast<const T*>(&words[u])[i]), sums[i]);
    }
  }
  __device__ __forceinline__ void add_slowly(const Rows<const T>& rows, const std::uint32_t* index,
                                             const float* weight, int count, int column) {
#pragma unroll 1
    for (int key = lane_of_row() / 8; key < count; key += 2) {
      const T* row = rows.row(static_cast<int>(~index[key]));
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column + i < rows.width)
          sums[i] = fmaf(weight[key], to_float(row[column + i]), sums[i]);
    }
    __syncwarp();
  }
  // The lane's sums over all keys.
  __device__ void total(float (&to)[kColumns]) const {
    const bool upper = lane_of_row() >= 8;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) to[i] = exchange(upper, sums[i], sums[i + kColumns], 8);
  }
};

// Adds the partial results of a row in order, two rows per warp. Runs first: no earlier step has
// loads in flight that these could join.
template <class T>
__device__ __forceinline__ void add_parts(const MeanOutputs<T>& to, const SelectRow& row,
                                          const RowParts& parts, MergeMemory& memory) {
  const int lane = lane_of_row();
  PartialRow own{-INFINITY, 0.0f, 0.0f, 0.0f};
  if (row.members && lane < parts.parts) own = to.rows[parts.first + lane * parts.step];
#pragma unroll 1
  for (int column = 4 * lane; column < to.pitch; column += 4 * kRowLanes) {
    const float* outs = to.outs + parts.first * to.pitch + column;
    float4 values[kSelectParts], total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int p = 0; p < kSelectParts; ++p)  // all in flight together
      values[p] =
          *reinterpret_cast<const float4*>(outs + min(p, parts.parts - 1) * parts.step * to.pitch);
    float shift = row_max(own.shift);
    if (shift == -INFINITY) shift = 0.0f;  // no keys at all
    const float factor = exp2_approximate(own.shift - shift), sum = row_sum(factor * own.sum);
#pragma unroll
    for (int p = 0; p < kSelectParts; ++p) {
      const float weight = __shfl_sync(~0u, factor, p, kRowLanes);
      if (p >= parts.parts) continue;
      total.x = fmaf(weight, values[p].x, total.x);
      total.y = fmaf(weight, values[p].y, total.y);
      total.z = fmaf(weight, values[p].z, total.z);
      total.w = fmaf(weight, values[p].w, total.w);
    }
    *reinterpret_cast<float4*>(memory.total + column) = total;
    if (lane == 0) memory.shift = shift, memory.sum = sum;
  }
  __syncwarp();
}

// Subtracts a row's `count` top keys from the sums and writes the results. Two rows per warp;
// overwrites the scores of the keys.
//
// The products used every key's weight rounded to T. The subtracted weights are rounded in the same
// way, and shifts are whole numbers, so only the rounding of sums is left of a top key.
template <class T>
__device__ __forceinline__ void write_outputs(const SelectArgs<T>& args, const MeanOutputs<T>& to,
                                              const SelectRow& row, int count,
                                              MergeMemory& memory) {
  constexpr int kColumns = ListedValues<T>::kColumns;
  const CentroidQueries& queries = args.queries;
  const int lane = lane_of_row(), most = pair_max(count);
  const std::int64_t number = row.number(queries);
  const ItemSpan span = queries.spans.k.span(row.item);
  const float shift = memory.shift, sum = memory.sum, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  float listed = 0.0f;
  for (int i = lane; i < count; i += kRowLanes) {
    const float weight = shifted_weight(memory.score[i], queries.exponent, shift);
    listed += weight;
    memory.score[i] = to_float(from_float<T>(weight));
  }
  if (count == 0 && lane == 0) memory.index[0] = ~0u;
  __syncwarp();
  listed = row_sum(listed);
  if (lane == 0 && row.there) {
    to.lse[number] = row_lse(shift, sum);
    to.mass[number] = listed * inverse;
  }
  // Without members, or all keys are top keys.
  const bool nothing = !row.members || count == span.length;
  const Rows<const T> v = to.v.rows(span.batch, row.head / queries.group, span.begin);
#pragma unroll 1
  for (int begin = 0; begin < to.width; begin += 64) {
    const int column = begin + ListedValues<T>::column();
    float top[kColumns];
    ListedValues<T> values;
    values.add(v, memory.index, memory.score, count, most, begin);
    values.total(top);
    const float* total = memory.total + column;
    float* out = to.out + number * to.width + column;
#pragma unroll
    for (int e = 0; e < kColumns; ++e)
      if (row.there && column + e < to.width)
        out[e] = nothing ? 0.0f : (count == 0 ? total[e] : total[e] - top[e]) * inverse;
  }
  __syncwarp();
}

// Two rows of the last step: top keys, and with kAttend the outputs.
template <bool kAttend, class T>
__device__ __forceinline__ void finish_rows(const SelectArgs<T>& args, const MeanOutputs<T>& to,
                                            const SelectRow& row, const RowLists& lists,
                                            const RowParts& parts, MergeMemory* pair) {
  MergeMemory& memory = pair[threadIdx.x / kRowLanes % 2];
  if constexpr (kAttend) add_parts(to, row, parts, memory);
  const int count = merge_lists(args, row, lists, pair);
  if constexpr (kAttend) write_outputs(args, to, row, count, memory);
  __syncwarp();
}

// A kernel's shared memory: means, tiles of keys and values with their barriers; the merge's lists
// reuse all of it.
template <class T, int kDim, int kGroups, bool kAttend>
struct SelectMemory {
  using Means = GroupQueries<T, kDim, kGroups>;
  using Sample = KeyPipeline<T, kDim, 1, 4 * kGroups, kPartKeys, kGroups>;
  using Tiles = KeyPipeline<T, kDim, kAttend ? 2 : 1, 4 * kGroups, kPartKeys, kGroups>;
  static constexpr int kPipelines = Tiles::kBytes > Sample::kBytes ? Tiles::kBytes : Sample::kBytes;
  static constexpr int kMerge = 8 * kGroups * static_cast<int>(sizeof(MergeMemory));
  static constexpr int kBytes =
      Means::kBytes + kPipelines > kMerge ? Means::kBytes + kPipelines : kMerge;
};

// One problem of a team: the means [first, first + 64 kGroups) of an item's head.
template <class T, int kDim, int kGroups, bool kAttend>
struct SelectProblem {
  static constexpr int kRows = 64 * kGroups, kWarps = 4 * kGroups;
  using Memory = SelectMemory<T, kDim, kGroups, kAttend>;
  using Tiles = typename Memory::Tiles;

  const SelectArgs<T>& args;
  const SelectTeams& teams;
  const MeanOutputs<T>& to;
  unsigned char* memory;
  int item, head, first;

  __device__ SelectProblem(const SelectArgs<T>& a, const SelectTeams& t, const MeanOutputs<T>& o,
                           unsigned char* m, int number)
      : args(a), teams(t), to(o), memory(m) {
    const CentroidBlock place(args.queries, static_cast<unsigned>(number));  // slot = item
    item = place.slot;
    head = place.head;
    first = place.first;
  }
  __device__ bool there(int row) const {
    return first + row < args.queries.clusters && !args.queries.empty(item, head, first + row);
  }
  // Number of a team's row in tensors with kRows rows per team.
  __device__ std::int64_t place(const Team& team, int row) const {
    return static_cast<std::int64_t>(team.number) * kRows + row;
  }
  __device__ RowLists lists(const Team& team, int row) const {
    return joined_lists(place(team, row), team.size, args.capacity);
  }
  // Calls body(row) for this block's rows in the steps by means, kStep rows per warp at a time.
  template <int kStep, class Body>
  __device__ void for_own_rows(const Team& team, const Body& body) const {
    const int own = kRows / team.size;
#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x) / 32 * kStep; r < own; r += kStep * kWarps)
      body(team.rank * own + r);
  }

  // Maxima of groups of the sample's scores.
  __device__ void sample(const Team& team, const ItemSpan& span, const KeyPart& part,
                         const typename Memory::Means& means,
                         const typename Memory::Sample& keys) const {
    const auto key = [&](int t) { return part.sample_key(t); };
    const int row =
        static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    float groups[2][8];
    const auto clear = [&] {
#pragma unroll
      for (int i = 0; i < 16; ++i) groups[i / 8][i % 8] = -FLT_MAX;
    };
    const auto write = [&](int segment) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        float* at =
            teams.maxima +
            (place(team, row + 8 * side) * kSelectParts + team.rank * part.segments + segment) *
                kGroupMaxima +
            threadIdx.x % 4 * 8;
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          *reinterpret_cast<float4*>(at + i) = make_float4(
              groups[side][i], groups[side][i + 1], groups[side][i + 2], groups[side][i + 3]);
      }
    };
    clear();
    if (keys.total == 0)
      for (int segment = 0; segment < part.segments; ++segment) write(segment);
#pragma unroll 1
    for (int t = 0; t < keys.total; ++t) {
      float s[32];
      keys.wait(t);
      wgmma_fence();
      means.scores(s, keys.tile(t, 0));
      wgmma_commit();
      keys.advance(t, key, span.length);
      wgmma_wait<0>();
      wgmma_settle(s);
      keys.release(t);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& group = groups[i % 2][i / 2];
        group = fmaxf(group, fmaxf(s[2 * i], s[2 * i + 1]));
      }
      if ((t + 1) % part.each == 0) {
        write(t / part.each);
        clear();
      }
    }
    __syncthreads();
    keys.close();
  }

  // Thresholds of this block's rows, two at a time for each warp, from the maxima of all parts.
  __device__ void find_thresholds(const Team& team) const {
    const int lane = threadIdx.x % 32;
    for_own_rows<2>(team, [&](int row) {
      std::uint32_t values[2][kSelectParts], found[2];
#pragma unroll
      for (int i = 0; i < 2 * kSelectParts; ++i)
        values[i / kSelectParts][i % kSelectParts] =
            ordered(teams.maxima[place(team, row) * kSelectParts * kGroupMaxima + 32 * i + lane]);
      ranked_values(values, args.wanted, found);
      if (lane < 2)
        args.thresholds[place(team, row + lane)] =
            there(row + lane) ? from_ordered(lane == 0 ? found[0] : found[1]) : INFINITY;
    });
  }

  // Drops the scores of keys from `left` on, counted from this lane's first.
  __device__ static void drop_keys(float (&s)[32], int left) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (i / 4 * 8 + i % 2 >= left) s[i] = -INFINITY;
  }

  // Lists the part's keys that reach the thresholds, and attends to all keys of the part.
  __device__ void visit_keys(const Team& team, const KeyPart& part,
                             const typename Memory::Means& means, const Tiles& keys) const {
    const CentroidQueries& queries = args.queries;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto key = [&](int t) { return part.key(t); };
    const int row = warp * 16 + lane / 4;
    LaneList offered[2];
#pragma unroll
    for (int side = 0; side < 2; ++side)
      offered[side] = LaneList(args.candidates, lists(team, row + 8 * side), team.rank, lane % 4,
                               args.thresholds[place(team, row + 8 * side)]);
    MeanRows<T, kDim> rows;
    float s[32];
    if (keys.total > 0) {
      keys.publish_first();
      keys.wait(0);
      wgmma_fence();
      means.scores(s, keys.tile(0, 0));
      wgmma_commit();
      keys.advance(0, key, part.end);
      wgmma_wait<0>();
      wgmma_settle(s);
    }
#pragma unroll 1
    for (int t = 0; t < keys.total; ++t) {
      if (part.key(t + 1) > part.end) {
        __syncwarp();  // keeps the compiler from doing this for all tiles
        drop_keys(s, part.end - part.key(t) - lane % 4 * 2);
      }
      float fours[2][4], top[2];
      MeanRows<T, kDim>::largest(s, fours);
#pragma unroll
      for (int side = 0; side < 2; ++side)
        top[side] =
            fmaxf(fmaxf(fours[side][0], fours[side][1]), fmaxf(fours[side][2], fours[side][3]));
      if (__any_sync(~0u, top[0] >= offered[0].floor || top[1] >= offered[1].floor)) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float* four = s + i / 2 * 8 + i % 2 * 2;
          offer4(offered[i % 2], fours[i % 2][i / 2], four[0], four[1], four[4], four[5],
                 part.key(t) + i / 2 * 16 + lane % 4 * 2);
        }
        make_room(offered, args.capacity, args.wanted, part.key(t + 1));
      }
      const int next = min(t + 1, keys.total - 1);
      if constexpr (kAttend) {
        rows.follow(top, t == 0, queries.exponent, queries.inverse);
        rows.weigh(s, queries.exponent);
        std::uint32_t p[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = pack2<T>(s[2 * i], s[2 * i + 1]);
        // Products begin and end in one step: the assembler serialises them otherwise. After the
        // last tile its scores are computed again and ignored, which saves a branch here.
        keys.wait(next);
        wgmma_fence();
        rows.add_products(p, keys.tile(t, 1));
      } else {
        keys.wait(next);
        wgmma_fence();
      }
      means.scores(s, keys.tile(next, 0));
      wgmma_commit();
      keys.advance(t + 1, key, part.end);
      wgmma_wait<0>();
      wgmma_settle(s);
      if constexpr (kAttend) rows.settle();
      keys.release(t);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side)
      args.counts[lists(team, row + 8 * side).count(team.rank, lane % 4)] = offered[side].count;
    if constexpr (kAttend)
      rows.write(to.rows, to.outs, to.pitch, partial(team, team.rank, row), kRows);
  }
  // Place of a row's partial results from the block with a rank.
  __device__ std::int64_t partial(const Team& team, int rank, int row) const {
    return (static_cast<std::int64_t>(team.number) * team.size + rank) * kRows + row;
  }

  // Top keys and outputs of this block's rows, two at a time for each warp.
  __device__ void finish(const Team& team) const {
    MergeMemory* pair = reinterpret_cast<MergeMemory*>(memory) + threadIdx.x / 32 * 2;
    for_own_rows<2>(team, [&](int even) {
      const int own = even + static_cast<int>(threadIdx.x) / kRowLanes % 2;
      const SelectRow row{item, head, first + own, first + own < args.queries.clusters, there(own)};
      finish_rows<kAttend>(args, to, row, lists(team, own),
                           RowParts{team.size, partial(team, 0, own), kRows}, pair);
    });
  }

  // `last`: this is the block's last problem.
  __device__ void run(Team& team, bool last) const {
    const ItemSpan span = args.queries.spans.k.span(item);
    const KeyPart part(span.length, team);
    const std::uint32_t base = shared_address(memory), tiles = base + Memory::Means::kBytes;
    const Rows<const T> k = args.keys(span, head);
    const typename Memory::Sample sampled{tiles, {k}, part.segments * part.each};
    sampled.init();
    __syncthreads();
    sampled.begin([&](int t) { return part.sample_key(t); }, span.length);
    await_writes();
    const typename Memory::Means means(base, args.queries, item, head, first);
    sampled.publish_first();
    __syncthreads();  // all threads have stored their means
    sample(team, span, part, means, sampled);
    Tiles keys{tiles, {}, part.tiles()};
    keys.rows[0] = k;
    if constexpr (kAttend)
      keys.rows[1] = to.v.rows(span.batch, head / args.queries.group, span.begin);
    keys.init();
    team.arrive();  // also a block barrier
    keys.begin([&](int t) { return part.key(t); }, part.end);
    team.wait();
    find_thresholds(team);
    team.sync();
    visit_keys(team, part, means, keys);
    __syncthreads();
    keys.close();
    team.sync();
    if (last) release_next();  // not earlier: a waiting kernel slows this one down
    finish(team);
    __syncthreads();  // before the next problem's keys
  }
};

template <class T, int kDim, int kGroups, bool kAttend>
__global__ void __launch_bounds__(kGroups* kWarpgroup, kDim == 64 ? 4 / kGroups : 1)
    select_sm90a_kernel(const __grid_constant__ SelectArgs<T> args,
                        const __grid_constant__ SelectTeams teams,
                        const __grid_constant__ MeanOutputs<T> to) {
  // Kernels after this one may then read what kernels before it wrote.
  if (!args.inputs_ready) await_writes();
  extern __shared__ __align__(1024) unsigned char memory[];
  Team team(teams.teams);
  for (int number = team.number; number < teams.problems; number += teams.teams.count)
    SelectProblem<T, kDim, kGroups, kAttend>(args, teams, to, memory, number)
        .run(team, number + teams.teams.count >= teams.problems);
}

template <class T, int kDim, int kGroups, bool kAttend>
void launch(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>& to,
            cudaStream_t stream) {
  launch_cooperative_early(select_sm90a_kernel<T, kDim, kGroups, kAttend>, teams.teams.blocks(),
                           kGroups * kWarpgroup, SelectMemory<T, kDim, kGroups, kAttend>::kBytes,
                           stream, args, teams, to);
}

template <class T, bool kAttend>
void select_rows(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>& to,
                 cudaStream_t stream) {
  if (args.queries.width > 64) return launch<T, 128, 2, kAttend>(args, teams, to, stream);
  if (args.queries.block_rows == 256) return launch<T, 64, 4, kAttend>(args, teams, to, stream);
  launch<T, 64, 2, kAttend>(args, teams, to, stream);
}

}  // namespace

template <class T>
void select_sm90a(const SelectArgs<T>& args, const SelectTeams& teams, const MeanOutputs<T>* to,
                  cudaStream_t stream) {
  to ? select_rows<T, true>(args, teams, *to, stream)
     : select_rows<T, false>(args, teams, {}, stream);
}

template void select_sm90a(const SelectArgs<Bf16>&, const SelectTeams&, const MeanOutputs<Bf16>*,
                           cudaStream_t);
template void select_sm90a(const SelectArgs<F16>&, const SelectTeams&, const MeanOutputs<F16>*,
                           cudaStream_t);

}  // namespace coterie::cuda
