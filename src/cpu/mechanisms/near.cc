// SPDX-License-Identifier: MIT
#include "cpu/mechanisms/near.h"

#include <cmath>
#include <limits>

#include "cpu/engine/tile_steps.h"

namespace coterie::cpu {

namespace {

// Blocks of a chunk: few, whose sums stay in the cache, but as many as needed to limit the number
// of chunks to four times the root of the number of blocks.
constexpr std::int64_t kChunkBlocks = 8;
std::int64_t root(std::int64_t number) {
  return static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(number))));
}
std::int64_t chunk_blocks(const Blocks& blocks) {
  return std::max(kChunkBlocks, (root(blocks.count()) + 3) / 4);
}
std::int64_t most_chunks(const Blocks& blocks) {
  return std::min((blocks.count() + kChunkBlocks - 1) / kChunkBlocks, 4 * root(blocks.count()));
}

template <class T>
Sums<T> take_sums(Arena& arena, std::int64_t value_row) {
  return {arena.take<T>(kQueryTile), arena.take<T>(kQueryTile),
          arena.take<T>(kQueryTile * value_row)};
}

template <class T>
void clear(const Sums<T>& sums, std::int64_t rows, std::int64_t value_row) {
  std::fill_n(sums.max, rows, kNegInf<T>);
  std::fill_n(sums.sum, rows, T(0));
  std::fill_n(sums.out, rows * value_row, T(0));
}

template <class T>
void copy(const Sums<T>& from, const Sums<T>& to, std::int64_t rows, std::int64_t value_row) {
  std::copy_n(from.max, rows, to.max);
  std::copy_n(from.sum, rows, to.sum);
  std::copy_n(from.out, rows * value_row, to.out);
}

// The sums of one row.
template <class T>
struct SumsOfRow {
  T &max, &sum;
  T* out;
};

// to += from.
template <class T>
void merge(const SumsOfRow<T>& to, T max, T sum, const T* out, std::int64_t width) {
  if (max == kNegInf<T> && sum == T(0)) return;
  const Kernels<T>& kernel = kernels<T>();
  const T largest = std::max(to.max, max);
  const T old_factor = to.max == largest ? T(1) : std::exp(to.max - largest);
  const T new_factor = max == largest ? T(1) : std::exp(max - largest);
  if (old_factor != T(1)) kernel.row_scale(to.out, width, old_factor);
  kernel.row_add(to.out, out, width, new_factor);
  to.sum = to.sum * old_factor + sum * new_factor;
  to.max = largest;
}

template <class T>
void merge(const Sums<T>& to, const Sums<T>& from, std::int64_t rows, std::int64_t value_row) {
  if (std::equal(to.max, to.max + rows, from.max)) {
    kernels<T>().row_add(to.out, from.out, rows * value_row, T(1));
    for (std::int64_t r = 0; r < rows; ++r) to.sum[r] += from.sum[r];
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r)
    merge<T>({to.max[r], to.sum[r], to.out + r * value_row}, from.max[r], from.sum[r],
             from.out + r * value_row, value_row);
}

// The far keys of the members of clusters [tile.first, tile.first + tile.count).
template <class T>
class FarForward {
 public:
  FarForward(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
             const RowTile& tile, NearWorkspace<T>& workspace, int worker)
      : call_(call),
        tensors_(tensors),
        tile_(tile),
        ws_(workspace),
        tiles_(workspace.lists.tiles[static_cast<std::size_t>(worker)]),
        far_(workspace.far[static_cast<std::size_t>(worker)]),
        blocks_{near, call.item(tile.item).k.length},
        segment_(centroid_segment<T>(call, tensors.lists, tensors.centroids, tile.item, tile.head)),
        pass_{segment_, tiles_} {
    const Span& span = call.item(tile.item).q;
    labels_ = span_at<std::int32_t>(tensors.labels, span, tile.head);
    first_row_ = (span.batch * call.H + tile.head) * call.N + span.begin;
  }

