// SPDX-License-Identifier: MIT
// The backward pass of clustered attention with near keys. With p_ij = exp(s_ij - lse_i) and
// delta_i = g_i . out_i:
//   near and top keys   ds_ij = p_ij (g_i . v_j - delta_i), as in full attention
//   far keys            a cluster's members that are far from key j share exp(z_cj):
//                       G = sum of exp(shift - lse_i) g_i, D = sum of exp(shift - lse_i) delta_i,
//                       dz_cj = exp(z_cj - shift) (G . v_j - D), dv_j += exp(z_cj - shift) G
// G depends on the key's block. exp(z_cj - lse_i) <= 1 for far pairs, so with shift the smallest
// lse of these members no factor is above 1.
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "cpu/engine/tile_steps.h"
#include "cpu/engine/turns.h"
#include "cpu/mechanisms/near.h"

namespace coterie::cpu {

namespace {

constexpr std::int64_t kTurnRows = 32;  // rows of dq that are added at a time

// Sums over members, relative to the smallest lse so far; infinity if there is none.
template <class T>
struct RowGradientSums {
  T &shift, &delta;
  T* gradient;

  // Makes a smaller lse the one that sums are relative to.
  void lower(T lse, std::int64_t width) const {
    if (!(lse < shift)) return;
    const T factor = shift == -kNegInf<T> ? T(0) : std::exp(lse - shift);
    if (shift != -kNegInf<T>) kernels<T>().row_scale(gradient, width, factor);
    delta *= factor;
    shift = lse;
  }
  void add(T lse, T other_delta, const T* other, std::int64_t width) const {
    if (std::abs(lse) == -kNegInf<T>) return;  // no member, or one without weights
    lower(lse, width);
    const T factor = lse == shift ? T(1) : std::exp(shift - lse);
    kernels<T>().row_add(gradient, other, width, factor);
    delta += other_delta * factor;
  }
};

template <class T>
class NearBackward {
 public:
  NearBackward(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
               const ListGradients& gradients, NearWorkspace<T>& workspace)
      : call_(call),
        near_(near),
        tensors_(tensors),
        gradients_(gradients),
        ws_(workspace),
        clusters_(tensors.lists.clusters()),
        cluster_tiles_((clusters_ + kQueryTile - 1) / kQueryTile),
        query_groups_((call.N + kTurnRows - 1) / kTurnRows),
        mean_turns_(call.num_items() * call.H * cluster_tiles_),
        query_turns_(call.num_items() * call.H * query_groups_) {}

  // delta = g . out of every query. A stored output of 16 bits is not accurate enough.
  void find_deltas() {
    if (dtype_bytes(gradients_.out.dtype) != 2)
      return lists_deltas(call_, ListCall<T>{}, gradients_, ws_.lists);
    near_rows<T>(call_, near_, tensors_, ws_, [&](const RowTile& tile, Tiles<T>& own) {
      const Span& span = call_.item(tile.item).q;
      kernels<T>().load(span_rows(gradients_.grad_out, span, tile.head), tile.first, tile.count,
                        T(1), own.g, own.value_row);
      T* delta = ws_.lists.delta + row_of(tile.item, tile.head) + tile.first;
      for (std::int64_t r = 0; r < tile.count; ++r)
        delta[r] = kernels<T>().row_dot(own.g + r * own.value_row, own.o + r * own.value_row,
                                        own.value_row);
    });
  }

  // ws.before and ws.after.
  void sum_members() {
    const std::int64_t problems = call_.num_items() * call_.H;
    parallel_for(problems * cluster_tiles_ * 2, [&](std::int64_t task, int worker) {
      T* scratch = ws_.lists.tiles[static_cast<std::size_t>(worker)].g;
      const bool after = task % 2 == 1;
      sum_chunks(task / 2 / cluster_tiles_, task / 2 % cluster_tiles_ * kQueryTile, after,
                 after ? ws_.after : ws_.before, scratch);
    });
  }

