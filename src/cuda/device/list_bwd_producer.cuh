// SPDX-License-Identifier: MIT
// The producing warps of the backward pass of lists on Hopper (list_bwd_stream.cuh): a warp finds
// its round's lists, takes the next numbers of the ring and copies rows, and never waits for what
// it copies.
#pragma once

#include "cuda/device/list_bwd_stream.cuh"

namespace coterie::cuda {

// data + row * pitch in one instruction.
__device__ __forceinline__ const char* row_at(const char* data, int row, int pitch) {
  const char* at;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(pitch), "l"(data));
  return at;
}

// An element of 4 or 8 bytes, zero where it is not there.
template <class T>
__device__ __forceinline__ void copy_value(T& to, const T* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(&to)),
               "l"(from), "n"(sizeof(T)), "r"(there ? static_cast<int>(sizeof(T)) : 0)
               : "memory");
}

// Row of a tile that a lane of a producing warp looks after: warps of a team take 32 each.
__device__ __forceinline__ int tile_row() {
  return static_cast<int>(threadIdx.x) % (32 * kStreamTeamWarps);
}

// The row of the item of this lane's rank, in a tile from `first` on; 0 beyond the list.
__device__ __forceinline__ int lane_rank_row(const SlotList& list, int first) {
  const int rank = first + tile_row();
  return rank < list.count ? list.row(rank) : 0;
}

// Rows of two tensors of up to 64 elements; this lane's chunk of them.
struct TileSource {
  const char* data[2];
  int pitch[2];    // bytes
  bool inside[2];  // the row

  template <class T>
  __device__ TileSource(const Rows<const T>& a, const Rows<const T>& b) {
    const int column = static_cast<int>(threadIdx.x) % 8 * 8;
    const Rows<const T> both[2] = {a, b};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inside[i] = column < both[i].width;
      data[i] = reinterpret_cast<const char*>(both[i].data + (inside[i] ? column : 0));
      pitch[i] = static_cast<int>(both[i].pitch) * static_cast<int>(sizeof(T));
    }
  }

  // A warp's 32 rows, one of each lane, into two tiles; those beyond `count` are zero.
  __device__ void copy(int row, int count, std::uint32_t to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 8, chunk = lane % 8;
    const int half = tile_row() - lane;
    const int counts[2] = {inside[0] ? count - half : 0, inside[1] ? count - half : 0};
    to += (half + r) * 128;
    const std::uint32_t target[2] = {to + ((chunk ^ r) << 4), to + 512 + ((chunk ^ (r + 4)) << 4)};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int source = __shfl_sync(~0u, row, r + i * 4);
#pragma unroll
      for (int tensor = 0; tensor < 2; ++tensor)
        cp_async16(target[i % 2] + i / 2 * 1024 + tensor * kStreamTileBytes,
                   row_at(data[tensor], source, pitch[tensor]),
                   r + 4 * i < counts[tensor] ? 16 : 0);
    }
  }
};

