// SPDX-License-Identifier: MIT
// Backward pass of oracle-top attention. With p_ij the weights of query i over its top keys:
//   e_i = sum_j p_ij (g_i . v_j)      ds_ij = scale p_ij (g_i . v_j - e_i)
//   dq_i = sum_j ds_ij k_j            dk_j = sum_i ds_ij q_i            dv_j = sum_i p_ij g_i
// A warp per query computes dq and leaves p, ds and the key of every (query, slot). These entries
// are sorted by tile of keys, stably; a block then owns a tile and adds them up in that order,
// which is that of query heads, queries and slots.
#include "cuda/cluster/group.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/oracle/oracle.cuh"
#include "cuda/oracle/oracle.h"

namespace coterie::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kKeyWarps = 8, kKeyThreads = 32 * kKeyWarps;
constexpr int kTileKeys = 1 << kOracleTileBits;

struct Entry {
  float weight, dscore;
  int key;  // row of its batch entry
};

struct OracleScratch {
  Entry* entries;                         // (B, H, N, topk)
  std::int32_t *tiles, *order, *offsets;  // tile of every entry, -1 for none; their sort
  std::int64_t num_tiles;
};

template <class T>
struct GradientArgs {
  OracleQueries<T> queries;
  Tensor4<const T> g;
  const float* lse;       // (B, H, N)
  Tensor4<T> dq, dk, dv;  // data is null when absent
  OracleScratch scratch;
  int S;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    oracle_query_gradient_kernel(const __grid_constant__ GradientArgs<T> args) {
  __shared__ float products[kWarps][2][kMaxTopKeys];
  const OracleQueries<T>& queries = args.queries;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (number >= static_cast<std::int64_t>(queries.B) * queries.H * queries.N) return;
  const OracleQuery<T, kWidth> query(queries, number);
  typename OracleQuery<T, kWidth>::Values x = {};
  float *score = products[warp][0], *inner = products[warp][1];
  if (query.count > 0) {
    query.load(queries.q, x);
    query.multiply(query.k, x, score);
    query.load(args.g, x);
    query.multiply(query.v, x, inner);
  }
  const float lse = query.count > 0 ? args.lse[number] : 0.0f;
  float sum = 0.0f;
  for (int slot = lane; slot < query.count; slot += 32) {
    score[slot] = expf(score[slot] * queries.scale - lse);
    sum += score[slot] * inner[slot];
  }
  sum = warp_sum(sum);
  const bool keys = args.scratch.entries;
  for (int slot = lane; slot < queries.topk; slot += 32) {
    const std::int64_t at = number * queries.topk + slot;
    const bool there = slot < query.count;
    if (there) inner[slot] = queries.scale * score[slot] * (inner[slot] - sum);
    if (!keys) continue;
    const int key = there ? query.key_span.begin + query.top[slot] : -1;
    if (there) args.scratch.entries[at] = {score[slot], inner[slot], key};
    args.scratch.tiles[at] = there ? key >> kOracleTileBits : -1;
  }
  if (!args.dq.data) return;
  __syncwarp();
  if (query.count > 0) query.add_up(query.k, inner, x);
  query.store(args.dq, x);
}

// The tile of keys that a block owns, one head of one batch entry.
template <class T, int kPitch>
struct KeyTileSums {
  static constexpr int kColumns = kPitch / 32;  // of a lane: lane, lane + 32, ...
  static constexpr int kBatch = 4;              // entries whose rows are on their way at a time
  static constexpr int kStaged = kKeyThreads;
  struct Memory {
    float sums[2][kTileKeys][kPitch];  // dk, dv
    Entry entries[kStaged];
    int rows[kStaged];
  };
  const GradientArgs<T>& args;
  Memory& memory;
  int batch, key_head, first;  // first: row of the tile's first key

  // Adds entries e[0 .. count) of a query head, all of this warp's keys.
  __device__ void add(const Rows<const T>& q, const Rows<const T>& g, const int (&e)[kBatch],
                      int count) const {
    const int lane = threadIdx.x % 32;
    float q_row[kBatch][kColumns] = {}, g_row[kBatch][kColumns] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = lane + 32 * i;
        if (b >= count || column >= q.width) continue;
        q_row[b][i] = to_float(q.row(memory.rows[e[b]])[column]);
        g_row[b][i] = to_float(g.row(memory.rows[e[b]])[column]);
      }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= count) break;
      const Entry entry = memory.entries[e[b]];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        float &dk = memory.sums[0][entry.key][lane + 32 * i],
              &dv = memory.sums[1][entry.key][lane + 32 * i];
        dk = fmaf(entry.dscore, q_row[b][i], dk);
        dv = fmaf(entry.weight, g_row[b][i], dv);
      }
    }
  }

  // The entries of this warp's keys among `count` staged ones, in order.
  __device__ void add_staged(const Rows<const T>& q, const Rows<const T>& g, int count) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int begin = 0; begin < count; begin += 32) {
      const bool mine =
          begin + lane < count && memory.entries[begin + lane].key % kKeyWarps == warp;
      unsigned left = __ballot_sync(~0u, mine);
      while (left) {
        int e[kBatch] = {}, found = 0;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (!left) break;
          e[b] = begin + __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          ++found;
        }
        add(q, g, e, found);
      }
    }
  }

  __device__ void add_head(int head) const {
    const OracleQueries<T>& queries = args.queries;
    const std::int64_t problem = static_cast<std::int64_t>(batch) * queries.H + head,
                       base = problem * queries.N * queries.topk;
    const std::int32_t* offset =
        args.scratch.offsets + problem * (args.scratch.num_tiles + 1) + (first >> kOracleTileBits);
    const int begin = offset[0], end = offset[1];
    const Rows<const T> q = queries.q.rows(batch, head, 0), g = args.g.rows(batch, head, 0);
    for (int from = begin; from < end; from += kStaged) {
      __syncthreads();
      const int at = from + static_cast<int>(threadIdx.x);
      if (at < end) {
        const int number = args.scratch.order[base + at];
        Entry entry = args.scratch.entries[base + number];
        entry.key -= first;
        memory.entries[threadIdx.x] = entry;
        memory.rows[threadIdx.x] = number / queries.topk;
      }
      __syncthreads();
      add_staged(q, g, min(end - from, kStaged));
    }
  }

  __device__ void write(const Tensor4<T>& tensor, const float (&sums)[kTileKeys][kPitch]) const {
    if (!tensor.data) return;
    const Rows<T> rows = tensor.rows(batch, key_head, first);
    const int count = min(kTileKeys, args.S - first);
    for (int i = threadIdx.x; i < count * tensor.width; i += kKeyThreads)
      rows.row(i / tensor.width)[i % tensor.width] =
          from_float<T>(sums[i / tensor.width][i % tensor.width]);
  }
};

