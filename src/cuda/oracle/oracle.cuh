// SPDX-License-Identifier: MIT
// One query of oracle-top attention in a warp: its top keys' rows in 16-byte chunks, several keys
// at a time.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cuda/prim/row_lanes.cuh"
#include "cuda/prim/tensor.cuh"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {

// Keys whose rows a group of lanes has on their way at a time.
constexpr int kOracleBatch = 4;

template <class T>
struct OracleQueries {
  ItemSpans spans;
  Tensor4<const T> q, k, v;
  const std::int32_t* top_keys;  // (B, H, N, topk)
  int items, B, H, group, N, topk;
  float scale;
};

// Query `number` of (B, H, N), rows of up to kWidth elements.
template <class T, int kWidth>
struct OracleQuery {
  using Lanes = RowLanes<T, kWidth>;
  using Values = typename Lanes::Values;
  static constexpr int kGroups = 32 / Lanes::kLanes;  // keys at a time
  int batch, head, row, count;                        // count: of its top keys, 0 in the padding
  ItemSpan key_span;
  const std::int32_t* top;
  Rows<const T> k, v;

  __device__ OracleQuery(const OracleQueries<T>& args, std::int64_t number) : count(0) {
    row = static_cast<int>(number % args.N);
    head = static_cast<int>(number / args.N % args.H);
    batch = static_cast<int>(number / args.N / args.H);
    top = args.top_keys + number * args.topk;
    const int item = args.spans.q.item_of(batch, row, args.items);
    if (item < 0) return;
    const int lane = threadIdx.x % 32;
    for (int slot = lane; slot - lane < args.topk; slot += 32)
      count += __popc(__ballot_sync(~0u, slot < args.topk && top[slot] >= 0));
    key_span = args.spans.k.span(item);
    k = args.k.rows(key_span.batch, head / args.group, key_span.begin);
    v = args.v.rows(key_span.batch, head / args.group, key_span.begin);
  }

  // This lane's part of the query's row of a (B, H, N, width) tensor.
  __device__ void load(const Tensor4<const T>& tensor, Values& x) const {
    Lanes::load(tensor.rows(batch, head, 0), row, true, x);
  }
  // To that row, by the first group of lanes.
  __device__ void store(const Tensor4<T>& tensor, const Values& x) const {
    if (threadIdx.x % 32 < Lanes::kLanes) Lanes::store(tensor.rows(batch, head, 0), row, x);
  }

  // Calls visit(slot, x) with this lane's part of the row of the slot's key, slots in turn over the
  // groups of lanes; zeros beyond the last.
  template <class Visit>
  __device__ void for_keys(const Rows<const T>& rows, const Visit& visit) const {
    const int group = threadIdx.x % 32 / Lanes::kLanes;
    for (int first = group; first - group < count; first += kOracleBatch * kGroups) {
      Values x[kOracleBatch];
#pragma unroll
      for (int b = 0; b < kOracleBatch; ++b) {
        const int slot = first + b * kGroups;
        Lanes::load(rows, slot < count ? top[slot] : 0, slot < count, x[b]);
      }
#pragma unroll
      for (int b = 0; b < kOracleBatch; ++b) visit(first + b * kGroups, x[b]);
    }
  }
  // products[slot] = x . row of the slot's key, for all slots.
  __device__ void multiply(const Rows<const T>& rows, const Values& x, float* products) const {
    for_keys(rows, [&](int slot, const Values& key) {
      const float product = Lanes::dot(x, key);
      if (threadIdx.x % Lanes::kLanes == 0 && slot < count) products[slot] = product;
    });
    __syncwarp();
  }
  // Sum of factors[slot] times the rows of the keys, in every group of lanes.
  __device__ void add_up(const Rows<const T>& rows, const float* factors, Values& sum) const {
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i) sum[i] = 0.0f;
    for_keys(rows, [&](int slot, const Values& key) {
      const float factor = slot < count ? factors[slot] : 0.0f;
#pragma unroll
      for (int i = 0; i < Lanes::kVector; ++i) sum[i] = fmaf(factor, key[i], sum[i]);
    });
#pragma unroll
    for (int i = 0; i < Lanes::kVector; ++i)
#pragma unroll
      for (int step = Lanes::kLanes; step < 32; step *= 2)
        sum[i] += __shfl_xor_sync(~0u, sum[i], step);
  }
};

template <class T>
OracleQueries<T> oracle_queries(const AttentionCall& call, const TensorView& top_keys) {
  OracleQueries<T> args;
  args.spans = item_spans(call.inputs);
  args.q = tensor4<const T>(call.inputs.q);
  args.k = tensor4<const T>(call.k);
  args.v = tensor4<const T>(call.inputs.v);
  args.top_keys = static_cast<const std::int32_t*>(top_keys.data);
  args.items = static_cast<int>(call.num_items());
  args.B = static_cast<int>(call.B);
  args.H = static_cast<int>(call.H);
  args.group = static_cast<int>(call.H / call.key_heads);
  args.N = static_cast<int>(call.N);
  args.topk = static_cast<int>(top_keys.size(3));
  args.scale = static_cast<float>(call.scale);
  return args;
}

}  // namespace coterie::cuda
