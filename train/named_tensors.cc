// SPDX-License-Identifier: MIT
#include "train/named_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "coterie/error.h"

namespace coterie::train {
namespace {

constexpr std::pair<at::ScalarType, const char*> kTypes[] = {
    {at::kFloat, "F32"}, {at::kDouble, "F64"}, {at::kBFloat16, "BF16"}, {at::kHalf, "F16"},
    {at::kLong, "I64"},  {at::kInt, "I32"},    {at::kShort, "I16"},     {at::kChar, "I8"},
    {at::kByte, "U8"},   {at::kBool, "BOOL"}};

const char* stored_type(const std::string& name, at::ScalarType type) {
  for (const auto& [torch_type, stored] : kTypes) {
    if (type == torch_type) return stored;
  }
  throw Error(fmt::format("[safetensors] cannot store tensor \"{}\" of type {}", name,
                          c10::toString(type)));
}

at::ScalarType torch_type(const std::string& name, const std::string& stored_name) {
  for (const auto& [type, stored] : kTypes) {
    if (stored_name == stored) return type;
  }
  throw Error(fmt::format("[safetensors] cannot use tensor \"{}\" of type {}", name, stored_name));
}

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("({})", fmt::join(tensor.sizes(), ", "));
}

}  // namespace

NamedTensors module_tensors(const ::torch::nn::Module& module) {
  NamedTensors tensors;
  std::set<const void*> seen;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      if (!item.value().defined()) continue;
      if (seen.insert(item.value().unsafeGetTensorImpl()).second)
        tensors[item.key()] = item.value();
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return tensors;
}

SafeTensors to_safetensors(const NamedTensors& tensors) {
  SafeTensors content;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor plain = tensor.detach().cpu().contiguous();
    StoredTensor& stored = content.tensors[name];
    stored.dtype = stored_type(name, plain.scalar_type());
    stored.shape = plain.sizes().vec();
    const char* const begin = static_cast<const char*>(plain.const_data_ptr());
    stored.bytes.assign(begin, begin + plain.nbytes());
  }
  return content;
}

NamedTensors from_safetensors(const SafeTensors& stored) {
  NamedTensors tensors;
  for (const auto& [name, tensor] : stored.tensors) {
    at::Tensor plain = at::empty(tensor.shape, torch_type(name, tensor.dtype));
    if (!tensor.bytes.empty()) {
      std::memcpy(plain.mutable_data_ptr(), tensor.bytes.data(), tensor.bytes.size());
    }
    tensors[name] = std::move(plain);
  }
  return tensors;
}

void load_module(::torch::nn::Module& module, const NamedTensors& tensors,
                 const std::string& source) {
  const NamedTensors own = module_tensors(module);
  std::vector<std::string> wrong;
  for (const auto& [name, tensor] : own) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) {
      wrong.push_back(name + " is missing");
    } else if (found->second.sizes() != tensor.sizes()) {
      wrong.push_back(fmt::format("{} has shape {}, expected {}", name, shape_text(found->second),
                                  shape_text(tensor)));
    }
  }
  for (const auto& [name, tensor] : tensors) {
    if (!own.contains(name)) wrong.push_back(name + " is not in the model");
  }
  if (!wrong.empty()) {
    constexpr std::size_t kShown = 3;
    const std::size_t more = wrong.size() - std::min(kShown, wrong.size());
    wrong.resize(wrong.size() - more);
    throw Error(fmt::format("[checkpoint] the tensors in {} do not match this model: {}{}", source,
                            fmt::join(wrong, "; "),
                            more == 0 ? "" : fmt::format("; and {} more", more)));
  }
  const c10::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) tensor.copy_(tensors.at(name));
}

}  // namespace coterie::train
