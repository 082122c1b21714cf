// SPDX-License-Identifier: MIT
// Attention on torch tensors in C++: the function, then a layer with two kinds of heads.
#include <ATen/ATen.h>

#include <cstdio>
#include <vector>

#include "coterie/torch/attention.h"
#include "coterie/torch/functional.h"

using namespace coterie::torch_api;

int main() {
  at::manual_seed(0);

  // The function: (batch, heads, tokens, head_dim) and a spec. Gradients flow as usual.
  const auto rows = [] { return at::randn({1, 8, 512, 32}); };
  const at::Tensor q = rows().requires_grad_(), k = rows(), v = rows();
  const at::Tensor out = attention(q, k, v, "4*local(window=64)+4*i-clustered(clusters=32)");
  out.sum().backward();
  std::printf("output norm %.2f, gradient norm %.2f\n", out.norm().item<double>(),
              q.grad().norm().item<double>());

  // A layer: projections, rotary positions for the local heads, learned centroids for the others.
  SelfAttention layer(
      SelfAttentionOptions{.dim = 64,
                           .heads = 4,
                           .spec = coterie::AttentionSpec::parse(
                               "2*local(window=64)+2*routing(clusters=8,window=64,share_qk=true)"),
                           .causal = true});
  const at::Tensor x = at::randn({2, 256, 64});
  std::vector<AttentionRecord> records;
  const PassOutput pass = layer->forward(x, {.seed = 1, .records = &records});
  (pass.out.square().mean() + pass.commitment).backward();
  layer->update_centroids(records);  // centroids are moving averages, without gradients
  std::printf("layer output %ld x %ld x %ld, commitment %.2e\n", static_cast<long>(x.size(0)),
              static_cast<long>(x.size(1)), static_cast<long>(x.size(2)),
              pass.commitment.item<double>());
  return pass.commitment.item<double>() > 0 && q.grad().norm().item<double>() > 0 ? 0 : 1;
}