template <class T, ListForm kForm, bool kKeys>
struct ListProducer {
  const ListBackwardArgs<T>& args;
  const ListTiles& tiles;
  StreamMemory<kForm, kKeys>& memory;
  // Behind the copies of a tile: the barrier is told when they are there, and what was written.
  __device__ static void finish(std::uint64_t& barrier) {
    const std::uint32_t address = shared_address(&barrier);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address) : "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(address);
  }

  __device__ TileSource queries(const ListPair& pair, int head) const {
    return {args.q.rows(pair.q_span.batch, head, pair.q_span.begin),
            args.g.rows(pair.q_span.batch, head, pair.q_span.begin)};
  }
  __device__ TileSource keys(const ListPair& pair, int head) const {
    const ListProblem& problem = args.problem;
    return {args.k.rows(pair.k_span.batch, head / problem.group, pair.k_span.begin),
            args.v.rows(pair.k_span.batch, head / problem.value_group, pair.k_span.begin)};
  }

  __device__ void record(QueryRecord<kForm>& to, const ListPair& pair, int head, int lane_row,
                         int first) const {
    const ListProblem& problem = args.problem;
    const int r = tile_row(), rank = first + r;
    const bool there = rank < pair.q.count;
    const std::int64_t row = ListProblem::row_base(problem.q, pair.q_span, head) + lane_row;
    const std::int64_t slot = there ? pair.q.slot_of(rank) : 0;
    const auto value = [&](float& place, const ListValues& values, float otherwise) {
      if (values.data)
        copy_value(place, values.data + (values.by_slot ? slot : row), there);
      else
        place = otherwise;
    };
    value(to.lse[r], args.lse, 0.0f);
    value(to.delta[r], args.delta, 0.0f);
    if (problem.rule == ListRule::ends) {
      copy_value(to.range[r].y, problem.ends + slot, there);
    } else {
      const RankRange range = problem.range_at(pair.k.count, rank + pair.shift);
      to.range[r] = there ? make_int2(range.low, range.high) : make_int2(0, 0);
    }
    if constexpr (kForm != ListForm::plain) {
      value(to.weight[r], args.weight, 1.0f);
      record(to.stats[r], problem.q_stats, row, there);
    }
  }
  __device__ void record(KeyRecord<kForm>& to, const ListPair& pair, int head, int lane_row,
                         int first) const {
    if constexpr (kForm != ListForm::plain) {
      const ListProblem& problem = args.problem;
      const std::int64_t row =
          ListProblem::row_base(problem.k, pair.k_span, head / problem.group) + lane_row;
      record(to.stats[tile_row()], problem.k_stats, row, first + tile_row() < pair.k.count);
    }
  }
  __device__ static void record(RowStatistics& to, const RowStatistics* stats, std::int64_t row,
                                bool there) {
    if (stats)
      copy_value(reinterpret_cast<float2&>(to), reinterpret_cast<const float2*>(stats + row),
                 there);
    else
      to = kNoStatistics;
  }

  // The ranks of the other list that `count` owned ones from `first` on meet; {0, 0} if none.
  __device__ RankRange seen(const ListPair& pair, int first, int count) const {
    if (count <= 0) return {0, 0};
    RankRange range;
    if constexpr (kKeys) {
      range = queries_of(args.problem, pair, first, first + count);
    } else {
      // Lane 0 looks at the first query, the others at the last.
      range = args.problem.range(pair, threadIdx.x % 32 == 0 ? first : first + count - 1);
      range = {__shfl_sync(~0u, range.low, 0), __shfl_sync(~0u, range.high, 1)};
    }
    return range.low < range.high ? range : RankRange{0, 0};
  }

  // First owned rank of a warpgroup. They take turns, so that short lists keep both busy.
  __device__ static int owned_first(int first, int round, int group) {
    return first + (group + round) % 2 * 64;
  }

  __device__ bool leads() const { return tile_row() < 32; }

  __device__ void copy_owned(const ListPair& pair, int head, const ListStep& plan, int round,
                             int group, const TileSource& source, int row) {
    ListStep step = plan;
    step.first = owned_first(plan.first, round, group);
    step.count = min(plan.first + plan.count - step.first, 64);
    source.copy(row, step.count, shared_address(memory.owned[round % 2][group]));
    auto& to = memory.owned_rows[round % 2][group];
    to.row[tile_row()] = row;
    record(to.rows, pair, head, row, step.first);
    if (tile_row() == 0) memory.step[round % 2][group] = step;
    finish(memory.owned_full[round % 2][group]);
  }

  // Copies the tiles of a round, of one query head: those owned when there is room for them, those
  // that they meet until then and afterwards. Returns the next number.
  __device__ int copy(const ListPair& pair, int head, const ListStep& step, int round,
                      const RankRange& range, bool owned, int number) {
    const TileSource own = kKeys ? keys(pair, head) : queries(pair, head);
    const TileSource other = kKeys ? queries(pair, head) : keys(pair, head);
    const SlotList& own_list = kKeys ? pair.k : pair.q;
    const SlotList& other_list = kKeys ? pair.q : pair.k;
    int group = owned ? 0 : kStreamGroups, rank = range.low / 64 * 64;
    // Indices are read a tile ahead.
    int own_row = lane_rank_row(own_list, owned_first(step.first, round, group));
    int other_row = lane_rank_row(other_list, rank);
    while (group < kStreamGroups || rank < range.high) {
      if (group < kStreamGroups && memory.owned_room(group, round)) {
        const int row = own_row;
        own_row = lane_rank_row(own_list, owned_first(step.first, round, group + 1));
        copy_owned(pair, head, step, round, group++, own, row);
      } else if (rank < range.high && memory.room(number)) {
        const int row = other_row, place = number % kStreamRing, count = other_list.count - rank;
        other_row = lane_rank_row(other_list, rank + 64);
        other.copy(row, count, shared_address(memory.ring[place]));
        record(memory.rows[place], pair, head, row, rank);
        if (tile_row() == 0) memory.facts[place] = {head, min(count, 64)};
        finish(memory.full[place]);
        ++number;
        rank += 64;
      } else {
        __nanosleep(32);
      }
    }
    return number;
  }

  __device__ void produce(int round, int head, int unit) {
    const ListProblem& problem = args.problem;
    const ListTile at = tiles.find(kKeys ? problem.k : problem.q, head, unit);
    const int first_head = kKeys ? head * problem.group : head;
    const int heads = kKeys ? problem.group : 1;
    ListStep step{};
    step.first = at.first;
    step.head = head;
    int number = 0;
    // Tiles are counted before the first is copied: with several heads these are looked at twice.
#pragma unroll 1
    for (int i = heads > 1 ? -heads : 0; i < heads; ++i) {
      const int h = first_head + (i < 0 ? i + heads : i);
      const ListPair pair = problem.pair(at.item, h, at.list);
      const SlotList& owned = kKeys ? pair.k : pair.q;
      const int count = min(owned.count - at.first, 1 << kStreamRoundBits);
      const RankRange range = seen(pair, at.first, count);
      if (i < 0 || heads == 1) step.tiles += (range.high + 63) / 64 - range.low / 64;
      if (i < 0) continue;
      if (i == 0) {
        step.count = count;
        step.rank = range.low / 64 * 64;
        step.keys = pair.k.count;
        step.span = kKeys ? pair.k_span : pair.q_span;
        step.slot = owned.slot;
        step.slot_step = owned.index ? 1 : owned.step;
        step.number = number = memory.take(round, step.tiles, leads());
      }
      number = copy(pair, h, step, round, range, i == 0, number);
    }
  }
};

}  // namespace coterie::cuda
