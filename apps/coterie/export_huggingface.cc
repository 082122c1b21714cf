// SPDX-License-Identifier: MIT
#include <fmt/core.h>

#include "apps/coterie/export.h"
#include "apps/coterie/loaded_model.h"
#include "train/huggingface.h"

namespace coterie::cli {

const bool kExportsHuggingFace = true;

void export_huggingface(const std::string& run, const std::string& attention,
                        const std::string& out) {
  ModelOptions options;
  options.checkpoint = run;
  options.device = "cpu";
  const LoadedModel loaded = load_model(options, UsesData::no);
  if (!attention.empty()) {
    loaded.model->transformer()->set_attention({AttentionSpec::parse(attention)});
  }
  train::write_huggingface(out, loaded.model, *loaded.task, loaded.config.length);
  fmt::print("{}: {} after {} steps as GPTNeoXForCausalLM{}\n", out, loaded.checkpoint, loaded.step,
             loaded.task->tokenizer_text().empty() ? ", without a tokenizer" : "");
}

}  // namespace coterie::cli