  void run() {
    const std::int64_t per_chunk = chunk_blocks(blocks_), rows = tile_.count,
                       width = tiles_.value_row, count = blocks_.count(),
                       chunks = (count + per_chunk - 1) / per_chunk;
    pass_.load_queries(tile_.first, tile_.count);
    std::fill_n(far_.listed, rows, 0);
    clear(far_.before, rows, width);
    start_block(0);
    for (std::int64_t k = 0; k < chunks; ++k) {
      const std::int64_t first = k * per_chunk, end = std::min(count, first + per_chunk);
      for (std::int64_t b = first; b < end;) {
        const std::int64_t next = std::min(end, b + blocks_per_tile());
        // Maxima are those of all blocks so far, so that sums can be added as they are, unless this
        // makes the weights of a block too small.
        if (!cells(b, next, first, far_.before.max)) cells(b, next, first, nullptr);
        for (; b < next; ++b) {
          start_block(b + 1);
          merge(far_.before, far_.cells[static_cast<std::size_t>(b - first)], rows, width);
        }
      }
      after_in_chunk(first, end, far_.totals[static_cast<std::size_t>(k)],
                     far_.tails[static_cast<std::size_t>(k)]);
    }
    after_chunks(per_chunk, chunks);
  }

 private:
  // Calls visit(query, row) for the queries of a range whose cluster is one of the tile.
  template <class Visit>
  void for_members(const Range& queries, Visit visit) const {
    for (std::int64_t i = queries.begin; i < queries.end; ++i) {
      const std::int64_t row = labels_[i] - tile_.first;
      if (row >= 0 && row < tile_.count) visit(i, row);
    }
  }
  std::int64_t blocks_per_tile() const {
    return blocks_.width % kColumnPad == 0 ? std::max<std::int64_t>(1, kKeyTile / blocks_.width)
                                           : 1;
  }
  void add_to(std::int64_t query, const Sums<T>& sums, std::int64_t row) {
    const std::int64_t i = first_row_ + query;
    merge<T>({ws_.max[i], ws_.sum[i], ws_.out + i * call_.Dv}, sums.max[row], sums.sum[row],
             sums.out + row * tiles_.value_row, call_.Dv);
  }

  // Top keys are exact for all members. Keys ascend, so each row's position in its list does too.
  void remove_listed(std::int64_t begin, std::int64_t keys) {
    if (!tensors_.listed()) return;
    const std::int64_t width = tensors_.lists.width();
    for (std::int64_t r = 0; r < tile_.count; ++r) {
      const std::int32_t* list = tensors_.lists.key_row(tile_.item, tile_.head, tile_.first + r);
      std::int64_t& at = far_.listed[r];
      while (at > 0 && list[at - 1] >= begin) --at;  // a tile that is computed again
      for (; at < width && list[at] >= 0 && list[at] < begin + keys; ++at)
        tiles_.s[r * kKeyTile + list[at] - begin] = kNegInf<T>;
    }
  }