template <class T, int kPitch>
__global__ void __launch_bounds__(kKeyThreads)
    oracle_key_gradient_kernel(const __grid_constant__ GradientArgs<T> args) {
  using Sums = KeyTileSums<T, kPitch>;
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& memory = *reinterpret_cast<typename Sums::Memory*>(bytes);
  const Sums tile{args, memory, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y),
                  static_cast<int>(blockIdx.x) << kOracleTileBits};
  float* sums = &memory.sums[0][0][0];
  for (int i = threadIdx.x; i < 2 * kTileKeys * kPitch; i += kKeyThreads) sums[i] = 0.0f;
  const int group = args.queries.group;
  for (int i = 0; i < group; ++i) tile.add_head(tile.key_head * group + i);
  __syncthreads();
  tile.write(args.dk, memory.sums[0]);
  tile.write(args.dv, memory.sums[1]);
}

// Entries as rows of a stable sort, by tile.
ClusterShape entry_shape(const AttentionCall& call, std::int64_t topk, std::int64_t tiles) {
  const int rows = static_cast<int>(call.N * topk);
  return {static_cast<int>(call.B), static_cast<int>(call.H), 1, rows, static_cast<int>(tiles),
          {nullptr, nullptr, rows}, {nullptr, nullptr, rows}, 0};
}

template <class T>
void run_backward(const AttentionCall& call, const OracleBackward& pass,
                  const OracleScratch& scratch, Arena& arena, cudaStream_t stream) {
  const auto gradient = [](const TensorView& view) {
    return view.present() ? tensor4<T>(view) : Tensor4<T>{};
  };
  GradientArgs<T> args;
  args.queries = oracle_queries<T>(call, pass.top_keys);
  args.g = tensor4<const T>(pass.grad_out);
  args.lse = static_cast<const float*>(pass.lse.data);
  args.dq = gradient(pass.gradients.dq);
  args.dk = gradient(pass.gradients.dk);
  args.dv = gradient(pass.gradients.dv);
  args.scratch = scratch;
  args.S = static_cast<int>(call.S);
  const bool keys = args.dk.data || args.dv.data;
  if (!keys) args.scratch.entries = nullptr;
  const std::int64_t queries = call.B * call.H * call.N;
  if (queries > 0)
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      oracle_query_gradient_kernel<T, decltype(width)::value>
          <<<static_cast<unsigned>((queries + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(
              args);
      COTERIE_LAUNCH("oracle_query_gradient");
    });
  if (!keys || call.B * call.S == 0) return;
  group_by_label(entry_shape(call, args.queries.topk, scratch.num_tiles),
                 {scratch.tiles, scratch.order, scratch.offsets}, arena, stream);
  const dim3 grid(static_cast<unsigned>(scratch.num_tiles), static_cast<unsigned>(call.key_heads),
                  static_cast<unsigned>(call.B));
  dispatch_head_dim(call.op, call.Dk, [&](auto width) {
    constexpr int kPitch = decltype(width)::value;
    constexpr std::size_t kBytes = sizeof(typename KeyTileSums<T, kPitch>::Memory);
    allow_shared_memory(oracle_key_gradient_kernel<T, kPitch>, kBytes);
    oracle_key_gradient_kernel<T, kPitch><<<grid, kKeyThreads, kBytes, stream>>>(args);
    COTERIE_LAUNCH("oracle_key_gradient");
  });
}

}  // namespace

void oracle_backward(const AttentionCall& call, std::int64_t topk, const OracleBackward& pass,
                     Arena& arena, cudaStream_t stream) {
  const std::int64_t entries = call.B * call.H * call.N * topk;
  OracleScratch scratch;
  scratch.num_tiles = max((call.S + kTileKeys - 1) / kTileKeys, std::int64_t{1});
  scratch.entries = arena.take<Entry>(entries);
  scratch.tiles = arena.take<std::int32_t>(entries);
  scratch.order = arena.take<std::int32_t>(entries);
  scratch.offsets = arena.take<std::int32_t>(call.B * call.H * (scratch.num_tiles + 1));
  if (arena.counting()) {
    group_by_label(entry_shape(call, topk, scratch.num_tiles), {}, arena, stream);
    return;
  }
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    run_backward<typename decltype(tag)::type>(call, pass, scratch, arena, stream);
  });
}

}  // namespace coterie::cuda
