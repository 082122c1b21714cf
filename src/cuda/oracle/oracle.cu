// SPDX-License-Identifier: MIT
// Oracle-top attention, a diagnostic: short exact kernels. The top keys of query i are the topk of
// largest q_i . k_j (smallest, if the scale is negative), lower indices first among equals, NaN
// last. With p_ij the softmax of scale q_i . k_j over them:
//   out_i = sum_j p_ij v_j            e_i = sum_j p_ij (g_i . v_j)
//   ds_ij = scale p_ij (g_i . v_j - e_i)
//   dq_i = sum_j ds_ij k_j            dk_j = sum_i ds_ij q_i            dv_j = sum_i p_ij g_i
// Dropout multiplies p in out and dv, and g . v.
//
// Selection: resident blocks of 8 warps take tiles of 64 queries of one item and head in turn and
// walk all keys in tiles of 64. A tile's products (mma.sync) go to shared memory; then each warp
// handles 8 rows and appends the keys that reach a row's floor to that row's candidate list. When
// the next tile could overflow a list, it is cut to the best topk and the floor rises. Lists stay
// ascending: keys come in order and cuts keep it. Shared memory: queries, two stages of keys (one
// of rows of 512 bytes) and the products, 42 KiB (64 16-bit elements) to 82 KiB (128 floats). Lists
// are in global memory. Attention: a warp per query for out and for dq; the latter also writes p,
// ds and the key of every (query, slot). These entries are stably sorted by tile of 64 keys; then a
// warp per key adds up its own, each lane every 32nd column. Sums have a fixed order, without
// atomics. Shared memory: 512 or 1024 bytes per warp. Preconditions: rows of at most 128 elements,
// topk of at most 128, 2^20 rows; others are refused.
#include <algorithm>
#include <cfloat>

#include "cuda/api/padding.h"
#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/cluster/group.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/candidates.cuh"
#include "cuda/prim/dropout.cuh"
#include "cuda/prim/fragments.cuh"
#include "cuda/prim/load.cuh"
#include "cuda/prim/splits.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kRows = 64, kKeys = 64;  // selection tile
constexpr int kPitch = kKeys + 8;      // of the products
constexpr int kSelectThreads = 256;
constexpr int kRowsOfWarp = kRows / (kSelectThreads / 32);
constexpr int kWarps = 4, kThreads = 32 * kWarps;  // attention
constexpr int kKeyBits = 6;                        // keys per tile, by which gradients are sorted
constexpr std::int64_t kMaxKeyTiles = 16384;       // limit of the sort

struct OraclePlan {
  int topk;
  ItemChunks query_tiles;  // selection
  int select_blocks;       // resident
  int capacity;            // of a candidate list; large enough that cuts are few
  int key_tiles;

  OraclePlan(const AttentionCall& call, std::int64_t top)
      : topk(static_cast<int>(top)),
        query_tiles(row_tiles(sequence_spans(call.inputs.q_sequences, call.N),
                              static_cast<int>(call.num_items()), kRows)),
        select_blocks(static_cast<int>(
            min(query_tiles.slots * call.H,
                std::int64_t{call.inputs.q.dtype == DType::f32 ? 1 : 3} * multiprocessors()))),
        capacity(topk + 2 * kKeys),
        key_tiles(
            static_cast<int>(max((call.S + (1 << kKeyBits) - 1) >> kKeyBits, std::int64_t{1}))) {}
};

struct OracleEntry {
  float weight, dscore;
  int key;  // row of its batch entry
};

struct OracleScratch {
  CandidateKey* candidates;               // (select_blocks, kRows, capacity)
  OracleEntry* entries;                   // (B, H, N, topk)
  std::int32_t *tiles, *order, *offsets;  // tile of every entry, -1 for none; their sort

  OracleScratch(const OraclePlan& plan, const AttentionCall& call, Arena& arena) {
    const std::int64_t count = call.B * call.H * call.N * plan.topk;
    candidates = arena.take<CandidateKey>(std::int64_t{plan.select_blocks} * kRows * plan.capacity);
    entries = arena.take<OracleEntry>(count);
    tiles = arena.take<std::int32_t>(count);
    order = arena.take<std::int32_t>(count);
    offsets = arena.take<std::int32_t>(call.B * call.H * (plan.key_tiles + 1));
  }
};