  // The sums of blocks [first, end): one tile of keys, or the tiles of one block. `max`: the least
  // maxima of their rows, or null. Returns whether no weights are too small.
  bool cells(std::int64_t first, std::int64_t end, std::int64_t chunk, const T* max) {
    constexpr T kLeast = T(1e-25);
    const Kernels<T>& kernel = pass_.kernel;
    const Range span = blocks_.span(first, end);
    for (std::int64_t begin = span.begin; begin < span.end; begin += kKeyTile) {
      const std::int64_t keys = std::min(kKeyTile, span.end - begin);
      pass_.load_key_columns(begin, keys);
      pass_.load_values(begin, keys);
      pass_.score(tile_.first, tile_.count, begin, keys);
      remove_listed(begin, keys);
      const bool more = begin > span.begin;
      for (std::int64_t b = first; b < end; ++b) {
        const Sums<T>& cell = far_.cells[static_cast<std::size_t>(b - chunk)];
        const std::int64_t low = end - first == 1 ? 0 : (b - first) * blocks_.width;
        const std::int64_t high = end - first == 1 ? keys : std::min(low + blocks_.width, keys);
        if (!more) {
          for (std::int64_t r = 0; r < tile_.count; ++r) cell.max[r] = max ? max[r] : kNegInf<T>;
          std::fill_n(cell.sum, tile_.count, T(0));
        }
        kernel.softmax({tiles_.s + low, tile_.count, kKeyTile, padded(high - low), cell.max,
                        cell.sum, tiles_.rescale});
        for (std::int64_t r = 0; more && r < tile_.count; ++r)
          if (tiles_.rescale[r] != T(1))
            kernel.row_scale(cell.out + r * tiles_.value_row, tiles_.value_row, tiles_.rescale[r]);
        for (std::int64_t r = 0; pass_.drops() && r < tile_.count; ++r)
          segment_.dropout.apply(tile_.first + r, begin + low, high - low,
                                 tiles_.s + r * kKeyTile + low);
        kernel.multiply({tile_.count, tiles_.value_row, high - low, tiles_.s + low, kKeyTile, 1,
                         tiles_.v + low * tiles_.value_row, tiles_.value_row, cell.out,
                         tiles_.value_row, more});
      }
    }
    for (std::int64_t b = first; max && b < end; ++b) {
      const Sums<T>& cell = far_.cells[static_cast<std::size_t>(b - chunk)];
      for (std::int64_t r = 0; r < tile_.count; ++r)
        if (cell.sum[r] < kLeast && cell.max[r] != kNegInf<T>) return false;
    }
    return true;
  }

  // The queries of a block start with the sums of the blocks before block - 1.
  void start_block(std::int64_t block) {
    for_members(blocks_.span(block, block + 1), [&](std::int64_t query, std::int64_t r) {
      const std::int64_t i = first_row_ + query;
      ws_.max[i] = far_.before.max[r];
      ws_.sum[i] = far_.before.sum[r];
      std::copy_n(far_.before.out + r * tiles_.value_row, call_.Dv, ws_.out + i * call_.Dv);
    });
  }

  // Adds to the queries of blocks [first, end) the sums of the blocks of the chunk after their near
  // ones; also the sum of the chunk, and the sum without its first block.
  void after_in_chunk(std::int64_t first, std::int64_t end, const Sums<T>& total,
                      const Sums<T>& tail) {
    const std::int64_t rows = tile_.count, width = tiles_.value_row;
    clear(far_.after, rows, width);
    for (std::int64_t b = end - 1; b >= first; --b) {
      if (b > first) add_after(b - 1, far_.after);
      if (b == first) copy(far_.after, tail, rows, width);
      merge(far_.after, far_.cells[static_cast<std::size_t>(b - first)], rows, width);
    }
    copy(far_.after, total, rows, width);
  }

  void add_after(std::int64_t block, const Sums<T>& sums) {
    for_members(blocks_.span(block, block + 1),
                [&](std::int64_t query, std::int64_t r) { add_to(query, sums, r); });
  }

  // Adds the sums of later chunks. The last block of a chunk is near the first of the next one.
  void after_chunks(std::int64_t per_chunk, std::int64_t chunks) {
    const std::int64_t rows = tile_.count, width = tiles_.value_row;
    clear(far_.beyond, rows, width);
    clear(far_.beyond_next, rows, width);
    for (std::int64_t k = chunks - 1; k >= 0; --k) {
      const std::int64_t last = std::min(blocks_.count(), (k + 1) * per_chunk) - 1;
      for_members(blocks_.span(k * per_chunk, last),
                  [&](std::int64_t query, std::int64_t r) { add_to(query, far_.beyond, r); });
      for_members(blocks_.span(last, last + 1),
                  [&](std::int64_t query, std::int64_t r) { add_to(query, far_.beyond_next, r); });
      copy(far_.beyond, far_.beyond_next, rows, width);
      merge(far_.beyond_next, far_.tails[static_cast<std::size_t>(k)], rows, width);
      merge(far_.beyond, far_.totals[static_cast<std::size_t>(k)], rows, width);
    }
  }

