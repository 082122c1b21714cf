// SPDX-License-Identifier: MIT
// Decodes position by position. Strict routing keeps a ring of the latest keys of each cluster, so
// time and memory per token do not grow. The logits are those of the parallel pass.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>

#include "coterie/torch/models.h"

using namespace coterie::torch_api;

int main() {
  at::manual_seed(0);
  LanguageModel model(LanguageModelOptions{
      .input = {.vocabulary = 64},
      .transformer = {.dim = 32,
                      .layers = 2,
                      .heads = 4,
                      .attention = {coterie::AttentionSpec::parse(
                          "2*local(window=8)+2*routing(clusters=4,window=8,share_qk=true)")},
                      .causal = true}});
  model->eval();
  const at::NoGradGuard no_grad;
  const std::int64_t B = 2, N = 40;
  const at::Tensor tokens = at::randint(64, {B, N});
  const at::Tensor parallel = model->forward(tokens).out;  // (B, N, vocabulary)

  DecoderCache cache = model->make_cache(B);
  double difference = 0;
  for (std::int64_t n = 0; n < N; ++n) {
    const at::Tensor logits = model->step(tokens.select(1, n), cache);  // (B, vocabulary)
    difference = std::max(difference, (logits - parallel.select(1, n)).abs().max().item<double>());
  }
  std::printf("largest difference of %ld decoded positions from the parallel pass: %.1e\n",
              static_cast<long>(N), difference);

  // Continue greedily from the cache.
  at::Tensor next = parallel.select(1, N - 1).argmax(-1);
  std::printf("greedy continuation of sequence 0:");
  for (int i = 0; i < 8; ++i) {
    std::printf(" %ld", static_cast<long>(next[0].item<std::int64_t>()));
    next = model->step(next, cache).argmax(-1);
  }
  std::printf("\n");
  return difference < 1e-4 ? 0 : 1;
}