template <class T>
struct OracleArgs {
  OraclePlan plan;
  ItemSpans spans;
  int items, B, H, group, N, S;
  float scale;
  bool causal;
  const std::uint8_t* mask;  // or null
  std::int64_t mask_strides[4];
  Tensor4<const T> q, k, v;
  std::int32_t* top_keys;  // (B, H, N, topk)
  OracleScratch scratch;   // entries is null if neither dk nor dv is requested
  // Set per stage; data is null for absent gradients.
  float* lse;  // (B, H, N)
  Tensor4<const T> g;
  Tensor4<T> out, dq, dk, dv;
  Dropout dropout;
};

// Cuts a list to its best `wanted` keys, keeping their order. Returns the new floor. Called by a
// whole warp.
__device__ __noinline__ CandidateKey cut_list(CandidateKey* list, int count, int wanted) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  const CandidateKey cut = find_cut(
      [&](const auto& visit) {
        for (int i = lane; i < count; i += 32) visit(list[i]);
      },
      wanted, wanted);
  int kept = 0;
  for (int first = 0; first < count; first += 32) {
    const CandidateKey own = first + lane < count ? list[first + lane] : 0;
    const unsigned votes = __ballot_sync(~0u, own >= cut);
    if (own >= cut) list[kept + __popc(votes & ((1u << lane) - 1))] = own;
    kept += __popc(votes);
  }
  __syncwarp();
  return cut;
}

// The search of one tile of queries.
template <class T, int kDim>
struct OracleSearch {
  const OracleArgs<T>& args;
  static constexpr int kStages = Tile<T, kDim>::kRowBytes <= 256 ? 2 : 1;
  static constexpr int kTileBytes = (kRows + kStages * kKeys) * Tile<T, kDim>::kRowBytes;
  Tile<T, kDim> queries;  // kRows rows, then the stages of keys
  float (*products)[kPitch];
  CandidateKey* floors;  // (kRows)
  int* counts;           // (kRows): of candidates
  ItemChunk rows;
  ItemSpan k;
  int head;

  // Number of keys visible to a row of the tile by position.
  __device__ int visible(int row) const {
    if (rows.begin + row >= rows.end) return 0;
    if (!args.causal) return k.length;
    return min(max(rows.begin + row + k.length - rows.span.length + 1, 0), k.length);
  }
  __device__ bool unmasked(int row, int key) const {
    const std::int64_t* strides = args.mask_strides;
    return !args.mask || args.mask[rows.span.batch * strides[0] + head * strides[1] +
                                   (rows.span.begin + rows.begin + row) * strides[2] +
                                   (k.begin + key) * strides[3]] != 0;
  }
  __device__ CandidateKey* list(int row) const {
    return args.scratch.candidates +
           (static_cast<std::int64_t>(blockIdx.x) * kRows + row) * args.plan.capacity;
  }
  __device__ Tile<T, kDim> stage(int first) const {
    return queries.below(kRows + first / kKeys % kStages * kKeys);
  }
  __device__ void load_keys(int first, int last) const {
    if (first < last)
      load_tile<kKeys, kSelectThreads>(
          stage(first), args.k.rows(k.batch, head / args.group, k.begin), first, last - first);
    cp_async_commit();
  }

