// SPDX-License-Identifier: MIT
#include "train/tasks/row_task.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "coterie/error.h"

namespace coterie::train {
namespace {

std::span<std::int64_t> row_of(const at::Tensor& tensor, std::int64_t row) {
  if (!tensor.defined()) return {};
  const auto length = static_cast<std::size_t>(tensor.size(1));
  return {tensor.mutable_data_ptr<std::int64_t>() + row * tensor.size(1), length};
}

constexpr std::int64_t kMaxLength = 1 << 30;  // places are 32-bit random numbers

}  // namespace

RowTask::RowTask(std::uint64_t seed, std::int64_t length) : seed_(seed), length_(length) {
  if (length < 1 || length > kMaxLength) {
    throw Error(fmt::format("[task] expected a length from 1 to {}; got {}", kMaxLength, length));
  }
}

RandomStream RowTask::random(const Row& row, std::uint32_t purpose) const {
  const RandomStream rows{seed_, RandomUse::data, static_cast<std::uint32_t>(row.split)};
  return {random_u64(rows, static_cast<std::uint64_t>(row.index)), RandomUse::data, purpose};
}

std::int64_t RowTask::batches(Split split, std::int64_t rows) const {
  if (rows < 1) throw Error(fmt::format("[batch] expected 1 row or more; got {}", rows));
  if (split == Split::train) return std::numeric_limits<std::int64_t>::max() / rows;
  return (held_out_rows(split) + rows - 1) / rows;
}

Batch RowTask::batch(Split split, std::int64_t index, std::int64_t rows) const {
  const std::int64_t count = batches(split, rows);
  if (index < 0 || index >= count) {
    throw Error(fmt::format("[batch] expected an index below {}; got {}", count, index));
  }
  const std::int64_t first = index * rows;
  if (split != Split::train) rows = std::min(rows, held_out_rows(split) - first);

  Batch batch;
  batch.tokens = at::zeros({rows, length_}, at::kLong);
  batch.targets = at::full({rows, targets()}, kIgnore, at::kLong);
  if (!strata().empty()) batch.strata = at::zeros({rows, targets()}, at::kLong);
  const at::Tensor lengths = at::empty({rows}, at::kLong);
  bool all_valid = true;
  for (std::int64_t r = 0; r < rows; ++r) {
    Row row{.split = split,
            .index = first + r,
            .tokens = row_of(batch.tokens, r),
            .targets = row_of(batch.targets, r),
            .strata = row_of(batch.strata, r),
            .length = length_};
    fill(row);
    lengths.mutable_data_ptr<std::int64_t>()[r] = row.length;
    all_valid = all_valid && row.length == length_;
  }
  if (!all_valid) batch.lengths = lengths;
  return batch;
}

}  // namespace coterie::train
