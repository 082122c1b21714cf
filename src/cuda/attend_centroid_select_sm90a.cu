// SPDX-License-Identifier: MIT
// The selection of attend_centroid_select.cu in one kernel, on Hopper's warpgroup products. A team
// of blocks takes 256 or 128 means of one head; each block takes a part of the keys for all of
// them, and in the threshold and merge steps a part of the means. A warpgroup holds 64 means in
// registers and meets 128 keys at a time, or 64 wide ones.
#include "cuda/device/key_pipeline.cuh"
#include "cuda/device/merge.cuh"
#include "cuda/device/select.cuh"
#include "cuda/device/team.cuh"

namespace coterie::cuda {
namespace {

constexpr int kGroupMaxima = 32;   // of a row in each part: 8 for each of the lanes that share it
constexpr int kLeastSample = 512;  // keys of a part's sample, if it has as many

// Keys of a tile: the fewer tiles the better, but their scores must fit in registers.
template <int kDim>
constexpr int kTile = kDim <= 64 ? 128 : 64;

// The keys of one block: tiles of kKeys, and a sample of the whole ones among them.
template <int kKeys>
struct KeyPart {
  int begin, end, sampled, stride;

  __device__ KeyPart(int keys, int rank) {
    const int each = (keys + kKeys * kSelectParts - 1) / (kKeys * kSelectParts);
    const auto clamped = [&](std::int64_t part) {
      return static_cast<int>(min(part * each * kKeys, static_cast<std::int64_t>(keys)));
    };
    begin = clamped(rank);
    end = clamped(rank + 1);
    const int whole = (end - begin) / kKeys;
    sampled = min(whole, max(whole / kSampleShare, kLeastSample / kKeys));
    stride = whole / max(sampled, 1);
  }
  __device__ int tiles() const { return (end - begin + kKeys - 1) / kKeys; }
  __device__ int key(int tile) const { return begin + tile * kKeys; }
  __device__ int sample_key(int tile) const { return key(tile * stride); }
};

// A kernel's shared memory: tiles of keys, the merge's lists in the same place, and barriers.
template <class T, int kDim, int kGroups>
struct SelectMemory {
  using Pipeline = KeyPipeline<T, kDim, 1, 4 * kGroups, kTile<kDim>>;
  static constexpr int kTiles = Pipeline::kStages * Pipeline::kStageBytes;
  static constexpr int kMerge = 4 * kGroups * static_cast<int>(sizeof(MergeMemory));
  static constexpr int kRegion = ((kTiles > kMerge ? kTiles : kMerge) + 1023) / 1024 * 1024;
  static constexpr int kBytes = kRegion + Pipeline::kBytes - kTiles;
};

// Starts the loads of the first tiles; first(t) is the first key of a tile. By all threads of the
// block, as what follows.
template <class Pipeline, class First>
__device__ __forceinline__ void begin_tiles(const Pipeline& pipeline, int end, const First& first) {
  pipeline.init();
  __syncthreads();
  pipeline.begin(first, end);
}

// Calls visit(t, s) for tiles 0 .. total - 1 in order, with the products of their keys and this
// warpgroup's means.
template <class T, int kDim, int kWarps, int kKeys, class First, class Visit>
__device__ __forceinline__ void for_tiles(const KeyPipeline<T, kDim, 1, kWarps, kKeys>& pipeline,
                                          int end, const std::uint32_t (&q)[kDim / 16][4],
                                          const First& first, const Visit& visit) {
  pipeline.publish_first();
#pragma unroll 1
  for (int t = 0; t < pipeline.total; ++t) {
    float s[kKeys / 2];
    pipeline.wait(t);
    wgmma_fence();
    score_products<T, kDim, kKeys>(s, q, pipeline.tile(t, 0));
    wgmma_commit();
    pipeline.advance(t, first, end);
    wgmma_wait<0>();
    wgmma_settle(s);
    pipeline.release(t);
    visit(t, s);
  }
  __syncthreads();
  pipeline.close();
}

// The `rank`-th largest of the warp's values of each row, or less if as many are not below it.
template <int kRows, int kValues>
__device__ __forceinline__ void ranked_values(const std::uint32_t (&values)[kRows][kValues],
                                              int rank, std::uint32_t (&found)[kRows]) {
  // Bits that all values have in common need no search.
  std::uint32_t differ = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    std::uint32_t all = ~0u, any = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      all &= values[r][i];
      any |= values[r][i];
    }
    found[r] = __reduce_and_sync(~0u, all);
    differ |= found[r] ^ __reduce_or_sync(~0u, any);
  }
  const int bits = 32 - __clz(differ);
#pragma unroll
  for (int r = 0; r < kRows; ++r) found[r] = bits < 32 ? found[r] >> bits << bits : 0;
  unsigned settled = 0;
  for (int bit = bits - 1; bit >= 0 && settled + 1 < 1u << kRows; --bit)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::uint32_t probe = found[r] | 1u << bit;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) count += values[r][i] >= probe;
      count = __reduce_add_sync(~0u, count);
      if (count >= rank) found[r] = probe;
      if (count == rank) settled |= 1u << r;
    }
}