  // 16 queries and 32 keys a warp.
  __device__ void multiply_keys(int first) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
    QueryFragments<T, kDim, false, 1> fragments;
    fragments.load(queries, row);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = static_cast<int>(threadIdx.x) / 128 * 32 + 16 * n;
      Accumulator s[1];
      fragments.scores(s, stage(first), column);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store2(&products[row + i % 2 * 8 + lane / 4][column + i / 2 * 8 + lane % 4 * 2],
               s[0][i / 2][i % 2 * 2], s[0][i / 2][i % 2 * 2 + 1]);
    }
  }
  // Appends the keys of a tile that reach the row's floor. Called by the row's warp.
  __device__ void offer(int row, int first) const {
    const int lane = threadIdx.x % 32, seen = visible(row);
    CandidateKey floor = floors[row];
    int count = counts[row];
#pragma unroll
    for (int part = 0; part < kKeys / 32; ++part) {
      const int column = 32 * part + lane, key = first + column;
      const float product = products[row][column];
      CandidateKey own = 0;
      if (key < seen && unmasked(row, key))
        own = candidate_key(fmaxf(args.scale < 0 ? -product : product, -FLT_MAX), key);
      const unsigned votes = __ballot_sync(~0u, own >= floor);
      if (own >= floor) list(row)[count + __popc(votes & ((1u << lane) - 1))] = own;
      count += __popc(votes);
    }
    if (count > args.plan.capacity - kKeys) {
      floor = cut_list(list(row), count, args.plan.topk);
      count = args.plan.topk;
    }
    __syncwarp();
    if (lane == 0) {
      floors[row] = floor;
      counts[row] = count;
    }
  }
  __device__ void write(int row) const {
    const int lane = threadIdx.x % 32, topk = args.plan.topk;
    if (counts[row] > topk) cut_list(list(row), counts[row], topk);
    std::int32_t* to =
        args.top_keys + ((static_cast<std::int64_t>(rows.span.batch) * args.H + head) * args.N +
                         rows.span.begin + rows.begin + row) *
                            topk;
    for (int i = lane; i < topk; i += 32) to[i] = i < counts[row] ? index_of(list(row)[i]) : -1;
  }

  __device__ void run() const {
    const int own = threadIdx.x / 32 * kRowsOfWarp;
    const int count = rows.end - rows.begin, last = visible(count - 1);  // the last row sees most
    __syncthreads();  // the previous tile is done with shared memory
    if (threadIdx.x < kRows) {
      floors[threadIdx.x] = 1;  // above "no candidate"
      counts[threadIdx.x] = 0;
    }
    load_tile<kRows, kSelectThreads>(queries, args.q.rows(rows.span.batch, head, rows.span.begin),
                                     rows.begin, count);
    load_keys(0, last);
    for (int first = 0; first < last; first += kKeys) {
      cp_async_wait<0>();
      __syncthreads();
      if (kStages > 1) load_keys(first + kKeys, last);
      multiply_keys(first);
      __syncthreads();
      if (kStages == 1) load_keys(first + kKeys, last);
      for (int i = 0; i < kRowsOfWarp; ++i) offer(own + i, first);
    }
    cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < kRowsOfWarp && own + i < count; ++i) write(own + i);
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kSelectThreads, sizeof(T) == 2 ? 3 : 1)
    oracle_select_kernel(const __grid_constant__ OracleArgs<T> args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ CandidateKey floors[kRows];
  __shared__ int counts[kRows];
  for (int number = blockIdx.x; number < args.plan.query_tiles.slots * args.H;
       number += gridDim.x) {
    const ItemChunk rows = args.plan.query_tiles.find(args.spans.q, number / args.H);
    if (rows.begin >= rows.end) continue;
    const OracleSearch<T, kDim> search{
        args,
        {shared_address(memory)},
        reinterpret_cast<float(*)[kPitch]>(memory + OracleSearch<T, kDim>::kTileBytes),
        floors,
        counts,
        rows,
        args.spans.k.span(rows.item),
        number % args.H};
    search.run();
  }
}

// The query of a warp; each lane handles every 32nd column of a row.
template <class T>
struct OracleQuery {
  static constexpr int kColumns = kMaxHeadDim / 32;
  int batch, head, row, count;  // count: its top keys, 0 in the padding
  ItemSpan key_span;
  const std::int32_t* top;
  Rows<const T> k, v;
  DropoutRow words{};

  __device__ OracleQuery(const OracleArgs<T>& args, std::int64_t number) : count(0) {
    row = static_cast<int>(number % args.N);
    head = static_cast<int>(number / args.N % args.H);
    batch = static_cast<int>(number / args.N / args.H);
    top = args.top_keys + number * args.plan.topk;
    const int item = args.spans.q.item_of(batch, row, args.items);
    if (item < 0) return;
    const int lane = threadIdx.x % 32;
    for (int slot = lane; slot - lane < args.plan.topk; slot += 32)
      count += __popc(__ballot_sync(~0u, slot < args.plan.topk && top[slot] >= 0));
    key_span = args.spans.k.span(item);
    k = args.k.rows(key_span.batch, head / args.group, key_span.begin);
    v = args.v.rows(key_span.batch, head / args.group, key_span.begin);
    if (args.dropout.on())
      words = args.dropout.query(static_cast<std::int64_t>(item) * args.H + head,
                                 row - args.spans.q.span(item).begin);
  }