  // dk, dv, the near part of dq and the gradients of the means. `slots`: of top keys, or null.
  void run(const KeySlots<T>* slots) {
    const bool queries = gradients_.dq.present();
    if (queries) {
      std::fill_n(ws_.dmean, call_.num_items() * call_.H * clusters_ * call_.Dk, T(0));
      std::fill_n(ws_.dq, call_.B * call_.H * call_.N * call_.Dk, T(0));
      start_turns();
    }
    const auto add = [&](const RowTile& tile, std::int64_t head, Tiles<T>& own) {
      const auto worker = static_cast<std::size_t>(&own - ws_.lists.tiles.data());
      const auto task = [&] {
        add_far(tile, head, own, ws_.far[worker]);
        add_near(tile, head, own, ws_.near[worker]);
      };
      mean_turns_.run([&] { query_turns_.run(task); });
      if (slots)
        add_slots(call_, tensors_.lists, tile.item, head, tile.first, tile.count, *slots, own);
    };
    write_key_tiles<T>(call_, {}, add, gradients_.dk, gradients_.dv, ws_.lists.tiles);
    if (queries) share_means(call_, tensors_.lists, ws_.dmean);
  }

 private:
  Blocks blocks_of(std::int64_t item) const { return {near_, call_.item(item).k.length}; }
  std::int64_t row_of(std::int64_t item, std::int64_t head) const {
    const Span& span = call_.item(item).q;
    return (span.batch * call_.H + head) * call_.N + span.begin;
  }
  const T* lse_of(std::int64_t item, std::int64_t head) const {
    return static_cast<const T*>(tensors_.lse.data) + row_of(item, head);
  }

  // Row `query` of the output gradients, in memory of its own if it has another type.
  const T* gradient_row(const Rows& g, std::int64_t query, T* scratch) const {
    if (dtype_bytes(g.dtype) == sizeof(T))
      return reinterpret_cast<const T*>(static_cast<const char*>(g.base) + query * g.stride_bytes);
    Rows one = g;
    const auto number = static_cast<std::int32_t>(query);
    one.index = &number;
    kernels<T>().load(one, 0, 1, T(1), scratch, padded(call_.Dv));
    return scratch;
  }

  // Sums over the members of a tile of clusters, from `first` on, in the chunks before each chunk,
  // or after it: those of the neighbouring chunk and its own members.
  void sum_chunks(std::int64_t problem, std::int64_t first, bool after, MemberSums<T>& sums,
                  T* scratch) {
    const std::int64_t item = problem / call_.H, head = problem % call_.H;
    const Span& span = call_.item(item).q;
    const std::int64_t chunks = (span.length + sums.chunk - 1) / sums.chunk,
                       count = std::min(kQueryTile, clusters_ - first);
    const std::int32_t* labels = span_at<std::int32_t>(tensors_.labels, span, head);
    const Rows g = span_rows(gradients_.grad_out, span, head);
    const T* lse = lse_of(item, head);
    const T* delta = ws_.lists.delta + row_of(item, head);
    for (std::int64_t step = 0; step < chunks; ++step) {
      const std::int64_t chunk = after ? chunks - 1 - step : step,
                         slot = (problem * sums.chunks + chunk) * clusters_ + first;
      if (step == 0) {
        std::fill_n(sums.shift + slot, count, -kNegInf<T>);
        std::fill_n(sums.delta + slot, count, T(0));
        std::fill_n(sums.gradient + slot * call_.Dv, count * call_.Dv, T(0));
        continue;
      }
      const std::int64_t other = after ? chunk + 1 : chunk - 1,
                         from = (problem * sums.chunks + other) * clusters_ + first;
      std::copy_n(sums.shift + from, count, sums.shift + slot);
      std::copy_n(sums.delta + from, count, sums.delta + slot);
      std::copy_n(sums.gradient + from * call_.Dv, count * call_.Dv,
                  sums.gradient + slot * call_.Dv);
      const Range rows{other * sums.chunk, std::min((other + 1) * sums.chunk, span.length)};
      for (std::int64_t i = 0; i < rows.end - rows.begin; ++i) {
        const std::int64_t query = after ? rows.end - 1 - i : rows.begin + i,
                           row = labels[query] - first;
        if (row < 0 || row >= count) continue;
        const RowGradientSums<T> total{sums.shift[slot + row], sums.delta[slot + row],
                                       sums.gradient + (slot + row) * call_.Dv};
        total.add(lse[query], delta[query], gradient_row(g, query, scratch), call_.Dv);
      }
    }
  }

