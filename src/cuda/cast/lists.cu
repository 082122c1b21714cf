// SPDX-License-Identifier: MIT
// CAST as attention over lists (lists/lists.h), for calls that *_sm90a.cu does not support: f32,
// laplace, unaligned rows, clusters that are too many or too large, other devices.
//
// Attention inside clusters: lists of members. The mix: tokens i over all clusters c,
//   alpha_ic = softmax_c or laplace(scale psi(phi_i) q_i . S_c),   out_i = sum_c alpha_ic R_c,
// with surrogates S as keys, summaries R as values and psi as a factor of the query (its row
// statistics). Empty clusters are masked. Tokens are split into runs with the same keys, one list
// each, so that gradients of few clusters keep the device busy; cast_totals adds them up.
// Membership adds one row per slot, which sum_slots (lists/slot_sum.h) adds to tokens:
//   forward: alpha (inner output - R);  dq: a factor times S;  dk: likewise;  dv: beta times dR.
//
// Kernels here: a thread per element, or a row per group of lanes, 16 bytes per lane (CastLanes);
// no shared memory. Sums over heads run in ascending order.
#include <algorithm>

#include "cuda/cast/cast.cuh"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/lists/slot_sum.h"
#include "cuda/prim/dependent.cuh"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per element of `to` (B, heads, rows, D): the sum over `added` heads, each head of
// `from` being repeated `repeated` times.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cast_heads_kernel(Tensor4<const T> from, Tensor4<T> to, int heads, int rows, int added,
                      int repeated, std::int64_t count) {
  await_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int d = static_cast<int>(i % to.width), row = static_cast<int>(i / to.width % rows);
  const int head = static_cast<int>(i / to.width / rows % heads);
  const int batch = static_cast<int>(i / to.width / rows / heads);
  float sum = 0.0f;
  for (int h = head * added; h < (head + 1) * added; ++h)
    sum += to_float(from.rows(batch, h / repeated, row).data[d]);
  to.rows(batch, head, row).data[d] = from_float<T>(sum);
}

// Inputs of the mix's lists.
template <class T>
struct MixTables {
  CastShape shape;
  int runs, chunk;
  bool packed;  // (1, H, items C) rows of clusters, else (items, H, C)
  const float *summary, *summary_lse;
  T *surrogates, *summaries;
  std::uint8_t* present;   // one per row of clusters
  RowStatistics* factors;  // (B, H, N)
  std::int32_t* tokens;    // (B, N): their indices in the item
  std::int32_t* offsets;   // (items, runs + 1): where runs begin
  std::int32_t* clusters;  // (items, runs, C): all of them
  std::int32_t* firsts;    // (items + 1): where the clusters of an item begin, if packed
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    mix_tables_kernel(const __grid_constant__ MixTables<T> to) {
  await_previous();
  const CastShape& shape = to.shape;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row = i / shape.D, table = static_cast<std::int64_t>(shape.H) * shape.clusters;
  if (row < shape.items * table) {
    const std::int64_t item = row / table, head = row % table / shape.clusters;
    const std::int64_t place =
        to.packed ? (head * shape.items + item) * shape.clusters + row % shape.clusters : row;
    const std::int64_t element = place * shape.D + i % shape.D;
    to.surrogates[element] = from_float<T>(shape.surrogates[row % table * shape.D + i % shape.D]);
    to.summaries[element] = from_float<T>(to.summary[i]);
    to.present[place] = !to.summary_lse || to.summary_lse[row] > -INFINITY;
  }
  if (i < static_cast<std::int64_t>(shape.B) * shape.H * shape.N)
    to.factors[i] = {0.0f,
                     gate_factor(shape, shape.gate[i / shape.N / shape.H * shape.N + i % shape.N])};
  if (i < static_cast<std::int64_t>(shape.B) * shape.N) {
    const int token = static_cast<int>(i % shape.N);
    const int item = shape.tokens.item_of(static_cast<int>(i / shape.N), token, shape.items);
    to.tokens[i] = item < 0 ? -1 : token - shape.tokens.span(item).begin;
  }
  if (i < static_cast<std::int64_t>(shape.items) * (to.runs + 1))
    to.offsets[i] = min(static_cast<int>(i % (to.runs + 1)) * to.chunk,
                        shape.tokens.span(static_cast<int>(i / (to.runs + 1))).length);
  if (i < static_cast<std::int64_t>(shape.items) * to.runs * shape.clusters)
    to.clusters[i] = static_cast<std::int32_t>(i % shape.clusters);
  if (i <= shape.items) to.firsts[i] = static_cast<std::int32_t>(i) * shape.clusters;
}

// Slot `number` of (items, heads, C, w); `there`: it has a member.
struct CastSlot {
  int item, head, cluster, token;
  bool there;
  ItemSpan span;

