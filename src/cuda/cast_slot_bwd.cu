// SPDX-License-Identifier: MIT
// What the backward pass of CAST's mix needs of slots: the weights of their clusters, and what
// being a member changes (see cast_mix_bwd.cu). Lanes side by side along a token's row.
#include "cuda/device/await.cuh"
#include "cuda/device/cast_bwd.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

constexpr int kThreads = 256, kTokens = 64;  // of a block

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 4)
    mix_slots_kernel(const __grid_constant__ MixBackwardArgs<T> args) {
  await_previous();
  using Layout = RowLanes<T, kDim>;
  using Floats = typename Layout::Floats;
  const CastShape& shape = args.shape;
  const CastBackward& pass = args.pass;
  const int head = static_cast<int>(blockIdx.y);
  const KeyChunk tile = args.tiles.find(shape.tokens, static_cast<int>(blockIdx.x));
  const Layout lanes;
  const int list_head = shape.list_head(head);
  const std::int32_t* entries =
      pass.slots.slots + pass.slots.start(tile.item, tile.keys, list_head);
  const std::int64_t first_slot = shape.cluster(tile.item, head, 0) * shape.width;
  const Rows<const T> surrogates = args.keys(head), summaries = args.values(tile.item, head);
  const Rows<const T> queries = args.q.rows(tile.keys.batch, head, tile.keys.begin);
  const Rows<const T> gradients = args.grad_out.rows(tile.keys.batch, head, tile.keys.begin);
  const Rows<const T> outputs = args.out.rows(tile.keys.batch, head, tile.keys.begin);
#pragma unroll 1
  for (int token = tile.begin + lanes.group; token < tile.end; token += kThreads / Layout::kLanes) {
    const std::int64_t place = shape.row(tile.keys, head) + token;
    const std::int64_t row = pass.slots.row(tile.keys, list_head, token);
    const int begin = pass.slots.first[row], count = pass.slots.count[row];
    const Floats q = lanes.load(queries, token), g = lanes.load(gradients, token);
    const float guess = shape.laplace ? 0.0f : lanes.dot(g, lanes.load(outputs, token));
    const float lse = shape.laplace ? 0.0f : pass.saved.combine_lse[place];
    const float gate = shape.gates(tile.keys)[token];
    const float factor = shape.scale * gate_factor(shape, gate);
    float sum = 0.0f;
#pragma unroll 2
    for (int e = begin; e < begin + count; ++e) {
      const int entry = entries[e], cluster = entry / shape.width;
      const std::int64_t slot = first_slot + entry;
      const float dot = pass.dots[slot];
      const float product = lanes.dot(q, lanes.load(surrogates, cluster));
      const float dalpha = lanes.dot(g, lanes.load(summaries, cluster));
      const MixWeight weight(shape, product * factor, lse);
      const float excess = weight.slope * (dot - dalpha);
      sum += excess;
      if (!lanes.first()) continue;
      pass.weights[slot] = weight.value;
      pass.weighted[slot] = weight.value * dot;
      pass.excess[slot] = excess;
      if (shape.gate_scale)
        pass.dgate_slots[slot] = shape.scale * gate_sigmoid(gate) * excess * product;
    }
    if (lanes.first()) pass.facts[place] = make_float4(factor * kLog2e, lse * kLog2e, guess, sum);
  }
}

}  // namespace

void cast_slots_backward(const CastShape& shape, const AttentionCall& call,
                         const CastBackward& pass, cudaStream_t stream) {
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const MixBackwardArgs<T> args = mix_args<T>(shape, call, pass, kTokens);
    if (args.tiles.slots == 0) return;
    dispatch_wide_dim(call.op, call.Dk, [&](auto width) {
      launch_early("cast slots", mix_slots_kernel<T, decltype(width)::value>,
                   dim3(static_cast<unsigned>(args.tiles.slots), static_cast<unsigned>(shape.H)),
                   kThreads, 0, stream, args);
    });
  });
}

}  // namespace coterie::cuda
