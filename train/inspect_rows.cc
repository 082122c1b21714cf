// SPDX-License-Identifier: MIT
// Attention weights of records: outputs for values that are unit vectors; full attention by the
// core.
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>

#include <algorithm>

#include "train/inspect.h"

namespace coterie::train {

namespace {

using torch_api::AttentionRecord;

constexpr std::int64_t kColumns = 64;  // of the weights in one call

}  // namespace

at::Tensor attention_rows(const AttentionRecord& record) {
  // One set of values per key head. With shared queries and keys k is absent; v gives its sizes.
  const at::Tensor& keys = record.k.defined() ? record.k : record.v;
  const std::int64_t B = keys.size(0), heads = keys.size(1), S = keys.size(2);
  const at::Tensor identity = at::eye(S, record.q.options());
  std::vector<at::Tensor> columns;
  for (std::int64_t begin = 0; begin < S; begin += kColumns) {
    const std::int64_t width = std::min(kColumns, S - begin);
    const at::Tensor v = identity.narrow(1, begin, width).expand({B, heads, S, width});
    columns.push_back(
        torch_api::attention(record.q, record.k, v, record.mechanism, record.options));
  }
  return at::cat(columns, -1);
}

at::Tensor full_rows(const AttentionRecord& record) {
  const auto& [layer, group, mechanism, q, k, v, options] = record;
  return torch_api::full_attention_weights(q, k, v, mechanism, options).to(at::kFloat);
}

}  // namespace coterie::train