  // Sums over the members of clusters [first, first + count) that are far from each of the blocks
  // [begin, end): far.gradients, far.shift and far.delta.
  void far_members(std::int64_t item, std::int64_t head, std::int64_t first, std::int64_t count,
                   std::int64_t begin, std::int64_t end, Tiles<T>& own, FarTiles<T>& far) {
    const Span& span = call_.item(item).q;
    const Blocks blocks = blocks_of(item);
    const std::int64_t width = own.value_row, problem = item * call_.H + head;
    const std::int32_t* labels = span_at<std::int32_t>(tensors_.labels, span, head);
    const Rows g = span_rows(gradients_.grad_out, span, head);
    const T* lse = lse_of(item, head);
    const T* delta = ws_.lists.delta + row_of(item, head);
    const std::int64_t low = std::max<std::int64_t>(begin - 1, 0) * near_ / ws_.before.chunk,
                       high = std::min(blocks.count() - 1, end) * near_ / ws_.after.chunk;
    // The row of the query's cluster, or -1.
    const auto row_in_tile = [&](std::int64_t query) {
      const std::int64_t row = labels[query] - first;
      return row < count ? std::max<std::int64_t>(row, -1) : -1;
    };
    const auto take = [&](const RowGradientSums<T>& sums, std::int64_t query) {
      sums.add(lse[query], delta[query], gradient_row(g, query, own.g), call_.Dv);
    };
    const auto sums_at = [&](std::int64_t block, std::int64_t r) {
      const std::int64_t slot = (block - begin) * kQueryTile + r;
      return RowGradientSums<T>{far.shift[slot], far.delta[slot], far.gradients + slot * width};
    };
    // Sums of later members, for all rows.
    T *after_shift = own.max, *after_delta = own.sum;
    const auto after_at = [&](std::int64_t r) {
      return RowGradientSums<T>{after_shift[r], after_delta[r], own.o + r * width};
    };
    // Sums from before and after are relative to the same lse, unless it is too far from one of
    // them, so that they can be added as they are.
    constexpr T kClose = 40;
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t before = ((problem * ws_.before.chunks + low) * clusters_ + first + r),
                         after = ((problem * ws_.after.chunks + high) * clusters_ + first + r);
      const auto start = [&](const RowGradientSums<T>& sums, const MemberSums<T>& from,
                             std::int64_t slot) {
        sums.shift = from.shift[slot];
        sums.delta = from.delta[slot];
        std::copy_n(from.gradient + slot * call_.Dv, call_.Dv, sums.gradient);
        std::fill(sums.gradient + call_.Dv, sums.gradient + width, T(0));
      };
      start(sums_at(begin, r), ws_.before, before);
      start(after_at(r), ws_.after, after);
      if (std::abs(ws_.before.shift[before] - ws_.after.shift[after]) >= kClose) continue;
      sums_at(begin, r).lower(ws_.after.shift[after], call_.Dv);
      after_at(r).lower(ws_.before.shift[before], call_.Dv);
    }
    std::int64_t next = low * ws_.before.chunk;
    for (std::int64_t b = begin; b < end; ++b) {
      T* rows = far.gradients + (b - begin) * kQueryTile * width;
      T* shift = far.shift + (b - begin) * kQueryTile;
      T* sum = far.delta + (b - begin) * kQueryTile;
      if (b > begin) {  // each block starts with the sums of the one before it
        std::copy_n(rows - kQueryTile * width, count * width, rows);
        std::copy_n(shift - kQueryTile, count, shift);
        std::copy_n(sum - kQueryTile, count, sum);
      }
      for (; next < (b - 1) * near_; ++next)
        if (const std::int64_t r = row_in_tile(next); r >= 0) take(sums_at(b, r), next);
    }
    std::int64_t last = std::min((high + 1) * ws_.after.chunk, blocks.rows);
    for (std::int64_t b = end - 1; b >= begin; --b) {
      for (; last > (b + 2) * near_; --last)
        if (const std::int64_t r = row_in_tile(last - 1); r >= 0) take(after_at(r), last - 1);
      T* shift = far.shift + (b - begin) * kQueryTile;
      if (std::equal(shift, shift + count, after_shift)) {
        kernels<T>().row_add(far.gradients + (b - begin) * kQueryTile * width, own.o, count * width,
                             T(1));
        for (std::int64_t r = 0; r < count; ++r)
          far.delta[(b - begin) * kQueryTile + r] += after_delta[r];
      } else {
        for (std::int64_t r = 0; r < count; ++r)
          sums_at(b, r).add(after_shift[r], after_delta[r], own.o + r * width, call_.Dv);
      }
    }
  }

