// SPDX-License-Identifier: MIT
// Trains a tiny byte-level language model in C++: half of its heads are local, half routed.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <string>
#include <vector>

#include "coterie/torch/models.h"

using namespace coterie::torch_api;

// Windows of the text, at positions that depend only on the step: tokens (B, N + 1).
at::Tensor batch_at(const at::Tensor& text, std::int64_t step, std::int64_t B, std::int64_t N) {
  std::vector<at::Tensor> rows;
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t first = (step * B + b) * 37 % (text.size(0) - N - 1);
    rows.push_back(text.narrow(0, first, N + 1));
  }
  return at::stack(rows);
}

int main() {
  at::manual_seed(0);
  std::string text;
  for (int i = 0; i < 400; ++i) text += "token " + std::to_string(i * i % 97) + " attends; ";
  const at::Tensor bytes =
      at::tensor(std::vector<std::int64_t>(text.begin(), text.end()), at::kLong);

  LanguageModel model(LanguageModelOptions{
      .input = {.vocabulary = 256},
      .transformer = {.dim = 32,
                      .layers = 2,
                      .heads = 4,
                      .attention = {coterie::AttentionSpec::parse(
                          "2*local(window=16)+2*routing(clusters=4,window=16,share_qk=true)")},
                      .causal = true}});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(5e-3));
  double first = 0, last = 0;
  for (std::int64_t step = 0; step < 60; ++step) {
    const at::Tensor tokens = batch_at(bytes, step, /*B=*/8, /*N=*/64);
    std::vector<AttentionRecord> records;
    const PassOutput pass = model->forward(
        tokens.narrow(1, 0, 64), {.seed = static_cast<std::uint64_t>(step), .records = &records});
    const at::Tensor bits = bits_per_value(pass.out, tokens.narrow(1, 1, 64));
    optimizer.zero_grad();
    (bits + pass.commitment).backward();
    optimizer.step();
    model->transformer()->update_centroids(records);
    last = bits.item<double>();
    if (step == 0) first = last;
    if (step % 20 == 0)
      std::printf("step %2ld: %.2f bits per byte\n", static_cast<long>(step), last);
  }
  std::printf("%.2f -> %.2f bits per byte\n", first, last);
  return last < 0.5 * first ? 0 : 1;
}
