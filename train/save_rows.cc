// SPDX-License-Identifier: MIT
#include "train/save_rows.h"

#include <ATen/core/grad_mode.h>
#include <fmt/core.h>

#include <filesystem>

#include "coterie/error.h"
#include "train/autocast.h"
#include "train/eval_mode.h"
#include "train/evaluate.h"
#include "train/named_tensors.h"

namespace coterie::train {
namespace {

std::vector<torch_api::AttentionRecord> records_of(const torch_api::Model& model,
                                                   const Batch& batch,
                                                   const SaveRowsOptions& options) {
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model);
  const c10::Device device = model->parameters().front().device();
  const AutocastGuard autocast(device, options.bf16);
  std::vector<torch_api::AttentionRecord> records;
  torch_api::PassContext context;
  context.seed = options.seed;
  context.records = &records;
  model->forward(batch.tokens.to(device), context);
  return records;
}

}  // namespace

std::vector<std::string> save_rows(const torch_api::Model& model, const Task& task,
                                   const SaveRowsOptions& options) {
  const std::int64_t available = task.batches(Split::valid, 1);
  if (options.rows < 1 || options.rows > available) {
    throw Error(
        fmt::format("[rows] expected 1 to {} rows, the sequences of the validation data; "
                    "got {}",
                    available, options.rows));
  }
  const Batch batch = task.batch(Split::valid, 0, options.rows);
  if (batch.lengths.defined()) {
    throw Error(
        fmt::format("[rows] expected sequences of equal length; the last of the {} rows is "
                    "shorter: save fewer",
                    options.rows));
  }
  std::error_code error;
  std::filesystem::create_directories(options.folder, error);
  if (error) throw Error("[rows] cannot create " + options.folder + ": " + error.message());
  std::vector<std::string> paths;
  for (const torch_api::AttentionRecord& record : records_of(model, batch, options)) {
    NamedTensors tensors = {{"q", record.q}, {"v", record.v}};
    if (record.k.defined()) tensors["k"] = record.k;
    paths.push_back(fmt::format("{}/layer-{:02}-group-{}.safetensors", options.folder, record.layer,
                                record.group));
    write_safetensors(paths.back(), to_safetensors(tensors));
  }
  return paths;
}

}  // namespace coterie::train
