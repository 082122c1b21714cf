// SPDX-License-Identifier: MIT
// Masked bytes: some positions of a window of text hold a mask symbol instead of their byte. The
// targets are the masked bytes, to be predicted from the text on both sides (not causal). Scores
// are also given by line: drawn tables (lines that begin with | or +) are much easier than prose.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "coterie/error.h"
#include "train/tasks/byte_task.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

enum Purpose : std::uint32_t { kPlaces = 1 };  // 0: the place of a training row (TextTask)
enum Stratum : std::int64_t { kOtherLine, kTableLine };

// Whether the line that contains text[place] begins with | or +, after blanks.
bool is_table_line(const std::string& text, std::size_t place) {
  const std::size_t newline = place == 0 ? std::string::npos : text.rfind('\n', place - 1);
  const std::size_t first = text.find_first_not_of(' ', newline + 1);  // npos + 1 is 0
  return first != std::string::npos && (text[first] == '|' || text[first] == '+');
}

class MaskedTask final : public ByteTask {
 public:
  explicit MaskedTask(const Config& config) : ByteTask(config), share_(config.masked.share) {
    if (!(share_ > 0.0 && share_ <= 1.0)) {
      throw Error(
          fmt::format("[masked] expected masked.share above 0 and at most 1; got {}", share_));
    }
  }

  std::string name() const override { return "masked"; }
  std::int64_t vocabulary() const override { return kBytes + 1; }
  bool causal() const override { return false; }
  Metric metric() const override { return Metric::bits_per_masked_byte; }
  std::vector<std::string> strata() const override { return {"outside tables", "in tables"}; }

 protected:
  std::int64_t held_out_rows(Split split) const override {
    return (size(split) + length() - 1) / length();
  }

  void fill(Row& row) const override {
    const std::int64_t begin = begin_of(row);
    row.length = std::min(length(), size(row.split) - begin);
    fill_text(row, begin);
    const RandomStream places = mask_places(row);
    const auto bytes = static_cast<std::uint32_t>(row.length);
    const auto masked = std::max<std::int64_t>(1, std::llround(share_ * bytes));
    for (std::uint32_t m = 0; m < static_cast<std::uint32_t>(masked); ++m) {
      const std::size_t place = random_permutation(places, m, bytes);
      row.targets[place] = row.tokens[place];
      row.tokens[place] = kBytes;
    }
  }

 private:
  void fill_text(Row& row, std::int64_t begin) const {
    const std::string& part = text(row.split);
    bool table = false;
    for (std::int64_t i = 0; i < row.length; ++i) {
      const auto place = static_cast<std::size_t>(i), byte = static_cast<std::size_t>(begin + i);
      if (i == 0 || part[byte - 1] == '\n') table = is_table_line(part, byte);
      row.tokens[place] = token(row.split, begin + i);
      row.strata[place] = table ? kTableLine : kOtherLine;
    }
  }

  // Held-out masks do not depend on the seed, so that runs with other seeds are scored on the same
  // bytes.
  RandomStream mask_places(const Row& row) const {
    if (row.split == Split::train) return random(row, kPlaces);
    const RandomStream rows{0, RandomUse::data, static_cast<std::uint32_t>(row.split)};
    return {random_u64(rows, static_cast<std::uint64_t>(row.index)), RandomUse::data, kPlaces};
  }

  double share_;
};

}  // namespace

std::unique_ptr<Task> make_masked_task(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<MaskedTask>(config);
  if (stored == nullptr) task->load();
  return task;
}

}  // namespace coterie::train
