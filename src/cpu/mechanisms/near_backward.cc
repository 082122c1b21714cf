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

// Sums over members, relative to the smallest lse so far; infinity if there is none.
template <class T>
struct GradientSums {
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
        query_tiles_((call.N + kQueryTile - 1) / kQueryTile),
        mean_turns_(call.num_items() * call.H * cluster_tiles_),
        query_turns_(call.num_items() * call.H * query_tiles_) {}

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
    parallel_for(call_.num_items() * call_.H * clusters_, [&](std::int64_t task, int worker) {
      const std::int64_t problem = task / clusters_, cluster = task % clusters_;
      T* scratch = ws_.lists.tiles[static_cast<std::size_t>(worker)].g;
      sum_chunks(problem, cluster, false, ws_.before, scratch);
      sum_chunks(problem, cluster, true, ws_.after, scratch);
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
      FarTiles<T>& far = ws_.far[static_cast<std::size_t>(&own - ws_.lists.tiles.data())];
      const auto task = [&] {
        add_far(tile, head, own, far);
        add_near(tile, head, own);
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

  // Sums over the members of one cluster in the chunks before each chunk, or after it.
  void sum_chunks(std::int64_t problem, std::int64_t cluster, bool after, MemberSums<T>& sums,
                  T* scratch) {
    const std::int64_t item = problem / call_.H, head = problem % call_.H;
    const Span& span = call_.item(item).q;
    const std::int64_t chunks = (span.length + sums.chunk - 1) / sums.chunk;
    const std::int32_t* order = span_at<std::int32_t>(tensors_.lists.order, span, head);
    const Range members = tensors_.lists.members(item, head, cluster);
    const Rows g = span_rows(gradients_.grad_out, span, head);
    const T* lse = lse_of(item, head);
    const T* delta = ws_.lists.delta + row_of(item, head);
    std::int64_t at = after ? members.end : members.begin;
    std::int64_t previous = -1;
    for (std::int64_t step = 0; step < chunks; ++step) {
      const std::int64_t chunk = after ? chunks - 1 - step : step;
      const std::int64_t slot = (problem * sums.chunks + chunk) * clusters_ + cluster;
      T* to = sums.gradient + slot * call_.Dv;
      const GradientSums<T> total{sums.shift[slot], sums.delta[slot], to};
      total.shift = previous < 0 ? -kNegInf<T> : sums.shift[previous];
      total.delta = previous < 0 ? T(0) : sums.delta[previous];
      if (previous < 0)
        std::fill_n(to, call_.Dv, T(0));
      else
        std::copy_n(sums.gradient + previous * call_.Dv, call_.Dv, to);
      const auto take = [&](std::int64_t member) {
        Rows row = g;
        row.index = order + member;
        kernels<T>().load(row, 0, 1, T(1), scratch, padded(call_.Dv));
        total.add(lse[order[member]], delta[order[member]], scratch, call_.Dv);
      };
      if (after)
        for (; at > members.begin && order[at - 1] >= (chunk + 1) * sums.chunk; --at) take(at - 1);
      else
        for (; at < members.end && order[at] < chunk * sums.chunk; ++at) take(at);
      previous = slot;
    }
  }

  // Sums over the members of clusters [first, first + count) that are far from each of the blocks
  // [begin, end): far.gradients, far.shift and far.delta.
  void far_members(std::int64_t item, std::int64_t head, std::int64_t first, std::int64_t count,
                   std::int64_t begin, std::int64_t end, Tiles<T>& own, FarTiles<T>& far) {
    const Span& span = call_.item(item).q;
    const Blocks blocks = blocks_of(item);
    const std::int64_t width = own.value_row, problem = item * call_.H + head;
    const std::int32_t* order = span_at<std::int32_t>(tensors_.lists.order, span, head);
    const Rows g = span_rows(gradients_.grad_out, span, head);
    const T* lse = lse_of(item, head);
    const T* delta = ws_.lists.delta + row_of(item, head);
    const std::int64_t low = std::max<std::int64_t>(begin - 1, 0) * near_ / ws_.before.chunk,
                       high = std::min(blocks.count() - 1, end) * near_ / ws_.after.chunk;
    const bool direct = dtype_bytes(g.dtype) == sizeof(T);
    const auto take = [&](const GradientSums<T>& sums, std::int64_t query) {
      const T* row = own.g;
      if (direct) {
        row = reinterpret_cast<const T*>(static_cast<const char*>(g.base) + query * g.stride_bytes);
      } else {
        Rows one = g;
        const auto number = static_cast<std::int32_t>(query);
        one.index = &number;
        kernels<T>().load(one, 0, 1, T(1), own.g, width);
      }
      sums.add(lse[query], delta[query], row, call_.Dv);
    };
    const auto sums_at = [&](std::int64_t block, std::int64_t r) {
      const std::int64_t slot = (block - begin) * kQueryTile + r;
      return GradientSums<T>{far.shift[slot], far.delta[slot], far.gradients + slot * width};
    };
    // Sums of later members, for all rows.
    T *after_shift = own.max, *after_delta = own.sum;
    const auto after_at = [&](std::int64_t r) {
      return GradientSums<T>{after_shift[r], after_delta[r], own.o + r * width};
    };
    // Sums from before and after are relative to the same lse, unless it is too far from one of
    // them, so that they can be added as they are.
    constexpr T kClose = 40;
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int64_t before = ((problem * ws_.before.chunks + low) * clusters_ + first + r),
                         after = ((problem * ws_.after.chunks + high) * clusters_ + first + r);
      const auto start = [&](const GradientSums<T>& sums, const MemberSums<T>& from,
                             std::int64_t slot) {
        sums.shift = from.shift[slot];
        sums.delta = from.delta[slot];
        std::copy_n(from.gradient + slot * call_.Dv, call_.Dv, sums.gradient);
        std::fill(sums.gradient + call_.Dv, sums.gradient + width, T(0));
      };
      start(sums_at(begin, r), ws_.before, before);
      start(after_at(r), ws_.after, after);
      const Range list = tensors_.lists.members(item, head, first + r);
      far.next[r] =
          std::lower_bound(order + list.begin, order + list.end, low * ws_.before.chunk) - order;
      far.listed[r] =
          std::lower_bound(order + list.begin, order + list.end, (high + 1) * ws_.after.chunk) -
          order;
      if (std::abs(ws_.before.shift[before] - ws_.after.shift[after]) >= kClose) continue;
      sums_at(begin, r).lower(ws_.after.shift[after], call_.Dv);
      after_at(r).lower(ws_.before.shift[before], call_.Dv);
    }
    for (std::int64_t b = begin; b < end; ++b) {
      T* rows = far.gradients + (b - begin) * kQueryTile * width;
      T* shift = far.shift + (b - begin) * kQueryTile;
      T* sum = far.delta + (b - begin) * kQueryTile;
      if (b > begin) {  // each block starts with the sums of the one before it
        std::copy_n(rows - kQueryTile * width, count * width, rows);
        std::copy_n(shift - kQueryTile, count, shift);
        std::copy_n(sum - kQueryTile, count, sum);
      }
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t last = tensors_.lists.members(item, head, first + r).end;
        std::int64_t& next = far.next[r];
        for (; next < last && order[next] < (b - 1) * near_; ++next)
          take(sums_at(b, r), order[next]);
      }
    }
    for (std::int64_t b = end - 1; b >= begin; --b) {
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t least = tensors_.lists.members(item, head, first + r).begin;
        std::int64_t& last = far.listed[r];
        for (; last > least && order[last - 1] >= (b + 2) * near_; --last)
          take(after_at(r), order[last - 1]);
      }
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
    const bool whole = near_ % kColumnPad == 0;
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
          for (std::int64_t r = 0; r < num; ++r) {
            T* p = own.s + r * kKeyTile + low;
            kernel.row_exp(p, padded(high - low), far.shift[slot + r]);
            kernel.row_softmax_grad(p, own.dp + r * kKeyTile + low, padded(high - low),
                                    far.delta[slot + r]);
          }
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
      add_rows(ws_.dmean + (problem * clusters_ + q) * call_.Dk, num, own);
    }
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

  // Adds own.dq to `rows`, (count, Dk) in memory.
  void add_rows(T* rows, std::int64_t count, Tiles<T>& own) const {
    for (std::int64_t r = 0; r < count; ++r)
      kernels<T>().row_add(rows + r * call_.Dk, own.dq + r * own.key_row, call_.Dk, T(1));
  }

  // A tile of kQueryTile queries gets its sums from the tiles of its near keys, in their order.
  void start_turns() {
    for (std::int64_t item = 0; item < call_.num_items(); ++item) {
      const Blocks blocks = blocks_of(item);
      for (std::int64_t q = 0; q < blocks.rows; q += kQueryTile) {
        const Range keys = blocks.near({q, std::min(q + kQueryTile, blocks.rows)});
        for (std::int64_t head = 0; head < call_.H; ++head)
          query_turns_.start((item * call_.H + head) * query_tiles_ + q / kQueryTile,
                             keys.begin / kKeyTile);
      }
    }
  }

  // Near queries over a tile of keys: adds to own.dk, own.dv and ws.dq.
  void add_near(const RowTile& tile, std::int64_t head, Tiles<T>& own) {
    const Blocks blocks = blocks_of(tile.item);
    const Range all = blocks.near({tile.first, tile.first + tile.count});
    for (std::int64_t q = all.begin / kQueryTile * kQueryTile; q < all.end; q += kQueryTile) {
      const Range unit{q, std::min(q + kQueryTile, blocks.rows)};
      std::fill_n(own.dq, (unit.end - unit.begin) * own.key_row, T(0));
      add_pieces(tile, head, blocks, unit, own);
      if (!gradients_.dq.present()) continue;
      const Turns::Turn turn(query_turns_,
                             (tile.item * call_.H + head) * query_tiles_ + q / kQueryTile,
                             tile.first / kKeyTile);
      add_rows(ws_.dq + (row_of(tile.item, head) + q) * call_.Dk, unit.end - unit.begin, own);
    }
  }

  // Pieces of the tile of keys, each of one block or of a group of small ones, with their near
  // queries among `unit`.
  void add_pieces(const RowTile& tile, std::int64_t head, const Blocks& blocks, const Range& unit,
                  Tiles<T>& own) {
    const Kernels<T>& kernel = kernels<T>();
    const Item& item = call_.item(tile.item);
    const std::int64_t tile_end = tile.first + tile.count, group = near_ * blocks.together();
    for (std::int64_t begin = tile.first; begin < tile_end;) {
      const Range keys{begin, std::min(tile_end, (begin / group + 1) * group)};
      begin = keys.end;
      Range rows = blocks.near(keys);
      rows = {std::max(rows.begin, unit.begin), std::min(rows.end, unit.end)};
      if (rows.begin >= rows.end) continue;
      const RowList row_list{rows.end - rows.begin, nullptr, rows.begin},
          key_list{keys.end - keys.begin, nullptr, keys.begin};
      Segment<T> segment;
      segment.q = list_rows(call_.inputs.q, item.q, head, row_list);
      segment.k = list_rows(call_.k, item.k, call_.key_head(head), key_list);
      segment.v = list_rows(call_.inputs.v, item.k, call_.value_head(head), key_list);
      segment.num_queries = row_list.count;
      segment.num_keys = key_list.count;
      segment.scale = static_cast<T>(call_.scale);
      segment.rule.ranges = [&](std::int64_t first, std::int64_t count, Range* ranges) {
        for (std::int64_t r = 0; r < count; ++r) {
          const std::int64_t row = rows.begin + first + r;
          const Range seen = blocks.near({row, row + 1});
          const auto rank = [&](std::int64_t key) {
            return std::clamp(key, keys.begin, keys.end) - keys.begin;
          };
          ranges[r] = {rank(seen.begin), rank(seen.end)};
        }
      };
      Tiles<T> part = own;
      part.dk += (keys.begin - tile.first) * own.key_row;
      part.dv += (keys.begin - tile.first) * own.value_row;
      const QuerySums sums = [&](std::int64_t first, std::int64_t count) {
        kernel.multiply({count, own.key_row, key_list.count, own.dp, kKeyTile, 1, own.k,
                         own.key_row, own.dq + (rows.begin - unit.begin + first) * own.key_row,
                         own.key_row, true});
      };
      backward_key_tile(segment,
                        list_row_gradients(call_, ListCall<T>{}, gradients_, ws_.lists.delta,
                                           tile.item, head, row_list),
                        0, key_list.count, part, static_cast<const TileHook<T>*>(nullptr),
                        gradients_.dq.present() ? &sums : nullptr);
    }
  }

  const AttentionCall& call_;
  std::int64_t near_;
  const NearTensors& tensors_;
  const ListGradients& gradients_;
  NearWorkspace<T>& ws_;
  std::int64_t clusters_, cluster_tiles_, query_tiles_;
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
  for (int worker = 0; worker < call_threads(); ++worker) far.emplace_back(arena, call, sizes.near);
}

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
  template struct NearWorkspace<T>;                                                   \
  template void near_backward(const AttentionCall&, std::int64_t, const NearTensors&, \
                              const ListGradients&, NearWorkspace<T>&);
COTERIE_INSTANTIATE(float)
COTERIE_INSTANTIATE(double)
#undef COTERIE_INSTANTIATE

}  // namespace coterie::cpu