  const AttentionCall& call_;
  const NearTensors& tensors_;
  const RowTile& tile_;
  NearWorkspace<T>& ws_;
  Tiles<T>& tiles_;
  FarTiles<T>& far_;
  Blocks blocks_;
  Segment<T> segment_;
  Pass<T> pass_;
  const std::int32_t* labels_ = nullptr;
  std::int64_t first_row_ = 0;
};

// Adds the top keys that are not near.
template <class T>
void add_top(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
             NearWorkspace<T>& ws) {
  const ListCall<T> plan = near_top_plan<T>(call, near, tensors.lists);
  for_tiles(list_query_tiles(call, plan), ws.lists.tiles, [&](const RowTile& tile, Tiles<T>& own) {
    const ListPair<T> pair = plan.pair(tile.item, tile.head, tile.list);
    const Span& span = call.item(tile.item).q;
    const std::int64_t first = (span.batch * call.H + tile.head) * call.N + span.begin;
    const auto number = [&](std::int64_t r) { return first + pair.queries.row(tile.first + r); };
    for (std::int64_t r = 0; r < tile.count; ++r)
      prefetch_row(ws.out + number(r) * call.Dv, call.Dv);
    forward_tile(make_segment(call, plan, tile.item, tile.head, pair), tile.first, tile.count, own);
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const std::int64_t i = number(r);
      merge<T>({ws.max[i], ws.sum[i], ws.out + i * call.Dv}, own.lse[r],
               own.lse[r] == kNegInf<T> ? T(0) : T(1), own.o + r * own.value_row, call.Dv);
    }
  });
}

// Adds the sums of the other keys to tiles.o and tiles.lse of `rows`.
template <class T>
void add_far(const AttentionCall& call, const RowTile& tile, const Range& rows,
             const NearWorkspace<T>& ws, Tiles<T>& own) {
  const Kernels<T>& kernel = kernels<T>();
  const Span& span = call.item(tile.item).q;
  const std::int64_t first = (span.batch * call.H + tile.head) * call.N + span.begin + rows.begin;
  for (std::int64_t r = 0; r < rows.end - rows.begin; ++r) {
    const std::int64_t i = first + r;
    T* row = own.o + r * own.value_row;
    T max = own.lse[r], sum = own.lse[r] == kNegInf<T> ? T(0) : T(1);
    merge<T>({max, sum, row}, ws.max[i], ws.sum[i], ws.out + i * call.Dv, call.Dv);
    const bool empty = max == kNegInf<T> && sum == T(0);
    own.lse[r] = empty ? kNegInf<T> : max + std::log(sum);
    kernel.row_scale(row, own.value_row, empty ? T(0) : T(1) / sum);
  }
}

// Near keys of the queries of one head of an item. Columns and values of up to kNearRows keys stay
// loaded, so that consecutive blocks share them.
template <class T>
class NearForward {
 public:
  NearForward(const AttentionCall& call, const Blocks& blocks, std::int64_t number,
              std::int64_t head, Tiles<T>& tiles, NearTiles<T>& near)
      : blocks_(blocks),
        scale_(static_cast<T>(call.scale)),
        q_(span_rows(call.inputs.q, call.item(number).q, head)),
        k_(span_rows(call.k, call.item(number).k, call.key_head(head))),
        v_(span_rows(call.inputs.v, call.item(number).k, call.value_head(head))),
        dropout_(dropout_of(call, number, head, {}, {})),
        tiles_(tiles),
        near_(near) {}

