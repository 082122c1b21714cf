// SPDX-License-Identifier: MIT
#include "coterie/torch/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <ostream>
#include <string>

#include "coterie/error.h"
#include "decode.h"
#include "head_group.h"

namespace coterie::torch_api {
namespace {

template <class... Parts>
[[noreturn]] void refuse_layer(const Parts&... parts) {
  std::string message = "[self_attention] ";
  ((message += parts), ...);
  throw Error(message);
}

std::string text(std::int64_t number) { return std::to_string(number); }

void check_options(const SelfAttentionOptions& options) {
  const std::int64_t E = options.dim, H = options.heads;
  if (H < 1 || E < H || E % H != 0) {
    refuse_layer("expected a width that is a multiple of the number of heads; got width ", text(E),
                 " and ", text(H), " heads");
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    refuse_layer("expected dropout from 0 to below 1; got ", std::to_string(options.dropout));
  }
}

void check_input(const at::Tensor& x, std::int64_t E) {
  if (x.dim() == 3 && x.size(2) == E) return;
  std::string sizes;
  for (const std::int64_t size : x.sizes()) sizes += (sizes.empty() ? "" : ", ") + text(size);
  refuse_layer("expected x of shape (B, N, ", text(E), "); got (", sizes, ")");
}

at::Tensor detached(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach() : tensor;
}

AttentionOptions detached(AttentionOptions options) {
  for (at::Tensor* tensor : {&options.centroids, &options.gate, &options.logit_scale}) {
    *tensor = detached(*tensor);
  }
  return options;
}

// Outputs of the groups (B, h, N, D) side by side, (B, N, H D).
at::Tensor merged(const std::vector<at::Tensor>& parts_BHND) {
  std::vector<at::Tensor> parts_BNHD;
  for (const at::Tensor& part : parts_BHND) parts_BNHD.push_back(part.transpose(1, 2));
  const at::Tensor all = parts_BNHD.size() == 1 ? parts_BNHD[0] : at::cat(parts_BNHD, 2);
  return all.flatten(2);
}

at::Tensor or_zero(const at::Tensor& commitment, const at::Tensor& like) {
  if (commitment.defined()) return commitment;
  return at::zeros({}, like.options().dtype(at::kFloat));
}

}  // namespace

SelfAttentionImpl::SelfAttentionImpl(SelfAttentionOptions options)
    : options_(std::move(options)),
      kv_heads_(options_.kv_heads == 0 ? options_.heads : options_.kv_heads) {
  check_options(options_);
  options_.spec = layer_spec(options_.spec, options_.causal);
  const std::int64_t E = options_.dim, H = options_.heads, D = E / H;
  slices_ = head_slices(options_.spec, H, kv_heads_);
  const std::int64_t key_heads = slices_.back().first_key + slices_.back().key_count;
  groups_ = make_groups(options_.spec);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    trained_positions_.insert(trained_positions_.end(), static_cast<std::size_t>(slices_[g].count),
                              groups_[g]->positions());
  }
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
    const auto settings = ::torch::nn::LinearOptions(in, out).bias(options_.bias);
    return register_module(name, ::torch::nn::Linear(settings));
  };
  q_ = linear("q", E, H * D);
  if (key_heads > 0) k_ = linear("k", E, key_heads * D);
  v_ = linear("v", E, kv_heads_ * D);
  out_ = linear("out", H * D, E);
  for (std::size_t g = 0; g < groups_.size(); ++g)
    register_module("group_" + std::to_string(g), groups_[g]);
}

SelfAttentionImpl::Groups SelfAttentionImpl::make_groups(const AttentionSpec& spec) const {
  const std::vector<HeadSlice> slices = head_slices(spec, options_.heads, kv_heads_);
  Groups groups;
  for (std::size_t g = 0; g < slices.size(); ++g) {
    groups.push_back(std::make_shared<HeadGroupImpl>(
        HeadGroupOptions{.spec = spec.groups[g],
                         .dim = options_.dim,
                         .head_dim = options_.dim / options_.heads,
                         .heads = slices[g].count,
                         .kv_heads = slices[g].kv_count,
                         .causal = options_.causal,
                         .rotary_base = options_.rotary_base,
                         .seed = group_seed(options_.seed, 0, static_cast<std::int64_t>(g))}));
  }
  return groups;
}

// Slices of the projections, without copies.
std::vector<HeadRows> SelfAttentionImpl::project(const at::Tensor& x_BNE) {
  const std::int64_t D = options_.dim / options_.heads;
  const auto split = [&](::torch::nn::Linear& linear) {
    return linear ? linear(x_BNE).unflatten(2, {-1, D}) : at::Tensor();
  };
  const at::Tensor q = split(q_), k = split(k_), v = split(v_);
  std::vector<HeadRows> rows;
  for (const HeadSlice& own : slices_) {
    rows.push_back({q.narrow(2, own.first, own.count),
                    own.key_count == 0 ? at::Tensor() : k.narrow(2, own.first_key, own.key_count),
                    v.narrow(2, own.first_kv, own.kv_count)});
  }
  return rows;
}

void SelfAttentionImpl::record(const PassContext& context, std::int64_t group,
                               const HeadRows& placed, const AttentionOptions& options,
                               const std::vector<at::Tensor>& labels) const {
  const HeadGroupImpl& own = *groups_[static_cast<std::size_t>(group)];
  if (context.statistics && std::holds_alternative<RoutingParams>(own.mechanism())) {
    own.add_statistics(placed, options.q_lengths, labels,
                       (*context.statistics)[{context.layer, group}], HeadPart(context.ranks));
  }
  if (!context.records) return;
  context.records->push_back({context.layer, group, own.mechanism(), detached(placed.q),
                              detached(placed.k), detached(placed.v), detached(options)});
}

