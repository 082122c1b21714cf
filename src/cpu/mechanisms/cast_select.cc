// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/cast_select.h"

#include <algorithm>

#include "core/parallel.h"
#include "cpu/engine/row_tiles.h"
#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

namespace {

std::int64_t list_heads(const CastParams& params, const AttentionCall& call) {
  return params.share_heads ? 1 : call.H;
}

// First token of a span in an array (list heads, B, N).
std::int64_t token_at(const AttentionCall& call, const Span& span, std::int64_t list_head) {
  return (list_head * call.B + span.batch) * call.N + span.begin;
}

// A log-sum-exp that is updated with rows of scores.
template <class T>
struct RunningLse {
  T max = kNegInf<T>, sum = 0;

  // Overwrites the row, padded to kColumnPad.
  void add(T* row, std::int64_t count) {
    const Kernels<T>& kernel = kernels<T>();
    std::fill(row + count, row + padded(count), kNegInf<T>);
    const T largest = std::max(max, kernel.row_max(row, padded(count)));
    const T shift = largest == kNegInf<T> ? T(0) : largest;
    sum = sum * std::exp(max - shift) + kernel.row_exp(row, padded(count), shift);
    max = largest;
  }
  T value() const { return max + std::log(sum); }
};

// Calls body(Range) for [0, count) in steps.
template <class Body>
void for_blocks(std::int64_t count, std::int64_t step, Body body) {
  for (std::int64_t begin = 0; begin < count; begin += step)
    body(Range{begin, std::min(begin + step, count)});
}

// Selects the best tokens of an item for each of a few clusters.
template <class T>
void select_top_tokens(const CastScores<T>& scores, const Range& clusters, Tiles<T>& tiles,
                       TopBuffer<T>& buffer, std::int32_t* members) {
  const std::int64_t length = scores.call.item(scores.item).q.length;
  const std::int64_t rows = clusters.end - clusters.begin;
  clear_rows(buffer, rows);
  for_blocks(length, kQueryTile, [&](const Range& tokens) {
    scores.scores({length}, tokens, clusters, tiles);
    const std::int64_t count = tokens.end - tokens.begin;
    for (std::int64_t c = 0; c < rows; ++c) {
      T* row = tiles.p_for_v + c * kKeyTile;
      for (std::int64_t t = 0; t < count; ++t) row[t] = tiles.s[t * kKeyTile + c];
      std::fill(row + count, row + padded(count), kNegInf<T>);
      offer_scores(buffer, c, tokens.begin, count, row);
    }
  });
  write_rows(buffer, rows, members);
}

}  // namespace

template <class T>
CastSelectWorkspace<T>::CastSelectWorkspace(Arena& arena, const CastParams& params,
                                            const AttentionCall& call)
    : tiles(make_tiles<T>(arena, call.Dk, call.Dv)),
      q_lse(arena.take<T>(list_heads(params, call) * call.B * call.N)),
      k_lse(arena.take<T>(list_heads(params, call) * call.B * call.N)) {
  if (params.mode == CastMode::topk) {
    top = make_top_buffers<T>(arena, std::min(params.size, call.N));
    return;
  }
  const std::int64_t heads = list_heads(params, call), tokens = heads * call.B * call.N;
  balanced.emplace(arena, call.num_items() * heads, tokens, params.clusters);
  labels = arena.take<std::int32_t>(tokens);
}

template <class T>
CastScores<T>::CastScores(const CastParams& cast, const AttentionCall& attention,
                          std::int64_t number, std::int64_t list_head,
                          CastSelectWorkspace<T>& workspace)
    : params(cast),
      call(attention),
      item(number),
      first_head(list_head),
      end_head(params.share_heads ? call.H : list_head + 1) {
  const Span& span = call.item(item).q;
  q_lse = workspace.q_lse + token_at(call, span, list_head);
  k_lse = workspace.k_lse + token_at(call, span, list_head);
}

template <class T>
void CastScores<T>::affinities(const RowList& list, const Range& tokens, const Range& clusters,
                               Tiles<T>& tiles) const {
  const Kernels<T>& kernel = kernels<T>();
  const std::int64_t count = tokens.end - tokens.begin, columns = clusters.end - clusters.begin;
  const auto add = [&](const Rows& rows, std::int64_t head, T* sums) {
    kernel.load(rows, tokens.begin, count, T(1), tiles.q, tiles.key_row);
    kernel.multiply({count, padded(columns), call.Dk, tiles.q, tiles.key_row, 1, tiles.k_columns,
                     kKeyTile, sums, kKeyTile, head > first_head});
  };
  for (std::int64_t head = first_head; head < end_head; ++head) {
    kernel.load_transposed(surrogates<T>(call, head), clusters.begin, columns, T(1),
                           tiles.k_columns, kKeyTile);
    add(list_rows(call.inputs.q, call.item(item).q, head, list), head, tiles.s);
    add(list_rows(call.k, call.item(item).k, call.key_head(head), list), head, tiles.dp);
  }
}

