// SPDX-License-Identifier: MIT
// Logits of a checkpoint's model, for comparison with the same model in Python: model_logits
// CHECKPOINT SEED ROWS LENGTH reads ROWS x LENGTH tokens, i64, from standard input and writes the
// logits, f32.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <iostream>

#include "train/checkpoint.h"
#include "train/options.h"
#include "train/trainer.h"

int main(int, char** arguments) {
  using namespace coterie;
  const train::Checkpoint checkpoint = train::load_checkpoint(arguments[1]);
  const train::Config config = train::parse_config(checkpoint.config, arguments[1]);
  torch_api::Model model = train::make_model(config, *train::make_task(config));
  train::load_module(*model, checkpoint.model, arguments[1]);
  model->eval();
  const at::Tensor tokens =
      at::empty({std::atoll(arguments[3]), std::atoll(arguments[4])}, at::kLong);
  std::cin.read(static_cast<char*>(tokens.data_ptr()),
                static_cast<std::streamsize>(tokens.nbytes()));
  const at::NoGradGuard no_grad;
  torch_api::PassContext context;
  context.seed = std::strtoull(arguments[2], nullptr, 10);
  const at::Tensor logits = model->forward(tokens, context).out.contiguous();
  std::cout.write(static_cast<const char*>(logits.data_ptr()),
                  static_cast<std::streamsize>(logits.nbytes()));
}
