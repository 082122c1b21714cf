// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/lsh.h"

#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "coterie/random.h"
#include "cpu/engine/row_tiles.h"

namespace coterie::cpu {

namespace {

// Draws the rotations of all rounds; every entry (d, b) has its own random number.
template <class T>
void draw_rotations(const LshParams& params, const AttentionCall& call,
                    LshSelectWorkspace<T>& workspace) {
  const std::int64_t half = workspace.half, row = workspace.row;
  parallel_for(params.rounds * call.Dk, [&](std::int64_t task, int) {
    const std::int64_t round = task / call.Dk, d = task % call.Dk;
    const RandomStream stream{call.inputs.seed, RandomUse::lsh_rotation,
                              static_cast<std::uint32_t>(round)};
    T* to = workspace.rotations + task * row;
    for (std::int64_t b = 0; b < half; ++b)
      to[b] = static_cast<T>(random_normal(stream, static_cast<std::uint64_t>(d * half + b)));
    std::fill(to + half, to + row, T(0));
  });
}

// The largest and smallest entry so far of a row of x R; together they give the arg-max of
// [x R ; -x R].
template <class T>
struct Extremes {
  T high = -std::numeric_limits<T>::infinity(), low = std::numeric_limits<T>::infinity();
  std::int64_t high_at = 0, low_at = 0;

  void add(const T* row, std::int64_t begin, std::int64_t count) {
    for (std::int64_t t = 0; t < count; ++t) {
      if (row[t] > high) high = row[t], high_at = begin + t;
      if (row[t] < low) low = row[t], low_at = begin + t;
    }
  }
  std::int64_t bucket(std::int64_t half) const { return high >= -low ? high_at : half + low_at; }
};

// Buckets of the `count` queries in tiles.q by one rotation.
template <class T>
void hash_tile(const LshSelectWorkspace<T>& workspace, std::int64_t round, std::int64_t width,
               std::int64_t count, Tiles<T>& tiles, std::int32_t* buckets) {
  const T* rotation = workspace.rotations + round * width * workspace.row;
  Extremes<T> extremes[kQueryTile];
  for (std::int64_t begin = 0; begin < workspace.half; begin += kKeyTile) {
    const std::int64_t columns = std::min(kKeyTile, workspace.row - begin);
    kernels<T>().multiply({count, columns, width, tiles.q, tiles.key_row, 1, rotation + begin,
                           workspace.row, tiles.s, kKeyTile, false});
    for (std::int64_t r = 0; r < count; ++r)
      extremes[r].add(tiles.s + r * kKeyTile, begin, std::min(columns, workspace.half - begin));
  }
  for (std::int64_t r = 0; r < count; ++r)
    buckets[r] = static_cast<std::int32_t>(extremes[r].bucket(workspace.half));
}

// order = tokens by (bucket, position): a stable counting sort; `starts` is scratch of
// num_buckets + 1.
void sort_by_bucket(const std::int32_t* buckets, std::int64_t tokens, std::int64_t num_buckets,
                    std::int32_t* starts, std::int32_t* order) {
  std::fill_n(starts, num_buckets + 1, 0);
  for (std::int64_t i = 0; i < tokens; ++i) ++starts[buckets[i] + 1];
  for (std::int64_t b = 0; b < num_buckets; ++b) starts[b + 1] += starts[b];
  for (std::int64_t i = 0; i < tokens; ++i)
    order[starts[buckets[i]]++] = static_cast<std::int32_t>(i);
}

std::int64_t num_chunks(const LshParams& params, std::int64_t tokens) {
  return (tokens + params.chunk - 1) / params.chunk;
}

// The lowest token that a chunk sees, and the number of tokens it sees.
struct Sight {
  std::int32_t lowest = std::numeric_limits<std::int32_t>::max();
  std::int64_t count = 0;

  void add(const std::int32_t* order, std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin; slot < end; ++slot) lowest = std::min(lowest, order[slot]);
    count += std::max<std::int64_t>(0, end - begin);
  }
};

Sight sight_of(const LshParams& params, const std::int32_t* order, std::int64_t tokens,
               std::int64_t chunk) {
  const std::int64_t size = params.chunk, chunks = num_chunks(params, tokens);
  Sight sight;
  sight.add(order, std::max<std::int64_t>(0, chunk - 1) * size,
            std::min((chunk + 1) * size, tokens));
  if (chunk == 0 && chunks > 1) sight.add(order, (chunks - 1) * size, tokens);
  return sight;
}

template <class T>
Rule<T> band_rule(std::int64_t chunk, std::int64_t tokens) {
  Rule<T> rule;
  rule.ranges = [=](std::int64_t first, std::int64_t count, Range* ranges) {
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t own = (first + r) / chunk;
      ranges[r] = {std::max<std::int64_t>(0, own - 1) * chunk, std::min((own + 1) * chunk, tokens)};
    }
  };
  rule.queries = [=](std::int64_t begin, std::int64_t end) {
    return Range{begin / chunk * chunk, std::min(((end - 1) / chunk + 2) * chunk, tokens)};
  };
  return rule;
}

template <class T>
Rule<T> everything_rule(std::int64_t keys) {
  Rule<T> rule;
  rule.ranges = [=](std::int64_t, std::int64_t count, Range* ranges) {
    std::fill_n(ranges, count, Range{0, keys});
  };
  return rule;
}

}  // namespace