  __device__ CastSlot(const CastShape& shape, int heads, std::int64_t number) {
    const std::int64_t list = number / shape.width;
    cluster = static_cast<int>(list % shape.clusters);
    head = static_cast<int>(list / shape.clusters % heads);
    item = static_cast<int>(list / shape.clusters / heads);
    there = item < shape.items;
    if (!there) return;
    const int query_head = head * (shape.H / heads);
    token = shape.list(item, query_head, cluster)[number % shape.width];
    there = token >= 0;
    span = shape.tokens.span(item);
  }
};

// inner = alpha (inner - summary), for every slot of (items, H, C, w), by groups of lanes. Weights
// use rounded surrogates.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    mix_slots_kernel(const __grid_constant__ CastShape shape,
                     const __grid_constant__ CastSaved saved, Tensor4<const T> q, T* inner) {
  await_previous();
  const CastLanes<T, kDim> lanes;
  const std::int64_t number = lanes.row_of_grid();
  const CastSlot slot(shape, shape.H, number);
  if (!slot.there) return;
  const std::int64_t row = shape.row(slot.span, slot.head) + slot.token;
  const float factor = shape.scale * gate_factor(shape, shape.gates(slot.span)[slot.token]);
  auto surrogate = lanes.load_floats(
      shape.surrogates + shape.cluster(0, slot.head, slot.cluster) * shape.D, shape.D);
  auto summary = lanes.load_floats(
      saved.summary + shape.cluster(slot.item, slot.head, slot.cluster) * shape.D, shape.D);
  surrogate.round();
  summary.round();
  const float product = lanes.dot(
      lanes.load(q.rows(slot.span.batch, slot.head, slot.span.begin), slot.token), surrogate);
  const float weight =
      cast_weight(shape, product * factor, shape.laplace ? 0.0f : saved.combine_lse[row]);
  auto sum = lanes.load(dense_rows(const_cast<const T*>(inner), shape.D), number);
  lanes.add(sum, -1.0f, summary);
  sum.scale(weight);
  lanes.store(dense_rows(inner, shape.D), number, sum);
}

// dq = psi mix_dq and dgate_rows = q . mix_dq / scale; zeros in padding. A row of (B, H, N) per
// group of lanes.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    mix_rows_kernel(const __grid_constant__ CastShape shape,
                    const __grid_constant__ CastBackward pass, Tensor4<const T> q, Tensor4<T> dq) {
  await_previous();
  const CastLanes<T, kDim> lanes;
  const std::int64_t number = lanes.row_of_grid();
  const int row = static_cast<int>(number % shape.N);
  const int head = static_cast<int>(number / shape.N % shape.H);
  const int batch = static_cast<int>(number / shape.N / shape.H);
  if (batch >= shape.B) return;
  typename CastLanes<T, kDim>::Floats sum{};
  if (shape.tokens.item_of(batch, row, shape.items) >= 0) {
    sum = lanes.load_floats(pass.mix_dq + number * shape.D, shape.D);
    const float dot = lanes.dot(sum, lanes.load(q.rows(batch, head, 0), row));
    if (lanes.first()) pass.dgate_rows[number] = dot / shape.scale;
    sum.scale(pass.gates[static_cast<std::int64_t>(batch) * shape.N + row].x);
  }
  if (dq.data) lanes.store(dq.rows(batch, head, 0), row, sum);
}

// What is added to the gradient of a slot besides the attention inside its cluster: for each of its
// query heads a factor times a row of the cluster.
template <class T>
struct SlotTerms {
  T* rows;  // (items, heads, C, w, D), or null
  const float *factors, *clusters;
  int heads;
  bool per_item;  // clusters are per item
};
template <class T>
struct SlotTermSet {
  CastShape shape;
  SlotTerms<T> terms[3];
};

// A slot per group of lanes; y: which gradient.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads)
    complete_slots_kernel(const __grid_constant__ SlotTermSet<T> set) {
  await_previous();
  const CastShape& shape = set.shape;
  const SlotTerms<T>& terms = set.terms[blockIdx.y];
  if (!terms.rows) return;
  const CastLanes<T, kDim> lanes;
  const std::int64_t number = lanes.row_of_grid();
  const CastSlot slot(shape, terms.heads, number);
  if (!slot.there) return;
  auto sum = lanes.load(dense_rows(const_cast<const T*>(terms.rows), shape.D), number);
  const int group = shape.H / terms.heads;
  for (int head = slot.head * group; head < (slot.head + 1) * group; ++head) {
    const std::int64_t cluster = shape.cluster(slot.item, head, slot.cluster);
    const float* row = terms.clusters +
                       (terms.per_item ? cluster : shape.cluster(0, head, slot.cluster)) * shape.D;
    lanes.add(sum, terms.factors[cluster * shape.width + number % shape.width],
              lanes.load_floats(row, shape.D));
  }
  lanes.store(dense_rows(terms.rows, shape.D), number, sum);
}