  // The means over a tile of keys: adds to own.dk, own.dv and ws.dmean.
  void add_far(const RowTile& tile, std::int64_t head, Tiles<T>& own, FarTiles<T>& far) {
    const Kernels<T>& kernel = kernels<T>();
    const Blocks blocks = blocks_of(tile.item);
    const Segment<T> segment =
        centroid_segment<T>(call_, tensors_.lists, tensors_.centroids, tile.item, head);
    Pass<T> pass{segment, own};
    const std::int64_t problem = tile.item * call_.H + head;
    const bool queries = gradients_.dq.present();
    // The tile as a whole if blocks are aligned with its columns, else block by block.
    const bool whole = aligned();
    const std::int64_t tile_end = tile.first + tile.count;
    for (std::int64_t q = 0; q < clusters_; q += kQueryTile) {
      const std::int64_t num = std::min(kQueryTile, clusters_ - q);
      pass.load_queries(q, num);
      if (queries) std::fill_n(own.dq, num * own.key_row, T(0));
      far_members(tile.item, head, q, num, blocks.of(tile.first), blocks.of(tile_end - 1) + 1, own,
                  far);
      std::int64_t begin = tile.first;
      while (begin < tile_end) {
        const std::int64_t end =
            whole ? tile_end : std::min(tile_end, (blocks.of(begin) + 1) * near_);
        const std::int64_t keys = end - begin, row = begin - tile.first;
        if (!whole || q == 0) {
          pass.load_key_columns(begin, keys);
          kernel.load_transposed(segment.v, begin, keys, T(1), own.v_columns, padded(keys));
          if (queries) kernel.load(segment.k, begin, keys, segment.scale, own.k, own.key_row);
        }
        pass.score(q, num, begin, keys);
        remove_listed(tile.item, head, q, num, begin, keys, own);
        for (std::int64_t b = blocks.of(begin); b <= blocks.of(end - 1); ++b) {
          const std::int64_t low = std::max(b * near_, begin) - begin,
                             high = std::min((b + 1) * near_, end) - begin;
          const std::int64_t slot = (b - blocks.of(tile.first)) * kQueryTile;
          const T* gradient = far.gradients + slot * own.value_row;
          kernel.multiply({num, padded(high - low), segment.v.width, gradient, own.value_row, 1,
                           own.v_columns + low, padded(keys), own.dp + low, kKeyTile, false});
          drop(segment.dropout, {q, q + num}, {begin + low, begin + high}, own.dp + low);
          kernel.softmax_grad({own.s + low, own.dp + low, num, kKeyTile, padded(high - low),
                               far.shift + slot, far.delta + slot});
          drop(segment.dropout, {q, q + num}, {begin + low, begin + high}, own.s + low);
          kernel.multiply({high - low, own.value_row, num, own.s + low, 1, kKeyTile, gradient,
                           own.value_row, own.dv + (row + low) * own.value_row, own.value_row,
                           true});
        }
        kernel.multiply({keys, own.key_row, num, own.dp, 1, kKeyTile, own.q, own.key_row,
                         own.dk + row * own.key_row, own.key_row, true});
        if (queries)
          kernel.multiply({num, own.key_row, keys, own.dp, kKeyTile, 1, own.k, own.key_row, own.dq,
                           own.key_row, true});
        begin = end;
      }
      if (!queries) continue;
      const Turns::Turn turn(mean_turns_, problem * cluster_tiles_ + q / kQueryTile,
                             tile.first / kKeyTile);
      add_rows(ws_.dmean + (problem * clusters_ + q) * call_.Dk, num, own.dq, own.key_row);
    }
    if (whole) return;
    // add_near needs the columns of the whole tile.
    pass.load_key_columns(tile.first, tile.count);
    kernel.load_transposed(segment.v, tile.first, tile.count, T(1), own.v_columns,
                           padded(tile.count));
    if (queries) kernel.load(segment.k, tile.first, tile.count, segment.scale, own.k, own.key_row);
  }