template <class T>
void CastScores<T>::scores(const RowList& list, const Range& tokens, const Range& clusters,
                           Tiles<T>& tiles) const {
  affinities(list, tokens, clusters, tiles);
  const std::int64_t columns = clusters.end - clusters.begin;
  const T* gate = gate_at<T>(call, call.item(item).q);
  for (std::int64_t r = 0; r < tokens.end - tokens.begin; ++r) {
    T *from_q = tiles.s + r * kKeyTile, *from_k = tiles.dp + r * kKeyTile;
    const std::int64_t token = list.row(tokens.begin + r);
    if (params.activation == CastActivation::softmax) {
      kernels<T>().row_exp(from_q, padded(columns), q_lse[token]);
      kernels<T>().row_exp(from_k, padded(columns), k_lse[token]);
    } else {
      std::transform(from_q, from_q + columns, from_q, laplace<T>);
      std::transform(from_k, from_k + columns, from_k, laplace<T>);
    }
    const T open = sigmoid(gate[token]);
    for (std::int64_t c = 0; c < columns; ++c)
      from_q[c] = open * from_q[c] + (1 - open) * from_k[c];
  }
}

template <class T>
void CastScores<T>::normalisers(const Range& tokens, Tiles<T>& tiles) const {
  const std::int64_t count = tokens.end - tokens.begin;
  RunningLse<T> q[kQueryTile], k[kQueryTile];
  for_blocks(params.clusters, kKeyTile, [&](const Range& clusters) {
    affinities({call.item(item).q.length}, tokens, clusters, tiles);
    for (std::int64_t r = 0; r < count; ++r) {
      q[r].add(tiles.s + r * kKeyTile, clusters.end - clusters.begin);
      k[r].add(tiles.dp + r * kKeyTile, clusters.end - clusters.begin);
    }
  });
  for (std::int64_t r = 0; r < count; ++r) {
    q_lse[tokens.begin + r] = q[r].value();
    k_lse[tokens.begin + r] = k[r].value();
  }
}

// Each token joins one cluster. A cluster gets at most `size` tokens, or ceil(tokens / C) if that
// is more, so that there are slots for all.
template <class T>
static void assign_single(const CastParams& params, const AttentionCall& call,
                          const TensorView& members, CastSelectWorkspace<T>& workspace) {
  const std::int64_t heads = list_heads(params, call);
  std::vector<BalancedProblem> problems;
  for (std::int64_t item = 0; item < call.num_items(); ++item)
    for (std::int64_t head = 0; head < heads; ++head) {
      const Span& span = call.item(item).q;
      const std::int64_t fair = (span.length + params.clusters - 1) / params.clusters;
      problems.push_back({span.length, std::min(std::max(params.size, fair), span.length),
                          workspace.labels + token_at(call, span, head)});
    }
  const auto scores = [&](std::int64_t problem, const RowList& list, const Range& tokens,
                          const Range& clusters, Tiles<T>& tiles) {
    CastScores<T>(params, call, problem / heads, problem % heads, workspace)
        .scores(list, tokens, clusters, tiles);
  };
  match_balanced<T>(problems, params.clusters, scores, workspace.tiles, *workspace.balanced);
  list_members(problems, params.clusters, members.size(3),
               static_cast<std::int32_t*>(members.data));
}

template <class T>
void cast_select(const CastParams& params, const AttentionCall& call, const TensorView& members,
                 CastSelectWorkspace<T>& workspace) {
  const std::int64_t heads = list_heads(params, call), width = members.size(3);
  if (params.activation == CastActivation::softmax) {
    const std::vector<RowTile> row_list = span_tiles(query_spans(call), heads);
    for_tiles(row_list, workspace.tiles, [&](const RowTile& tile, Tiles<T>& tiles) {
      const CastScores<T> scores(params, call, tile.item, tile.head, workspace);
      scores.normalisers({tile.first, tile.first + tile.count}, tiles);
    });
  }
  if (params.mode == CastMode::single) return assign_single(params, call, members, workspace);
  // Few clusters per task, so that a batch of one has work for many threads.
  const std::int64_t blocks = (params.clusters + kColumnPad - 1) / kColumnPad;
  parallel_for(call.num_items() * heads * blocks, [&](std::int64_t task, int worker) {
    const std::int64_t item = task / blocks / heads, head = task / blocks % heads;
    const std::int64_t first = task % blocks * kColumnPad;
    select_top_tokens(CastScores<T>(params, call, item, head, workspace),
                      {first, std::min(first + kColumnPad, params.clusters)},
                      workspace.tiles[static_cast<std::size_t>(worker)],
                      workspace.top[static_cast<std::size_t>(worker)],
                      block_at<std::int32_t>(members, item, head) + first * width);
  });
}

#define COTERIE_INSTANTIATE(T)                                                          \
  template struct CastSelectWorkspace<T>;                                               \
  template struct CastScores<T>;                                                        \
  template void cast_select(const CastParams&, const AttentionCall&, const TensorView&, \
                            CastSelectWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
