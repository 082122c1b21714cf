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

// Parameters and buffers by name; a shared tensor appears under one of its names.
NamedTensors module_tensors(const ::torch::nn::Module& module);

// Copies, on the CPU.
SafeTensors to_safetensors(const NamedTensors& tensors);
NamedTensors from_safetensors(const SafeTensors& stored);

// Copies into the module and keeps its element types and devices. If tensors are missing,
// unexpected or have other shapes, throws an Error that lists them and changes nothing. Messages
// call the tensors' origin `source`.
void load_module(::torch::nn::Module& module, const NamedTensors& tensors,
                 const std::string& source);

}  // namespace coterie::train