  // Dropout of the weight of a slot.
  __device__ float kept_slot(const OracleArgs<T>& args, int slot) const {
    return args.dropout.on() ? kept(args.dropout, words, top[slot]) : 1.0f;
  }

  // Calls body(i, column) for the columns of this lane.
  template <class Body>
  __device__ static void for_columns(int width, const Body& body) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (const int column = 32 * i + static_cast<int>(threadIdx.x) % 32; column < width)
        body(i, column);
  }
  // products[slot] = the query's row of `left` . row of the slot's key, for all slots.
  __device__ void multiply(const Tensor4<const T>& left, const Rows<const T>& rows,
                           float* products) const {
    const T* own = left.rows(batch, head, row).data;
    float x[kColumns] = {};
    for_columns(left.width, [&](int i, int column) { x[i] = to_float(own[column]); });
#pragma unroll 4
    for (int slot = 0; slot < count; ++slot) {
      const T* key = rows.row(top[slot]);
      float product = 0.0f;
      for_columns(left.width,
                  [&](int i, int column) { product = fmaf(x[i], to_float(key[column]), product); });
      product = warp_sum(product);
      if (threadIdx.x % 32 == 0) products[slot] = product;
    }
    __syncwarp();
  }
  // The query's row of `to`: the sum of factors[slot] times the rows of the keys.
  __device__ void add_up(const Rows<const T>& rows, const float* factors,
                         const Tensor4<T>& to) const {
    float sum[kColumns] = {};
#pragma unroll 4
    for (int slot = 0; slot < count; ++slot) {
      const T* key = rows.row(top[slot]);
      const float factor = factors[slot];
      for_columns(to.width,
                  [&](int i, int column) { sum[i] = fmaf(factor, to_float(key[column]), sum[i]); });
    }
    T* own = to.rows(batch, head, row).data;
    for_columns(to.width, [&](int i, int column) { own[column] = from_float<T>(sum[i]); });
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    oracle_attend_kernel(const __grid_constant__ OracleArgs<T> args) {
  __shared__ float weights[kWarps][kMaxTopKeys];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (number >= static_cast<std::int64_t>(args.B) * args.H * args.N) return;
  const OracleQuery<T> query(args, number);
  float* p = weights[warp];
  query.multiply(args.q, query.k, p);
  float largest = -INFINITY, total = 0.0f;
  for (int slot = lane; slot < query.count; slot += 32)
    largest = fmaxf(largest, p[slot] * args.scale);
  largest = warp_max(largest);
  for (int slot = lane; slot < query.count; slot += 32) {
    p[slot] = expf(__fmul_rn(p[slot], args.scale) - largest);
    total += p[slot];
  }
  total = warp_sum(total);
  for (int slot = lane; slot < query.count; slot += 32)
    p[slot] = p[slot] / total * query.kept_slot(args, slot);
  __syncwarp();
  query.add_up(query.v, p, args.out);
  if (lane == 0) args.lse[number] = query.count > 0 ? largest + logf(total) : -INFINITY;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    oracle_query_backward_kernel(const __grid_constant__ OracleArgs<T> args) {
  __shared__ float products[kWarps][2][kMaxTopKeys];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (number >= static_cast<std::int64_t>(args.B) * args.H * args.N) return;
  const OracleQuery<T> query(args, number);
  float *weight = products[warp][0], *dscore = products[warp][1];
  query.multiply(args.q, query.k, weight);
  query.multiply(args.g, query.v, dscore);
  float sum = 0.0f;
  for (int slot = lane; slot < query.count; slot += 32) {
    weight[slot] = expf(weight[slot] * args.scale - args.lse[number]);
    dscore[slot] *= query.kept_slot(args, slot);
    sum += weight[slot] * dscore[slot];
  }
  sum = warp_sum(sum);
  for (int slot = lane; slot < args.plan.topk; slot += 32) {
    const bool there = slot < query.count;
    if (there) dscore[slot] = args.scale * weight[slot] * (dscore[slot] - sum);
    if (!args.scratch.entries) continue;
    const std::int64_t at = number * args.plan.topk + slot;
    const int key = there ? query.key_span.begin + query.top[slot] : -1;
    if (there)
      args.scratch.entries[at] = {weight[slot] * query.kept_slot(args, slot), dscore[slot], key};
    args.scratch.tiles[at] = there ? key >> kKeyBits : -1;
  }
  __syncwarp();
  if (args.dq.data) query.add_up(query.k, dscore, args.dq);
}

// A warp per key; y = key head, z = batch entry.
template <class T>
__global__ void __launch_bounds__(kThreads)
    oracle_key_backward_kernel(const __grid_constant__ OracleArgs<T> args) {
  using Query = OracleQuery<T>;
  const int lane = threadIdx.x % 32, key_head = blockIdx.y, batch = blockIdx.z;
  const int key = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (key >= args.S) return;
  float dk[Query::kColumns] = {}, dv[Query::kColumns] = {};
  for (int head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
    const std::int64_t problem = static_cast<std::int64_t>(batch) * args.H + head,
                       base = problem * args.N * args.plan.topk;
    const std::int32_t* offset =
        args.scratch.offsets + problem * (args.plan.key_tiles + 1) + (key >> kKeyBits);
    const Rows<const T> q = args.q.rows(batch, head, 0), g = args.g.rows(batch, head, 0);
    for (int first = offset[0]; first < offset[1]; first += 32) {
      const bool there = first + lane < offset[1];
      const int number = there ? args.scratch.order[base + first + lane] : 0;
      const OracleEntry entry =
          there ? args.scratch.entries[base + number] : OracleEntry{0.0f, 0.0f, -1};
      for (unsigned left = __ballot_sync(~0u, entry.key == key); left; left &= left - 1) {
        const int from = __ffs(static_cast<int>(left)) - 1;
        const float weight = __shfl_sync(~0u, entry.weight, from);
        const float dscore = __shfl_sync(~0u, entry.dscore, from);
        const int row = __shfl_sync(~0u, number, from) / args.plan.topk;
        Query::for_columns(args.q.width, [&](int i, int column) {
          dk[i] = fmaf(dscore, to_float(q.row(row)[column]), dk[i]);
          dv[i] = fmaf(weight, to_float(g.row(row)[column]), dv[i]);
        });
      }
    }
  }
  const auto write = [&](const Tensor4<T>& to, const float(&sum)[Query::kColumns]) {
    if (!to.data) return;
    T* row = to.rows(batch, key_head, key).data;
    Query::for_columns(to.width, [&](int i, int column) { row[column] = from_float<T>(sum[i]); });
  };
  write(args.dk, dk);
  write(args.dv, dv);
}

class OraclePass : public Pass {
 public:
  OraclePass(const OracleTopParams& params, const AttentionCall& call)
      : Pass(call), topk_(std::min(params.topk, call.S)) {}

  std::string refusal() const override {
    const std::string topk = refuse_more_than(kMaxTopKeys, "top keys", topk_);
    if (!topk.empty()) return topk;
    const std::string rows = refuse_more_than(kMaxKeyTiles << kKeyBits, "rows in oracle-top",
                                              std::max(call_.N, call_.S));
    return rows.empty() ? refuse_batches(call_.B) : rows;
  }

  std::int64_t workspace_bytes() const override {
    const OraclePlan plan(call_, topk_);
    Arena arena;
    const OracleScratch scratch(plan, call_, arena);
    sort_entries(plan, scratch, arena, nullptr);
    return arena.used();
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    const OraclePlan plan(call_, topk_);
    Arena arena = take_workspace(workspace);
    const OracleScratch scratch(plan, call_, arena);
    if (ragged(call_.inputs.q_sequences) && saved[0].count() > 0)
      COTERIE_CUDA(cudaMemsetAsync(
          saved[0].data, 0xff, static_cast<std::size_t>(saved[0].count()) * sizeof(std::int32_t),
          stream_of(workspace)));
    if (plan.select_blocks == 0 || topk_ == 0) return;
    dispatch(plan, saved, scratch, [&](auto tag, const auto& args) {
      using T = typename decltype(tag)::type;
      dispatch_head_dim(call_.op, call_.Dk, [&](auto width) {
        constexpr int kDim = decltype(width)::value;
        constexpr std::size_t kBytes =
            OracleSearch<T, kDim>::kTileBytes + kRows * kPitch * sizeof(float);
        launch_kernel("oracle select", {}, oracle_select_kernel<T, kDim>,
                      dim3(static_cast<unsigned>(plan.select_blocks)), kSelectThreads, kBytes,
                      stream_of(workspace), args);
      });
    });
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    const OraclePlan plan(call_, topk_);
    Arena arena = take_workspace(workspace);
    if (query_grid().x == 0) return;
    dispatch(plan, result.saved, {plan, call_, arena}, [&](auto tag, auto& args) {
      using T = typename decltype(tag)::type;
      args.out = tensor4<T>(result.out);
      launch_kernel("oracle attend", {}, oracle_attend_kernel<T>, query_grid(), kThreads, 0,
                    stream_of(workspace), args);
    });
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    const OraclePlan plan(call_, topk_);
    const cudaStream_t stream = stream_of(workspace);
    Arena arena = take_workspace(workspace);
    const OracleScratch scratch(plan, call_, arena);
    const bool keys = gradients.dk.present() || gradients.dv.present();
    dispatch(plan, result.saved, scratch, [&](auto tag, auto& args) {
      using T = typename decltype(tag)::type;
      args.g = tensor4<const T>(grad_out);
      if (gradients.dq.present()) args.dq = tensor4<T>(gradients.dq);
      if (gradients.dk.present()) args.dk = tensor4<T>(gradients.dk);
      if (gradients.dv.present()) args.dv = tensor4<T>(gradients.dv);
      if (!keys) args.scratch.entries = nullptr;
      if (query_grid().x > 0)
        launch_kernel("oracle query backward", {}, oracle_query_backward_kernel<T>, query_grid(),
                      kThreads, 0, stream, args);
      if (!keys || call_.B * call_.S == 0) return;
      sort_entries(plan, scratch, arena, stream);
      const dim3 grid(static_cast<unsigned>((call_.S + kWarps - 1) / kWarps),
                      static_cast<unsigned>(call_.key_heads), static_cast<unsigned>(call_.B));
      launch_kernel("oracle key backward", {}, oracle_key_backward_kernel<T>, grid, kThreads, 0,
                    stream, args);
    });
  }

 private:
  dim3 query_grid() const {
    return {static_cast<unsigned>((call_.B * call_.H * call_.N + kWarps - 1) / kWarps)};
  }
  void sort_entries(const OraclePlan& plan, const OracleScratch& scratch, Arena& arena,
                    cudaStream_t stream) const {
    const int rows = static_cast<int>(call_.N) * plan.topk;
    const SequenceSpans all{nullptr, nullptr, rows};
    group_by_label({static_cast<int>(call_.B), static_cast<int>(call_.H), 1, rows, plan.key_tiles,
                    all, all, 0},
                   {scratch.tiles, scratch.order, scratch.offsets}, arena, stream);
  }
  // Calls body(type, args). `saved`: top_keys, lse.
  template <class Body>
  void dispatch(const OraclePlan& plan, const std::vector<TensorView>& saved,
                const OracleScratch& scratch, const Body& body) const {
    const TensorView& mask = call_.inputs.mask;
    dispatch_element(call_.op, call_.inputs.q.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      OracleArgs<T> args{plan,
                         item_spans(call_.inputs),
                         static_cast<int>(call_.num_items()),
                         static_cast<int>(call_.B),
                         static_cast<int>(call_.H),
                         static_cast<int>(call_.H / call_.key_heads),
                         static_cast<int>(call_.N),
                         static_cast<int>(call_.S),
                         static_cast<float>(call_.scale),
                         call_.causal,
                         static_cast<const std::uint8_t*>(mask.data),
                         {},
                         tensor4<const T>(call_.inputs.q),
                         tensor4<const T>(call_.k),
                         tensor4<const T>(call_.inputs.v),
                         static_cast<std::int32_t*>(saved[0].data),
                         scratch};
      for (int dim = 0; mask.present() && dim < 4; ++dim) args.mask_strides[dim] = mask.stride(dim);
      if (saved.size() > 1) args.lse = static_cast<float*>(saved[1].data);
      args.dropout = call_.dropout;
      body(tag, args);
    });
  }

  const std::int64_t topk_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const OracleTopParams& params, const AttentionCall& call) {
  return std::make_unique<OraclePass>(params, call);
}

}  // namespace coterie::cuda
