// SPDX-License-Identifier: MIT
// Attention layers in 16 bit on a GPU: one product for q, k and v.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include <algorithm>

#include "block_ops.h"
#include "coterie/torch/attention.h"
#include "head_group.h"
#include "packed.h"

namespace coterie::torch_api {

bool SelfAttentionImpl::packs(const at::Tensor& x_BNE, const PassContext& context) const {
  if (context.ranks != nullptr) return false;  // rows of several ranks come in other layouts
  const std::int64_t heads =
      options_.heads + slices_.back().first_key + slices_.back().key_count + kv_heads_;
  const bool fours = heads * (options_.dim / options_.heads) % 4 == 0;  // for sum_rows
  if (!is_fused_type(x_BNE) || !fours) return false;
  return std::all_of(groups_.begin(), groups_.end(),
                     [](const auto& group) { return group->can_be_packed(); });
}

PassOutput SelfAttentionImpl::attended_packed(const at::Tensor& x_BNE, const PassContext& context) {
  std::vector<at::Tensor> weights, biases;
  for (const ::torch::nn::Linear& linear : {q_, k_, v_}) {
    if (!linear) continue;
    weights.push_back(linear->weight);
    if (options_.bias) biases.push_back(linear->bias);
  }
  const at::ScalarType type = x_BNE.scalar_type();
  const at::Tensor bias = options_.bias ? at::cat(biases) : at::Tensor();
  const std::int64_t D = options_.dim / options_.heads;
  const at::Tensor constant = bias.defined() ? bias.detach().to(type) : bias;
  const at::Tensor rows =
      at::linear(x_BNE, at::cat(weights).to(type), constant).unflatten(2, {-1, D});
  const std::int64_t keys = slices_.back().first_key + slices_.back().key_count;
  std::vector<PackedGroup> packed;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    HeadGroupImpl& group = *groups_[g];
    packed.push_back({group.mechanism(), group_options(g, x_BNE, context), slices_[g],
                      group.rotary(), group.rotary_base()});
  }
  const PackedOutput found =
      packed_attention(rows, bias, {options_.heads, keys, kv_heads_}, packed);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    record(context, static_cast<std::int64_t>(g), found.rows[g], packed[g].options,
           found.labels[g]);
  }
  return {found.out.flatten(2), found.commitment};
}

}  // namespace coterie::torch_api
