// SPDX-License-Identifier: MIT
// Oracle-top attention: out_i = sum of p_ij v_j over the top keys of query i, p the softmax of
// their scores. A warp per query.
#include <algorithm>

#include "cuda/api/pass.h"
#include "cuda/api/refusal.h"
#include "cuda/launch/dispatch.h"
#include "cuda/launch/launch.h"
#include "cuda/oracle/oracle.cuh"
#include "cuda/oracle/oracle.h"
#include "cuda/prim/warp.cuh"

namespace coterie::cuda {
namespace {

constexpr int kWarps = 4;

template <class T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    oracle_attend_kernel(const __grid_constant__ OracleQueries<T> args, Tensor4<T> out,
                         float* lse) {
  __shared__ float weights[kWarps][kMaxTopKeys];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t number = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (number >= static_cast<std::int64_t>(args.B) * args.H * args.N) return;
  using Query = OracleQuery<T, kWidth>;
  const Query query(args, number);
  float* p = weights[warp];
  typename Query::Values x = {};
  float largest = -INFINITY, total = 0.0f;
  if (query.count > 0) {
    query.load(args.q, x);
    query.multiply(query.k, x, p);
    for (int slot = lane; slot < query.count; slot += 32)
      largest = fmaxf(largest, p[slot] * args.scale);
    largest = warp_max(largest);
    for (int slot = lane; slot < query.count; slot += 32) {
      p[slot] = expf(__fmul_rn(p[slot], args.scale) - largest);
      total += p[slot];
    }
    total = warp_sum(total);
    __syncwarp();
    query.add_up(query.v, p, x);
#pragma unroll
    for (int i = 0; i < Query::Lanes::kVector; ++i) x[i] /= total;
  }
  query.store(out, x);
  if (lane == 0) lse[number] = query.count > 0 ? largest + logf(total) : -INFINITY;
}

// `tensors`: top_keys, lse.
void oracle_forward(const AttentionCall& call, const std::vector<TensorView>& tensors,
                    const TensorView& out, cudaStream_t stream) {
  const std::int64_t queries = call.B * call.H * call.N;
  if (queries == 0) return;
  dispatch_element(call.op, call.inputs.q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const OracleQueries<T> args = oracle_queries<T>(call, tensors[0]);
    dispatch_head_dim(call.op, call.Dk, [&](auto width) {
      oracle_attend_kernel<T, decltype(width)::value>
          <<<static_cast<unsigned>((queries + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(
              args, tensor4<T>(out), static_cast<float*>(tensors[1].data));
      COTERIE_LAUNCH("oracle_attend");
    });
  });
}

class OraclePass : public Pass {
 public:
  OraclePass(const OracleTopParams& params, const AttentionCall& call)
      : Pass(call), topk_(std::min(params.topk, call.S)) {}

  std::string refusal() const override {
    const std::string topk = refuse_more_than(kMaxTopKeys, "top keys", topk_);
    if (!topk.empty()) return topk;
    const std::int64_t most = kMaxOracleTiles << kOracleTileBits;
    if (call_.S > most || call_.N > most)
      return "the CUDA kernels of oracle-top take at most " + std::to_string(most) + " rows; got " +
             std::to_string(std::max(call_.N, call_.S));
    return refuse_batches(call_.B);
  }

  std::int64_t workspace_bytes() const override {
    Arena select, backward;
    oracle_select(call_, topk_, {}, select, nullptr);
    oracle_backward(call_, topk_, {}, backward, nullptr);
    return std::max(select.used(), backward.used());
  }

  void select(const std::vector<TensorView>& saved, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    oracle_select(call_, topk_, saved[0], arena, stream_of(workspace));
  }

  void attend(const AttentionResult& result, const Workspace& workspace) const override {
    oracle_forward(call_, result.saved, result.out, stream_of(workspace));
  }

  void backward(const AttentionResult& result, const TensorView& grad_out,
                const AttentionGradients& gradients, const Workspace& workspace) const override {
    Arena arena = take_workspace(workspace);
    oracle_backward(call_, topk_, {result.saved[0], result.saved[1], grad_out, gradients}, arena,
                    stream_of(workspace));
  }

 private:
  const std::int64_t topk_;
};

}  // namespace

std::unique_ptr<Pass> make_pass(const OracleTopParams& params, const AttentionCall& call) {
  return std::make_unique<OraclePass>(params, call);
}

}  // namespace coterie::cuda