// One problem of a team: the means [first, first + 64 kGroups) of an item's head.
template <class T, int kDim, int kGroups>
struct SelectProblem {
  static constexpr int kRows = 64 * kGroups, kWarps = 4 * kGroups;
  static constexpr int kOwn = kRows / kSelectParts;  // means of a block in the steps by means
  static_assert(kOwn == 2 * kWarps, "a pair of means for every warp");
  static constexpr int kKeys = kTile<kDim>;
  using Memory = SelectMemory<T, kDim, kGroups>;
  using Part = KeyPart<kKeys>;

  const SelectArgs<T>& args;
  const SelectTeams& teams;
  unsigned char* memory;
  int item, head, first;

  __device__ SelectProblem(const SelectArgs<T>& a, const SelectTeams& t, unsigned char* m,
                           int number)
      : args(a), teams(t), memory(m) {
    const CentroidBlock place(args.queries, static_cast<unsigned>(number));  // slot = item
    item = place.slot;
    head = place.head;
    first = place.first;
  }
  __device__ bool there(int row) const {
    return first + row < args.queries.clusters && !args.queries.empty(item, head, first + row);
  }
  // Number of a row of the team's in tensors with kRows rows a team.
  __device__ std::int64_t place(const Team& team, int row) const {
    return static_cast<std::int64_t>(team.number) * kRows + row;
  }
  __device__ typename Memory::Pipeline pipeline(const ItemSpan& span, int tiles) const {
    return {
        shared_address(memory) + Memory::kRegion - Memory::kTiles, {args.keys(span, head)}, tiles};
  }

  // Maxima of groups of the sample's scores. Fetches the means of this thread's rows besides.
  __device__ void sample(const Team& team, const ItemSpan& span, const Part& part, int row,
                         std::uint32_t (&q)[kDim / 16][4]) const {
    const auto keys = pipeline(span, part.sampled);
    const auto key = [&](int t) { return part.sample_key(t); };
    begin_tiles(keys, span.length, key);
    load_mean_rows<T, kDim>(q, args.queries, item, head, first + row);
    float groups[2][8];
#pragma unroll
    for (int i = 0; i < 16; ++i) groups[i / 8][i % 8] = -FLT_MAX;
    for_tiles(keys, span.length, q, key, [&](int, const float(&s)[kKeys / 2]) {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        float& group = groups[i % 2][i / 2 % 8];
        group = fmaxf(group, fmaxf(s[2 * i], s[2 * i + 1]));
      }
    });
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float* to = teams.maxima +
                  (place(team, row + 8 * side) * kSelectParts + team.rank) * kGroupMaxima +
                  threadIdx.x % 4 * 8;
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(groups[side][i], groups[side][i + 1],
                                                         groups[side][i + 2], groups[side][i + 3]);
    }
  }

  // Thresholds of this block's rows, two for each warp, from the maxima of all parts.
  __device__ void find_thresholds(const Team& team) const {
    const int lane = threadIdx.x % 32;
    const int row = team.rank * kOwn + static_cast<int>(threadIdx.x) / 32 * 2;
    std::uint32_t values[2][kSelectParts], found[2];
#pragma unroll
    for (int i = 0; i < 2 * kSelectParts; ++i)
      values[i / kSelectParts][i % kSelectParts] =
          ordered(teams.maxima[place(team, row) * kSelectParts * kGroupMaxima + 32 * i + lane]);
    ranked_values(values, args.wanted, found);
    if (lane < 2)
      args.thresholds[place(team, row + lane)] =
          there(row + lane) ? from_ordered(lane == 0 ? found[0] : found[1]) : INFINITY;
  }

  // Lists of the part's keys that reach the thresholds.
  __device__ void find_candidates(const Team& team, const ItemSpan& span, const Part& part, int row,
                                  const std::uint32_t (&q)[kDim / 16][4]) const {
    const int lane = threadIdx.x % 32;
    const auto list = [&](int side) {
      return place(team, row + 8 * side) * kSelectLists + team.rank * 4 + lane % 4;
    };
    LaneList lists[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      lists[side].list = args.candidates + list(side) * args.capacity;
      lists[side].count = 0;
      lists[side].floor = args.thresholds[place(team, row + 8 * side)];
    }
    const auto keys = pipeline(span, part.tiles());
    const auto key = [&](int t) { return part.key(t); };
    begin_tiles(keys, part.end, key);
    for_tiles(keys, part.end, q, key, [&](int t, float(&s)[kKeys / 2]) {
      if (part.key(t + 1) > part.end) drop_keys(s, part.end - part.key(t) - lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float* scores = s + 8 * n + 2 * side;
          offer4(lists[side], scores[0], scores[1], scores[4], scores[5],
                 part.key(t) + 16 * n + lane % 4 * 2);
        }
        if (n % 4 == 3) make_room(lists, args.capacity, args.wanted, part.key(t) + (n + 1) * 16);
      }
    });