// Calls body(type, width, blocks for `rows` rows by groups of lanes).
template <class Body>
void dispatch_rows(const AttentionCall& call, std::int64_t rows, const Body& body) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      using Lanes = CastLanes<typename decltype(tag)::type, decltype(width)::value>;
      if (rows > 0) body(tag, width, blocks_of(rows * Lanes::kLanes, kThreads));
    });
  });
}

}  // namespace

TensorView cast_take_rows(const AttentionCall& call, Arena& arena, std::int64_t batches,
                          std::int64_t rows) {
  const DType dtype = call.inputs.q.dtype;
  const std::int64_t count = batches * call.H * rows * call.Dk;
  void* data = dtype == DType::f32 ? static_cast<void*>(arena.take<float>(count))
                                   : static_cast<void*>(arena.take<std::uint16_t>(count));
  return TensorView::contiguous(data, dtype, {batches, call.H, rows, call.Dk}, Device::cuda);
}

void cast_map_heads(const AttentionCall& call, const TensorView& from, const TensorView& to,
                    cudaStream_t stream) {
  if (to.count() == 0) return;
  const std::int64_t added = std::max(from.size(1) / to.size(1), std::int64_t{1});
  dispatch_element(call.op, to.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_early("cast heads", cast_heads_kernel<T>, dim3(blocks_of(to.count(), kThreads)),
                 kThreads, 0, stream, tensor4<const T>(from), tensor4<T>(to),
                 static_cast<int>(to.size(1)), static_cast<int>(to.size(2)),
                 static_cast<int>(added), static_cast<int>(added * to.size(1) / from.size(1)),
                 to.count());
  });
}

TokenSlots cast_token_slots(const CastShape& shape, const AttentionCall& call, Arena& arena,
                            cudaStream_t stream) {
  const TokenSlots slots = make_token_slots(
      arena, call.inputs.q_sequences, call.B, call.N, shape.list_heads, shape.members,
      static_cast<std::int64_t>(shape.clusters) * shape.width, 0, shape.clusters);
  find_token_slots(slots, arena, stream);
  return slots;
}

CastLists cast_inner_lists(const CastShape& shape, const AttentionCall& call, Arena& arena,
                           cudaStream_t stream) {
  CastLists inner{call, {}};
  inner.call.inputs.k_sequences = call.inputs.q_sequences;
  if (shape.list_heads > 1 && shape.group > 1) {
    inner.call.k = inner.call.inputs.k = cast_take_rows(call, arena, call.B, call.S);
    inner.call.inputs.v = cast_take_rows(call, arena, call.B, call.S);
    inner.call.key_heads = inner.call.value_heads = call.H;
    if (!arena.counting()) {
      cast_map_heads(call, call.k, inner.call.k, stream);
      cast_map_heads(call, call.inputs.v, inner.call.inputs.v, stream);
    }
  }
  ListSide side;
  side.layout = ListLayout::members;
  side.index = shape.members;
  side.index_heads = shape.list_heads;
  side.width = shape.width;
  inner.plan.lists = shape.clusters;
  inner.plan.queries = inner.plan.keys = side;
  inner.plan.weighting = shape.laplace ? ListWeighting::laplace : ListWeighting::softmax;
  inner.plan.scale = shape.scale;
  return inner;
}

