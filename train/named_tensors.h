// SPDX-License-Identifier: MIT
// Tensors by name, between modules and the safetensors format.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "formats/safetensors.h"

namespace torch::nn {
class Module;
}

namespace coterie::train {

using NamedTensors = std::map<std::string, at::Tensor>;

// Parameters and buffers by name; tensors that are shared occur under one of their names.
NamedTensors module_tensors(const ::torch::nn::Module& module);

// Copies, on the CPU.
SafeTensors to_safetensors(const NamedTensors& tensors);
NamedTensors from_safetensors(const SafeTensors& stored);

// Copies into the module, whose element types and devices stay; throws, naming them, on missing,
// unexpected or differently shaped tensors, and then changes nothing. `source` is for the message.
void load_module(::torch::nn::Module& module, const NamedTensors& tensors,
                 const std::string& source);

}  // namespace coterie::train