  void remove_listed(std::int64_t item, std::int64_t head, std::int64_t first, std::int64_t count,
                     std::int64_t begin, std::int64_t keys, Tiles<T>& own) const {
    if (!tensors_.listed()) return;
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int32_t* list = tensors_.lists.key_row(item, head, first + r);
      const std::int32_t* end = std::find(list, list + tensors_.lists.width(), -1);
      for (const std::int32_t* key = std::lower_bound(list, end, begin);
           key != end && *key < begin + keys; ++key)
        own.s[r * kKeyTile + *key - begin] = kNegInf<T>;
    }
  }

  // Adds rows of dq, `width` apart, to `rows`, (count, Dk) in memory.
  void add_rows(T* rows, std::int64_t count, const T* dq, std::int64_t width) const {
    for (std::int64_t r = 0; r < count; ++r)
      kernels<T>().row_add(rows + r * call_.Dk, dq + r * width, call_.Dk, T(1));
  }

  // A group of kTurnRows queries gets its sums from the tiles of its near keys, in their order.
  void start_turns() {
    for (std::int64_t item = 0; item < call_.num_items(); ++item) {
      const Blocks blocks = blocks_of(item);
      for (std::int64_t q = 0; q < blocks.rows; q += kTurnRows) {
        const Range keys = blocks.near({q, std::min(q + kTurnRows, blocks.rows)});
        for (std::int64_t head = 0; head < call_.H; ++head)
          query_turns_.start((item * call_.H + head) * query_groups_ + q / kTurnRows,
                             keys.begin / kKeyTile);
      }
    }
  }

  // Dropout of the rows of a tile.
  static void drop(const SegmentDropout& dropout, const Range& rows, const Range& keys, T* tile) {
    for (std::int64_t r = rows.begin; dropout.dropout && r < rows.end; ++r)
      dropout.apply(r, keys.begin, keys.end - keys.begin, tile + (r - rows.begin) * kKeyTile);
  }

  // Whether blocks begin and end where the padding of columns does.
  bool aligned() const { return near_ % kColumnPad == 0; }

  // Near queries over a tile of keys: adds to own.dk, own.dv and ws.dq. Needs the tile's columns.
  void add_near(const RowTile& tile, std::int64_t head, Tiles<T>& own, NearTiles<T>& near) {
    const Blocks blocks = blocks_of(tile.item);
    const Range tile_keys{tile.first, tile.first + tile.count}, all = blocks.near(tile_keys);
    const std::int64_t step = aligned() ? near_ : kColumnPad;
    for (std::int64_t q = all.begin / kTurnRows * kTurnRows; q < all.end; q += kNearRows) {
      const Range rows{q, std::min(q + kNearRows, blocks.rows)};
      load_rows(tile.item, head, rows, near);
      for (std::int64_t begin = tile.first; begin < tile_keys.end;) {
        const Range keys{begin, std::min((begin / step + 1) * step, tile_keys.end)};
        const Range seeing = blocks.near(keys);
        begin = keys.end;
        for (std::int64_t first = std::max(seeing.begin, rows.begin);
             first < std::min(seeing.end, rows.end); first += kQueryTile)
          add_piece(tile, head, blocks, keys,
                    {first, std::min({first + kQueryTile, seeing.end, rows.end})}, rows.begin, own,
                    near);
      }
      if (gradients_.dq.present())
        add_queries(tile, head, {rows.begin, std::min(rows.end, all.end)}, own.key_row, near);
    }
  }

  // Queries `rows` and their gradients.
  void load_rows(std::int64_t item, std::int64_t head, const Range& rows, NearTiles<T>& near) {
    const Kernels<T>& kernel = kernels<T>();
    const Span& span = call_.item(item).q;
    const std::int64_t count = rows.end - rows.begin;
    kernel.load(span_rows(call_.inputs.q, span, head), rows.begin, count,
                static_cast<T>(call_.scale), near.q, padded(call_.Dk));
    kernel.load(span_rows(gradients_.grad_out, span, head), rows.begin, count, T(1), near.g,
                padded(call_.Dv));
    std::copy_n(ws_.lists.delta + row_of(item, head) + rows.begin, count, near.delta);
    // A row without keys has lse -inf; +inf makes all its weights exp(-inf) = 0.
    const T* lse = lse_of(item, head) + rows.begin;
    for (std::int64_t r = 0; r < count; ++r)
      near.lse[r] = lse[r] == kNegInf<T> ? -kNegInf<T> : lse[r];
    std::fill_n(near.dq, count * padded(call_.Dk), T(0));
  }