template <class T>
LshSelectWorkspace<T>::LshSelectWorkspace(Arena& arena, const LshParams& params,
                                          const AttentionCall& call)
    : half(params.buckets / 2), row(padded(half)), tiles(make_tiles<T>(arena, call.Dk, call.Dv)) {
  rotations = arena.take<T>(params.rounds * call.Dk * row);
  buckets = arena.take<std::int32_t>(call.B * call.H * params.rounds * call.N);
  starts = arena.take<std::int32_t>(call_threads() * (params.buckets + 1));
}

template <class T>
void lsh_select(const LshParams& params, const AttentionCall& call, const TensorView& order,
                LshSelectWorkspace<T>& workspace) {
  const std::int64_t rounds = params.rounds;
  draw_rotations(params, call, workspace);
  const std::vector<RowTile> row_list = span_tiles(query_spans(call), call.H);
  for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
    const Span& span = call.item(tile.item).q;
    kernels<T>().load(span_rows(call.inputs.q, span, tile.head), tile.first, tile.count, T(1),
                      tiles.q, tiles.key_row);
    for (std::int64_t round = 0; round < rounds; ++round)
      hash_tile(workspace, round, call.Dk, tile.count, tiles,
                round_at(call, workspace.buckets, span, tile.head, rounds, round) + tile.first);
  });

  std::int32_t* orders = static_cast<std::int32_t*>(order.data);
  std::fill_n(orders, order.count(), -1);
  parallel_for(call.num_items() * call.H * rounds, [&](std::int64_t task, int worker) {
    const Span& span = call.item(task / rounds / call.H).q;
    const std::int64_t head = task / rounds % call.H, round = task % rounds;
    sort_by_bucket(round_at(call, workspace.buckets, span, head, rounds, round), span.length,
                   params.buckets, workspace.starts + worker * (params.buckets + 1),
                   round_at(call, orders, span, head, rounds, round));
  });
}

void lsh_find_alone(const LshParams& params, const AttentionCall& call, const TensorView& order,
                    std::uint8_t* alone) {
  std::int32_t* orders = static_cast<std::int32_t*>(order.data);
  const std::int64_t rounds = params.rounds;
  parallel_for(call.num_items() * call.H, [&](std::int64_t task, int) {
    const Span& span = call.item(task / call.H).q;
    const std::int64_t head = task % call.H;
    std::uint8_t* flags = round_at(call, alone, span, head, 1, 0);
    std::fill_n(flags, span.length, std::uint8_t{1});
    for (std::int64_t round = 0; round < rounds; ++round) {
      const std::int32_t* tokens = round_at(call, orders, span, head, rounds, round);
      for (std::int64_t chunk = 0; chunk < num_chunks(params, span.length); ++chunk) {
        const Sight sight = sight_of(params, tokens, span.length, chunk);
        const std::int64_t end = std::min((chunk + 1) * params.chunk, span.length);
        for (std::int64_t slot = chunk * params.chunk; slot < end; ++slot)
          flags[tokens[slot]] &= call.causal ? sight.lowest == tokens[slot] : sight.count == 1;
      }
    }
  });
}

template <class T>
ListCall<T> LshParts<T>::plan(std::int64_t round, int part) const {
  ListCall<T> plan;
  plan.scale = static_cast<T>(call.scale);
  plan.pair = [=, this](std::int64_t number, std::int64_t head, std::int64_t) {
    const Span& span = call.item(number).q;
    const std::int64_t tokens = span.length, chunks = num_chunks(params, tokens);
    std::int32_t* all = static_cast<std::int32_t*>(order.data);
    const std::int32_t* sorted = round_at(call, all, span, head, params.rounds, round);
    const bool demote = params.combine == LshCombine::lse && part == 0, causal = call.causal;
    const std::uint8_t* flags = demote ? round_at(call, alone, span, head, 1, 0) : nullptr;
    ListPair<T> pair;
    std::int64_t skipped = 0;
    if (part == 0) {
      pair.queries = pair.keys = {tokens, sorted};
      pair.rule = band_rule<T>(params.chunk, tokens);
    } else if (chunks > 1) {
      skipped = (chunks - 1) * params.chunk;
      pair.queries = {params.chunk, sorted};
      pair.keys = {tokens - skipped, sorted + skipped};
      pair.rule = everything_rule<T>(pair.keys.count);
    }
    if (!causal && !demote) return pair;
    const std::int32_t* keys = sorted + skipped;
    pair.rule.filter = [=](std::int64_t query, std::int64_t begin, std::int64_t count, T* scores) {
      const T excluded = -std::numeric_limits<T>::infinity();
      for (std::int64_t t = 0; causal && t < count; ++t)
        if (keys[begin + t] > sorted[query]) scores[t] = excluded;
      // Queries and keys of a band are the same list, so a query's own key has the same rank.
      if (flags && begin <= query && query < begin + count && !flags[sorted[query]])
        scores[query - begin] = excluded;
    };
    return pair;
  };
  return plan;
}

#define COTERIE_INSTANTIATE(T)                                                           \
  template struct LshSelectWorkspace<T>;                                                 \
  template void lsh_select<T>(const LshParams&, const AttentionCall&, const TensorView&, \
                              LshSelectWorkspace<T>&);                                   \
  template struct LshParts<T>;
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