#pragma unroll
    for (int side = 0; side < 2; ++side) args.counts[list(side)] = lists[side].count;
  }
  // Scores of keys from `left` on, counted from this lane's first, are none.
  __device__ static void drop_keys(float (&s)[kKeys / 2], int left) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      if (i / 4 * 8 + i % 2 >= left) s[i] = -INFINITY;
  }

  // Top keys of this block's rows.
  __device__ void merge(const Team& team) const {
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int row = team.rank * kOwn + 2 * warp + i;
      if (first + row >= args.queries.clusters) return;
      merge_lists(
          args, item, head, first + row, there(row) ? kSelectLists : 0,
          [&](int number) { return place(team, row) * kSelectLists + number; },
          reinterpret_cast<MergeMemory*>(memory)[warp]);
    }
  }

  __device__ void run(Team& team) const {
    const ItemSpan span = args.queries.spans.k.span(item);
    const Part part(span.length, team.rank);
    const int row =
        static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    std::uint32_t q[kDim / 16][4];
    sample(team, span, part, row, q);
    team.sync();
    find_thresholds(team);
    team.sync();
    find_candidates(team, span, part, row, q);
    team.sync();
    merge(team);
    __syncthreads();  // before the next problem's keys
  }
};

template <class T, int kDim, int kGroups>
__global__ void __launch_bounds__(kGroups* kWarpgroup, 4 / kGroups)
    centroid_select_sm90a_kernel(const __grid_constant__ SelectArgs<T> args,
                                 const __grid_constant__ SelectTeams teams) {
  await_previous();
  extern __shared__ __align__(1024) unsigned char memory[];
  Team team(teams.teams);
  for (int number = team.number; number < teams.problems; number += teams.teams.count)
    SelectProblem<T, kDim, kGroups>(args, teams, memory, number).run(team);
}

template <class T, int kDim>
void launch(const SelectArgs<T>& args, const SelectTeams& teams, cudaStream_t stream) {
  const auto with = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    launch_cooperative_early(centroid_select_sm90a_kernel<T, kDim, kGroups>, teams.teams.blocks(),
                             kGroups * kWarpgroup, SelectMemory<T, kDim, kGroups>::kBytes, stream,
                             args, teams);
  };
  if (args.queries.block_rows == 256)
    with(std::integral_constant<int, 4>{});
  else
    with(std::integral_constant<int, 2>{});
}

}  // namespace

template <class T>
void select_keys_sm90a(const SelectArgs<T>& args, const SelectTeams& teams, cudaStream_t stream) {
  if (args.queries.width <= 64)
    launch<T, 64>(args, teams, stream);
  else
    launch<T, 128>(args, teams, stream);
}

template void select_keys_sm90a(const SelectArgs<__nv_bfloat16>&, const SelectTeams&, cudaStream_t);
template void select_keys_sm90a(const SelectArgs<__half>&, const SelectTeams&, cudaStream_t);

}  // namespace coterie::cuda
