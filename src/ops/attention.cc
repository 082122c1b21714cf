// SPDX-License-Identifier: MIT
// Attention by a spec: head groups as slices of the layer's tensors, one pass each.
#include "coterie/attention.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/check.h"

namespace coterie {

namespace {

std::shared_ptr<void> host_memory(std::int64_t bytes, Device device) {
  COTERIE_CHECK(device == Device::cpu, "attention", "tensors are on ", describe(device),
                ", but there is no allocator for it; set CallResources::allocate");
  constexpr std::int64_t kAlignment = 64;
  const std::int64_t whole = std::max<std::int64_t>(1, (bytes + kAlignment - 1) / kAlignment);
  void* memory = std::aligned_alloc(kAlignment, static_cast<std::size_t>(whole * kAlignment));
  if (!memory) throw std::bad_alloc();
  return {memory, std::free};
}

std::shared_ptr<void> allocate(const CallResources& resources, std::int64_t bytes, Device device) {
  return resources.allocate ? resources.allocate(bytes, device) : host_memory(bytes, device);
}

std::int64_t bytes_of(const TensorView& tensor) {
  return tensor.count() * dtype_bytes(tensor.dtype);
}

// Heads [first, first + count) of a tensor (B, heads, ...); absent if the tensor is or count is 0.
TensorView heads_of(const TensorView& tensor, std::int64_t first, std::int64_t count) {
  return tensor.present() && count > 0 ? tensor.narrowed(1, first, count) : TensorView{};
}

// The heads of each group. A spec of one group takes all tensors whole.
std::vector<HeadSlice> slices_of(const AttentionSpec& spec, const AttentionInputs& inputs) {
  const auto heads = [](const TensorView& tensor, const char* name) {
    COTERIE_CHECK(tensor.rank == 4, "attention", "expected ", name,
                  " of shape (B, heads, rows, width); got ", describe(tensor));
    return tensor.size(1);
  };
  const std::vector<HeadSlice> slices =
      head_slices(spec, heads(inputs.q, "q"), heads(inputs.v, "v"));
  check_key_heads(slices, inputs.k.present() ? heads(inputs.k, "k") : 0);
  return slices;
}

template <class State>
void check_states(std::size_t groups, const std::vector<State>& state) {
  COTERIE_CHECK(state.empty() || state.size() == groups, "attention", "expected state for ", groups,
                " head groups; got ", state.size());
}

}  // namespace

Attention::Attention(std::string_view spec) : Attention(AttentionSpec::parse(spec)) {}

Attention::Attention(AttentionSpec spec) : spec_(std::move(spec)) { refuse_positions(spec_); }

Attention::Saved Attention::forward(const AttentionInputs& inputs, const TensorView& out,
                                    const std::vector<GroupState>& state,
                                    const CallResources& resources) const {
  const Device device = inputs.q.device;
  const std::vector<HeadSlice> slices = slices_of(spec_, inputs);
  check_states(slices.size(), state);
  Saved saved;
  saved.resources_ = resources;
  const auto own = [&](std::int64_t bytes) {
    saved.memory_.push_back(allocate(resources, bytes, device));
    return saved.memory_.back().get();
  };
  for (std::size_t g = 0; g < slices.size(); ++g) {
    const HeadSlice& slice = slices[g];
    const Mechanism& mechanism = spec_.groups[g].mechanism;
    Saved::Group group;
    group.slice = slice;
    group.inputs = inputs;
    group.result.out = out;
    if (slices.size() > 1) {
      group.inputs.q = heads_of(inputs.q, slice.first, slice.count);
      group.inputs.k = heads_of(inputs.k, slice.first_key, slice.key_count);
      group.inputs.v = heads_of(inputs.v, slice.first_kv, slice.kv_count);
      group.inputs.mask = heads_of(inputs.mask, slice.first, slice.count);
      group.result.out = heads_of(out, slice.first, slice.count);
      group.inputs.dropout_seed = group_seed(inputs.dropout_seed, 0, static_cast<std::int64_t>(g));
    }
    if (!state.empty()) {
      group.inputs.centroids = state[g].centroids;
      group.inputs.gate = state[g].gate;
      group.inputs.logit_scale = state[g].logit_scale;
    }
    group.layout = attention_saved(mechanism, group.inputs);
    for (const TensorLayout& layout : group.layout.tensors) {
      TensorView tensor = view_of(layout, nullptr, device);
      tensor.data = own(bytes_of(tensor));
      group.result.saved.push_back(tensor);
    }
    const std::int64_t bytes = attention_workspace_bytes(mechanism, group.inputs);
    const std::shared_ptr<void> scratch = allocate(resources, bytes, device);
    attention_forward(mechanism, group.inputs, group.result,
                      {scratch.get(), bytes, resources.stream});
    saved.groups_.push_back(std::move(group));
  }
  return saved;
}

void Attention::backward(const Saved& saved, const ConstTensorView& grad_out,
                         const AttentionGradients& gradients,
                         const std::vector<GroupStateGradients>& state) const {
  COTERIE_CHECK(saved.groups_.size() == spec_.groups.size(), "attention",
                "expected what forward of this attention saved, ", spec_.groups.size(),
                " head groups; got ", saved.groups_.size());
  check_states(spec_.groups.size(), state);
  for (std::size_t g = 0; g < saved.groups_.size(); ++g) {
    const Saved::Group& group = saved.groups_[g];
    const HeadSlice& slice = group.slice;
    AttentionGradients own = gradients;
    TensorView own_grad_out = grad_out;
    if (saved.groups_.size() > 1) {
      own_grad_out = heads_of(grad_out, slice.first, slice.count);
      own.dq = heads_of(gradients.dq, slice.first, slice.count);
      own.dk = heads_of(gradients.dk, slice.first_key, slice.key_count);
      own.dv = heads_of(gradients.dv, slice.first_kv, slice.kv_count);
    }
    if (!state.empty()) {
      own.dcentroids = state[g].dcentroids;
      own.dgate = state[g].dgate;
      own.dlogit_scale = state[g].dlogit_scale;
    }
    const Mechanism& mechanism = spec_.groups[g].mechanism;
    const std::int64_t bytes = attention_workspace_bytes(mechanism, group.inputs);
    const std::shared_ptr<void> scratch = allocate(saved.resources_, bytes, group.inputs.q.device);
    attention_backward(mechanism, group.inputs, group.result, own_grad_out, own,
                       {scratch.get(), bytes, saved.resources_.stream});
  }
}

ConstTensorView Attention::Saved::get(std::string_view name, std::size_t group) const {
  COTERIE_CHECK(group < groups_.size(), "attention", "expected a head group below ", groups_.size(),
                "; got ", group);
  const Group& own = groups_[group];
  for (std::size_t i = 0; i < own.layout.tensors.size(); ++i)
    if (own.layout.tensors[i].name == name) return own.result.saved[i];
  std::string known;
  for (const std::string& other : names(group)) known += " " + other;
  fail("attention", "there is no saved tensor \"", name, "\"; there are:", known);
}

std::vector<std::string> Attention::Saved::names(std::size_t group) const {
  std::vector<std::string> names;
  for (const TensorLayout& layout : groups_.at(group).layout.tensors) names.push_back(layout.name);
  return names;
}

}  // namespace coterie