CastLists cast_mix_lists(const CastShape& shape, const CastPlan& plan, const AttentionCall& call,
                         const CastSaved& saved, Arena& arena, cudaStream_t stream) {
  CastLists mix{call, {}};
  mix.call.dropout = {};  // weights of clusters are not dropped
  const bool packed = call.inputs.q_sequences.cu_seqlens.present();
  const std::int64_t items = shape.items, clusters = shape.clusters;
  const std::int64_t batches = packed ? 1 : items, rows = packed ? items * clusters : clusters;
  mix.call.S = rows;
  mix.call.key_heads = mix.call.value_heads = call.H;
  mix.call.k = mix.call.inputs.k = cast_take_rows(call, arena, batches, rows);
  mix.call.inputs.v = cast_take_rows(call, arena, batches, rows);
  auto* present = arena.take<std::uint8_t>(batches * call.H * rows);
  auto* factors = arena.take<RowStatistics>(call.B * call.H * call.N);
  auto* tokens = arena.take<std::int32_t>(call.B * call.N);
  auto* offsets = arena.take<std::int32_t>(items * (plan.mix_runs + 1));
  auto* indices = arena.take<std::int32_t>(items * plan.mix_runs * clusters);
  auto* firsts = arena.take<std::int32_t>(items + 1);
  mix.call.inputs.k_sequences = {};
  if (packed)
    mix.call.inputs.k_sequences.cu_seqlens =
        TensorView::contiguous(firsts, DType::i32, {items + 1}, Device::cuda);
  mix.plan.lists = plan.mix_runs;
  mix.plan.queries.layout = ListLayout::runs;
  mix.plan.queries.index = tokens;
  mix.plan.queries.offsets = offsets;
  mix.plan.keys.layout = ListLayout::members;
  mix.plan.keys.index = indices;
  mix.plan.keys.width = clusters;
  mix.plan.weighting = shape.laplace ? ListWeighting::laplace : ListWeighting::softmax;
  mix.plan.scale = shape.scale;
  mix.plan.q_stats = factors;
  if (!shape.laplace) {  // else the summaries of empty clusters are 0
    TensorView& mask = mix.plan.filters.mask;
    mask = TensorView::contiguous(present, DType::u8, {batches, call.H, 1, rows}, Device::cuda);
    mask.strides[2] = 0;
  }
  if (arena.counting() || items == 0) return mix;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MixTables<T> tables{shape,
                              plan.mix_runs,
                              plan.mix_chunk,
                              packed,
                              saved.summary,
                              saved.summary_lse,
                              static_cast<T*>(mix.call.k.data),
                              static_cast<T*>(mix.call.inputs.v.data),
                              present,
                              factors,
                              tokens,
                              offsets,
                              indices,
                              firsts};
    const std::int64_t most =
        std::max({items * call.H * clusters * call.Dk, call.B * call.H * call.N,
                  items * (plan.mix_runs + 1), items * plan.mix_runs * clusters});
    launch_early("cast mix tables", mix_tables_kernel<T>, dim3(blocks_of(most, kThreads)), kThreads,
                 0, stream, tables);
  });
  return mix;
}

void cast_mix(const CastShape& shape, const AttentionCall& call, const CastLists& mix,
              const CastForward& pass, cudaStream_t stream) {
  ListOutputs outputs;
  outputs.out = pass.out;
  outputs.lse = pass.saved.combine_lse;
  lists_forward(mix.call, mix.plan, outputs, stream);
  dispatch_rows(call, shape.slots(), [&](auto tag, auto width, unsigned blocks) {
    using T = typename decltype(tag)::type;
    launch_early("cast mix slots", mix_slots_kernel<T, decltype(width)::value>, dim3(blocks),
                 kThreads, 0, stream, shape, pass.saved, tensor4<const T>(call.inputs.q),
                 static_cast<T*>(pass.inner));
  });
  SlotSum sum{pass.slots, pass.inner, call.H, pass.out, true};
  sum_slots(call, {sum}, SlotSumStart::behind, stream);
}

void cast_mix_rows(const CastShape& shape, const AttentionCall& call, const CastBackward& pass,
                   cudaStream_t stream) {
  dispatch_rows(call, call.B * call.H * call.N, [&](auto tag, auto width, unsigned blocks) {
    using T = typename decltype(tag)::type;
    Tensor4<T> dq{};
    if (pass.gradients.dq.present()) dq = tensor4<T>(pass.gradients.dq);
    launch_early("cast mix rows", mix_rows_kernel<T, decltype(width)::value>, dim3(blocks),
                 kThreads, 0, stream, shape, pass, tensor4<const T>(call.inputs.q), dq);
  });
}

void cast_complete_slots(const CastShape& shape, const AttentionCall& call,
                         const CastBackward& pass, cudaStream_t stream) {
  dispatch_rows(call, shape.slots(), [&](auto tag, auto width, unsigned blocks) {
    using T = typename decltype(tag)::type;
    const auto rows = [](void* slots, const TensorView& to) {
      return to.present() ? static_cast<T*>(slots) : nullptr;
    };
    const AttentionGradients& to = pass.gradients;
    const int heads = pass.plan.key_slot_heads;
    const SlotTermSet<T> set{
        shape,
        {{rows(pass.dq_slots, to.dq), pass.query_factors, shape.surrogates, shape.H, false},
         {rows(pass.dk_slots, to.dk), pass.key_factors, shape.surrogates, heads, false},
         {rows(pass.dv_slots, to.dv), pass.summary_weights, pass.dsummary, heads, true}}};
    launch_early("cast slots", complete_slots_kernel<T, decltype(width)::value>, dim3(blocks, 3),
                 kThreads, 0, stream, set);
  });
}

}  // namespace coterie::cuda