  // Queries `rows`, all of which are near one of `keys`; the first loaded row is number `loaded`.
  void add_piece(const RowTile& tile, std::int64_t head, const Blocks& blocks, const Range& keys,
                 const Range& rows, std::int64_t loaded, Tiles<T>& own, NearTiles<T>& near) {
    const Kernels<T>& kernel = kernels<T>();
    const std::int64_t num = rows.end - rows.begin, count = keys.end - keys.begin,
                       columns = padded(count), column = keys.begin - tile.first,
                       first = rows.begin - loaded, stride = padded(tile.count);
    const T *q = near.q + first * own.key_row, *g = near.g + first * own.value_row;
    kernel.multiply({num, columns, call_.Dk, q, own.key_row, 1, own.k_columns + column, stride,
                     own.s, kKeyTile, false});
    kernel.multiply({num, columns, call_.Dv, g, own.value_row, 1, own.v_columns + column, stride,
                     own.dp, kKeyTile, false});
    for (std::int64_t r = 0; r < num; ++r) {
      T* p = own.s + r * kKeyTile;
      const Range seen = aligned() ? Range{0, count} : blocks.near_columns(rows.begin + r, keys);
      std::fill(p, p + seen.begin, kNegInf<T>);
      std::fill(p + seen.end, p + columns, kNegInf<T>);
    }
    const SegmentDropout dropout = dropout_of(call_, tile.item, head, {}, {});
    drop(dropout, rows, keys, own.dp);
    kernel.softmax_grad(
        {own.s, own.dp, num, kKeyTile, columns, near.lse + first, near.delta + first});
    drop(dropout, rows, keys, own.s);
    kernel.multiply({count, own.value_row, num, own.s, 1, kKeyTile, g, own.value_row,
                     own.dv + column * own.value_row, own.value_row, true});
    kernel.multiply({count, own.key_row, num, own.dp, 1, kKeyTile, q, own.key_row,
                     own.dk + column * own.key_row, own.key_row, true});
    if (gradients_.dq.present())
      kernel.multiply({num, own.key_row, count, own.dp, kKeyTile, 1, own.k + column * own.key_row,
                       own.key_row, near.dq + first * own.key_row, own.key_row, true});
  }

  // Adds near.dq to ws.dq, a group of rows at a time. rows.begin is that of a group.
  void add_queries(const RowTile& tile, std::int64_t head, const Range& rows, std::int64_t width,
                   const NearTiles<T>& near) {
    for (std::int64_t q = rows.begin; q < rows.end; q += kTurnRows) {
      const Turns::Turn turn(query_turns_,
                             (tile.item * call_.H + head) * query_groups_ + q / kTurnRows,
                             tile.first / kKeyTile);
      add_rows(ws_.dq + (row_of(tile.item, head) + q) * call_.Dk, std::min(kTurnRows, rows.end - q),
               near.dq + (q - rows.begin) * width, width);
    }
  }

  const AttentionCall& call_;
  std::int64_t near_;
  const NearTensors& tensors_;
  const ListGradients& gradients_;
  NearWorkspace<T>& ws_;
  std::int64_t clusters_, cluster_tiles_, query_groups_;
  Turns mean_turns_, query_turns_;
};

template <class T>
MemberSums<T> take_member_sums(Arena& arena, const AttentionCall& call, std::int64_t clusters,
                               std::int64_t near) {
  MemberSums<T> sums;
  sums.chunk = (std::max<std::int64_t>(256, clusters) + near - 1) / near * near;
  sums.chunks = (call.N + sums.chunk - 1) / sums.chunk;
  const std::int64_t rows = call.num_items() * call.H * sums.chunks * clusters;
  sums.gradient = arena.take<T>(rows * call.Dv);
  sums.delta = arena.take<T>(rows);
  sums.shift = arena.take<T>(rows);
  return sums;
}

}  // namespace