  // Attention of `rows`, at most kQueryTile queries of one group of blocks, over their near keys:
  // tiles.o and tiles.lse. `unit` are the near keys of these and the next calls.
  void run(const Range& rows, const Range& unit) {
    const std::int64_t count = rows.end - rows.begin;
    kernel_.load(q_, rows.begin, count, scale_, tiles_.q, tiles_.key_row);
    std::fill_n(tiles_.o, count * tiles_.value_row, T(0));
    std::fill_n(tiles_.max, count, kNegInf<T>);
    std::fill_n(tiles_.sum, count, T(0));
    const Range keys = blocks_.near(rows);
    for (std::int64_t begin = keys.begin; begin < keys.end;) {
      const std::int64_t piece = unit.begin + (begin - unit.begin) / kNearRows * kNearRows;
      load({piece, std::min(piece + kNearRows, unit.end)});
      const Range part{begin, std::min({begin + kKeyTile, loaded_.end, keys.end})};
      add(rows, part);
      begin = part.end;
    }
    for (std::int64_t r = 0; r < count; ++r) {
      const bool empty = tiles_.max[r] == kNegInf<T> && tiles_.sum[r] == T(0);
      tiles_.lse[r] = empty ? kNegInf<T> : tiles_.max[r] + std::log(tiles_.sum[r]);
      kernel_.row_scale(tiles_.o + r * tiles_.value_row, tiles_.value_row,
                        empty ? T(0) : T(1) / tiles_.sum[r]);
    }
  }

 private:
  void load(const Range& keys) {
    if (keys.begin == loaded_.begin && keys.end == loaded_.end) return;
    loaded_ = keys;
    const std::int64_t count = keys.end - keys.begin;
    stride_ = padded(count) + kColumnPad;  // products may read columns beyond the last key
    kernel_.load_transposed(k_, keys.begin, count, T(1), near_.q, stride_);
    kernel_.load(v_, keys.begin, count, T(1), near_.g, tiles_.value_row);
  }

  void add(const Range& rows, const Range& keys) {
    const std::int64_t count = rows.end - rows.begin, num = keys.end - keys.begin,
                       columns = padded(num), first = keys.begin - loaded_.begin;
    kernel_.multiply({count, columns, k_.width, tiles_.q, tiles_.key_row, 1, near_.q + first,
                      stride_, tiles_.s, kKeyTile, false});
    for (std::int64_t r = 0; r < count; ++r) {
      const Range seen = blocks_.near_columns(rows.begin + r, keys);
      T* scores = tiles_.s + r * kKeyTile;
      std::fill(scores, scores + seen.begin, kNegInf<T>);
      std::fill(scores + seen.end, scores + columns, kNegInf<T>);
    }
    kernel_.softmax({tiles_.s, count, kKeyTile, columns, tiles_.max, tiles_.sum, tiles_.rescale});
    for (std::int64_t r = 0; r < count; ++r)
      if (tiles_.rescale[r] != T(1))
        kernel_.row_scale(tiles_.o + r * tiles_.value_row, tiles_.value_row, tiles_.rescale[r]);
    for (std::int64_t r = 0; dropout_.dropout && r < count; ++r)
      dropout_.apply(rows.begin + r, keys.begin, num, tiles_.s + r * kKeyTile);
    kernel_.multiply({count, tiles_.value_row, num, tiles_.s, kKeyTile, 1,
                      near_.g + first * tiles_.value_row, tiles_.value_row, tiles_.o,
                      tiles_.value_row, true});
  }

  const Blocks blocks_;
  const T scale_;
  const Rows q_, k_, v_;
  const SegmentDropout dropout_;
  Tiles<T>& tiles_;
  NearTiles<T>& near_;
  const Kernels<T>& kernel_ = kernels<T>();
  Range loaded_;
  std::int64_t stride_ = 0;
};

}  // namespace

template <class T>
FarTiles<T>::FarTiles(Arena& arena, const AttentionCall& call, std::int64_t near) {
  const std::int64_t width = padded(call.Dv);
  const Blocks all{near, call.S};
  for (std::int64_t b = 0; b < chunk_blocks(all); ++b) cells.push_back(take_sums<T>(arena, width));
  for (std::int64_t c = 0; c < most_chunks(all); ++c) {
    totals.push_back(take_sums<T>(arena, width));
    tails.push_back(take_sums<T>(arena, width));
  }
  for (Sums<T>* sums : {&before, &after, &beyond, &beyond_next}) *sums = take_sums<T>(arena, width);
  listed = arena.take<std::int64_t>(kQueryTile);
  const std::int64_t blocks = std::min(kKeyTile, kKeyTile / near + 2);
  gradients = arena.take<T>(blocks * kQueryTile * width);
  shift = arena.take<T>(blocks * kQueryTile);
  delta = arena.take<T>(blocks * kQueryTile);
}

