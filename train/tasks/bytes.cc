// SPDX-License-Identifier: MIT
// Byte-level language modelling of any file, folder or archive.
#include <fmt/core.h>

#include "coterie/error.h"
#include "train/bpe.h"
#include "train/tasks/byte_task.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

class BytesTask final : public ByteTask {
 public:
  explicit BytesTask(const Config& config) : ByteTask(config) {}

  std::string name() const override { return "bytes"; }
  std::int64_t vocabulary() const override { return kBytes; }
  Metric metric() const override { return Metric::bits_per_byte; }

  std::vector<std::int64_t> encode(const std::string& text) const override {
    std::vector<std::int64_t> tokens;
    for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
    return tokens;
  }
  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token < 0 || token >= kBytes) {
        throw Error(fmt::format("[bytes] expected tokens from 0 to 255; got {}", token));
      }
      text += static_cast<char>(token);
    }
    return text;
  }

  std::string tokenizer_text() const override { return BpeTokenizer::bytes().text(); }
};

}  // namespace

std::unique_ptr<Task> make_bytes_task(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<BytesTask>(config);
  if (stored == nullptr) task->load();
  return task;
}

}  // namespace coterie::train