template <class T>
NearWorkspace<T>::NearWorkspace(Arena& arena, const AttentionCall& call, const NearSizes& sizes)
    : lists(arena, call),
      out(arena.take<T>(call.B * call.H * call.N * call.Dv)),
      max(arena.take<T>(call.B * call.H * call.N)),
      sum(arena.take<T>(call.B * call.H * call.N)),
      before(take_member_sums<T>(arena, call, sizes.clusters, sizes.near)),
      after(take_member_sums<T>(arena, call, sizes.clusters, sizes.near)),
      dq(arena.take<T>(call.B * call.H * call.N * call.Dk)),
      dmean(arena.take<T>(call.num_items() * call.H * sizes.clusters * call.Dk)),
      slots(arena, call, sizes.clusters, sizes.topk) {
  for (int worker = 0; worker < call_threads(); ++worker) {
    far.emplace_back(arena, call, sizes.near);
    near.emplace_back(arena, call);
  }
}

template <class T>
NearTiles<T>::NearTiles(Arena& arena, const AttentionCall& call)
    : q(arena.take<T>((kNearRows + kColumnPad) * padded(call.Dk))),
      g(arena.take<T>(kNearRows * padded(call.Dv))),
      dq(arena.take<T>(kNearRows * padded(call.Dk))),
      lse(arena.take<T>(kNearRows)),
      delta(arena.take<T>(kNearRows)) {}

template <class T>
void near_backward(const AttentionCall& call, std::int64_t near, const NearTensors& tensors,
                   const ListGradients& gradients, NearWorkspace<T>& ws) {
  NearBackward<T> pass(call, near, tensors, gradients, ws);
  pass.find_deltas();
  pass.sum_members();
  const bool listed = tensors.listed(), keys = gradients.dk.present() || gradients.dv.present();
  ListCall<T> top;
  if (listed) top = near_top_plan<T>(call, near, tensors.lists);
  if (listed && keys)
    shared_backward_slots(call, top, tensors.lists, gradients, ws.slots, ws.lists);
  pass.run(listed && keys ? &ws.slots : nullptr);
  if (!gradients.dq.present()) return;

  // Near keys' part and the share of the mean's gradient, which are added to that of top keys.
  const std::int64_t clusters = tensors.lists.clusters();
  const auto add_parts = [&](const RowTile& tile, std::int64_t r, std::int64_t query,
                             std::int64_t cluster, Tiles<T>& own) {
    const Span& span = call.item(tile.item).q;
    const std::int64_t row = (span.batch * call.H + tile.head) * call.N + span.begin + query;
    T* to = own.dq + r * own.key_row;
    kernels<T>().row_add(to, ws.dq + row * call.Dk, call.Dk, T(1));
    const std::int64_t mean = (tile.item * call.H + tile.head) * clusters + cluster;
    kernels<T>().row_add(to, ws.dmean + mean * call.Dk, call.Dk, T(1));
  };
  if (listed) {
    top.finish_backward = [&](const RowTile& tile, Tiles<T>& own) {
      const RowList queries = top.pair(tile.item, tile.head, tile.list).queries;
      const Span& span = call.item(tile.item).q;
      const T* dq = ws.dq + ((span.batch * call.H + tile.head) * call.N + span.begin) * call.Dk;
      for (std::int64_t r = 0; r < tile.count; ++r)
        prefetch_row(dq + queries.row(tile.first + r) * call.Dk, call.Dk);
      for (std::int64_t r = 0; r < tile.count; ++r)
        add_parts(tile, r, queries.row(tile.first + r), tile.list, own);
    };
    return lists_backward_queries(call, top, gradients, ws.lists);
  }
  fill_padding(gradients.dq, query_spans(call), 0);
  for_tiles(span_tiles(query_spans(call), call.H), ws.lists.tiles,
            [&](const RowTile& tile, Tiles<T>& own) {
              const Span& span = call.item(tile.item).q;
              const std::int32_t* labels = span_at<std::int32_t>(tensors.labels, span, tile.head);
              std::fill_n(own.dq, tile.count * own.key_row, T(0));
              for (std::int64_t r = 0; r < tile.count; ++r)
                add_parts(tile, r, tile.first + r, labels[tile.first + r], own);
              kernels<T>().store(span_rows(gradients.dq, span, tile.head), tile.first, tile.count,
                                 T(1), own.dq, own.key_row);
            });
}

#define COTERIE_INSTANTIATE(T)                                                        \
  template struct NearTiles<T>;                                                       \
  template struct NearWorkspace<T>;                                                   \
  template void near_backward(const AttentionCall&, std::int64_t, const NearTensors&, \
                              const ListGradients&, NearWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