template <class T>
ListCall<T> near_top_plan(const AttentionCall& call, std::int64_t near, const ClusterLists& lists) {
  ListCall<T> plan = shared_plan<T>(call, lists);
  plan.pair = [&call, near, all = plan.pair](std::int64_t number, std::int64_t head,
                                             std::int64_t cluster) {
    ListPair<T> pair = all(number, head, cluster);
    const Blocks blocks{near, call.item(number).k.length};
    const std::int32_t *queries = pair.queries.index, *keys = pair.keys.index;
    pair.rule.filter = [=](std::int64_t query, std::int64_t begin, std::int64_t count, T* scores) {
      const std::int64_t row = queries[query];
      const Range own = blocks.near({row, row + 1});
      const std::int32_t *first = keys + begin, *end = first + count;
      const std::int32_t* at = std::lower_bound(first, end, own.begin);
      for (; at != end && *at < own.end; ++at) scores[at - first] = kNegInf<T>;
    };
    return pair;
  };
  return plan;
}

template <class T>
void near_rows(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
               NearWorkspace<T>& ws, const FinishRows<T>& finish) {
  for_tiles(centroid_tiles(call, tensors.lists.clusters()), [&](const RowTile& tile, int worker) {
    FarForward<T>(call, near, tensors, tile, ws, worker).run();
  });
  if (tensors.listed()) add_top(call, near, tensors, ws);

  // A task is a unit of blocks with about kKeyTile rows.
  const std::int64_t group = near * Blocks{near, 0}.together(),
                     unit = std::max<std::int64_t>(1, kKeyTile / group) * group;
  const std::vector<RowTile> units = list_tiles(
      {call.num_items(), call.H}, unit,
      [&](std::int64_t item, std::int64_t, std::int64_t) { return call.item(item).q.length; });
  for_tiles(units, [&](const RowTile& tile, int worker) {
    Tiles<T>& own = ws.lists.tiles[static_cast<std::size_t>(worker)];
    const Blocks blocks{near, call.item(tile.item).k.length};
    NearForward<T> pass(call, blocks, tile.item, tile.head, own,
                        ws.near[static_cast<std::size_t>(worker)]);
    const std::int64_t end = tile.first + tile.count;
    for (std::int64_t first = tile.first; first < end;) {
      const Range rows{first, std::min({first + kQueryTile, (first / group + 1) * group, end})};
      pass.run(rows, blocks.near({tile.first, end}));
      add_far(call, tile, rows, ws, own);
      finish({tile.item, tile.head, 0, rows.begin, rows.end - rows.begin}, own);
      first = rows.end;
    }
  });
}

template <class T>
void near_forward(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
                  const TensorView& out, NearWorkspace<T>& ws) {
  fill_padding(out, query_spans(call), 0);
  fill_padding(tensors.lse, query_spans(call), -std::numeric_limits<double>::infinity());
  cluster_means(call, tensors.lists, tensors.centroids, ws.lists.tiles);
  near_rows<T>(call, near, tensors, ws, [&](const RowTile& tile, Tiles<T>& own) {
    const Span& span = call.item(tile.item).q;
    kernels<T>().store(span_rows(out, span, tile.head), tile.first, tile.count, T(1), own.o,
                       own.value_row);
    std::copy_n(own.lse, tile.count, span_at<T>(tensors.lse, span, tile.head) + tile.first);
  });
}

#define COTERIE_INSTANTIATE(T)                                                                 \
  template struct FarTiles<T>;                                                                 \
  template ListCall<T> near_top_plan(const AttentionCall&, std::int64_t, const ClusterLists&); \
  template void near_rows(const AttentionCall&, std::int64_t, const NearTensors&,              \
                          NearWorkspace<T>&, const FinishRows<T>&);                            \
  template void near_forward(const AttentionCall&, std::int64_t, const NearTensors&,           \
                             const TensorView&, NearWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