// The rows of this rank's heads at the positions of all ranks.
std::vector<HeadRows> SelfAttentionImpl::whole_sequences(std::vector<HeadRows> rows,
                                                         const PassContext& context) const {
  check_sequence_ranks(options_.spec, options_.heads, kv_heads_, context.ranks->size);
  std::vector<at::Tensor*> tensors;
  for (HeadRows& own : rows) {
    for (at::Tensor* tensor : {&own.q, &own.k, &own.v}) {
      if (tensor->defined()) tensors.push_back(tensor);
    }
  }
  std::vector<at::Tensor> parts;
  for (const at::Tensor* tensor : tensors) parts.push_back(*tensor);
  parts = to_heads(parts, *context.ranks, context.length);
  for (std::size_t i = 0; i < parts.size(); ++i) *tensors[i] = parts[i];
  return rows;
}

AttentionOptions SelfAttentionImpl::group_options(std::size_t group, const at::Tensor& x_BNE,
                                                  const PassContext& context) {
  const auto number = static_cast<std::int64_t>(group);
  const HeadPart part(context.ranks);
  AttentionOptions options = groups_[group]->attention_options(x_BNE, part);
  options.q_lengths = options.k_lengths = context.lengths;
  options.seed = group_seed(context.seed, context.layer, number);
  if (is_training()) options.dropout = options_.dropout;
  options.dropout_seed = group_seed(context.dropout_seed, context.layer, number);
  options.part = {context.first_row, part.index, part.count};
  return options;
}

// Outputs of all heads (B, N, H D), before the output layer.
PassOutput SelfAttentionImpl::attended(const at::Tensor& x_BNE, const PassContext& context) {
  check_input(x_BNE, options_.dim);
  if (packs(x_BNE, context)) return attended_packed(x_BNE, context);
  const HeadPart own(context.ranks);
  const std::vector<HeadRows> projected = project(x_BNE);
  const std::vector<HeadRows> rows =
      context.ranks == nullptr ? projected : whole_sequences(projected, context);
  std::vector<at::Tensor> parts;
  at::Tensor commitment;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    HeadGroupImpl& group = *groups_[g];
    const HeadRows placed = group.placed(rows[g], 0, own);
    const auto number = static_cast<std::int64_t>(g);
    AttentionOptions options = group_options(g, x_BNE, context);
    if (context.ranks != nullptr) {
      group.exchange(projected[g], *context.ranks, context.length, options);
    }
    record(context, number, placed, options, /*labels=*/{});
    const PassOutput part = group.forward(placed, options);
    parts.push_back(part.out);
    if (!part.commitment.defined()) continue;
    commitment = commitment.defined() ? commitment + part.commitment : part.commitment;
  }
  if (context.ranks == nullptr) return {merged(parts), commitment};
  for (at::Tensor& part : parts) part = part.transpose(1, 2);
  parts = to_positions(parts, *context.ranks);
  for (at::Tensor& part : parts) part = part.transpose(1, 2);
  // A mean over heads, of which each rank has as many.
  if (commitment.defined()) commitment = commitment / static_cast<double>(own.count);
  return {merged(parts), commitment};
}

PassOutput SelfAttentionImpl::forward(const at::Tensor& x_BNE, const PassContext& context) {
  const PassOutput heads = attended(x_BNE, context);
  return {out_(heads.out), or_zero(heads.commitment, x_BNE)};
}

PassOutput SelfAttentionImpl::forward_without_bias(const at::Tensor& x_BNE,
                                                   const PassContext& context) {
  const PassOutput heads = attended(x_BNE, context);
  return {at::linear(heads.out, out_->weight), or_zero(heads.commitment, x_BNE)};
}

at::Tensor SelfAttentionImpl::output_bias() const { return out_->bias; }

const AttentionSpec& SelfAttentionImpl::spec() const { return options_.spec; }

std::shared_ptr<LayerCache> SelfAttentionImpl::make_cache(std::int64_t batch) const {
  auto cache = std::make_shared<LayerCache>();
  cache->batch = batch;
  for (const auto& group : groups_) {
    cache->groups.push_back(make_group_cache(group->mechanism(), options_.causal));
  }
  return cache;
}

at::Tensor SelfAttentionImpl::prefill(const at::Tensor& x_BNE, LayerCache& cache) {
  check_input(x_BNE, options_.dim);
  if (x_BNE.size(0) != cache.batch || cache.groups.size() != groups_.size()) {
    refuse_layer("expected a cache of this layer and x of its batch size ", text(cache.batch),
                 "; got batch size ", text(x_BNE.size(0)));
  }
  const at::NoGradGuard no_grad;
  const std::vector<HeadRows> rows = project(x_BNE);
  std::vector<at::Tensor> parts;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    HeadGroupImpl& group = *groups_[g];
    const DecodingStep step{group.mechanism(), group.placed(rows[g], cache.position),
                            group.attention_options(x_BNE), cache.position};
    parts.push_back(decode(step, cache.groups[g]));
  }
  cache.position += x_BNE.size(1);
  return out_(merged(parts));
}

void SelfAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "SelfAttention(dim=" << options_.dim << ", heads=" << options_.heads
         << ", kv_heads=" << kv_heads_ << ", attention=" << options_.spec.to_string()
         << (options_.causal ? ", causal)" : ")");
}

}  // namespace coterie::torch_api
