// SPDX-License-Identifier: MIT
// One pass and one centroid update of the C++ attention layer, for comparison with the Python one:
//
//   layer_outputs SPEC DIM HEADS KV_HEADS CAUSAL SEED
//
// Reads the input "x" and the layer's parameters and buffers from stdin, writes results to stdout.
// Both are a sequence of tensors: a line with the name, the number of dimensions and the sizes,
// then the values as floats. Results are the initial state of the groups ("initial.*"), the output,
// the commitment loss, the gradient of sum(out^2) + commitment in x, and the state after an update.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>

#include <iostream>
#include <map>
#include <string>

#include "coterie/torch/attention.h"

namespace coterie::torch_api {
namespace {

std::map<std::string, at::Tensor> read_tensors(std::istream& stream) {
  std::map<std::string, at::Tensor> tensors;
  std::string name;
  for (std::size_t rank = 0; stream >> name >> rank;) {
    std::vector<std::int64_t> sizes(rank);
    for (std::int64_t& size : sizes) stream >> size;
    stream.ignore();  // the end of the line
    const at::Tensor tensor = at::empty(sizes, at::kFloat);
    stream.read(static_cast<char*>(tensor.data_ptr()), tensor.numel() * tensor.element_size());
    tensors[name] = tensor;
  }
  return tensors;
}

void write(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  std::cout << name << " " << values.dim();
  for (const std::int64_t size : values.sizes()) std::cout << " " << size;
  std::cout << "\n";
  std::cout.write(static_cast<const char*>(values.data_ptr()),
                  static_cast<std::streamsize>(values.numel() * values.element_size()));
}

// Parameters and buffers by name.
std::map<std::string, at::Tensor> state_of(const SelfAttention& layer) {
  std::map<std::string, at::Tensor> state;
  for (const auto& item : layer->named_parameters()) state[item.key()] = item.value();
  for (const auto& item : layer->named_buffers()) state[item.key()] = item.value();
  return state;
}

void run(char** arguments) {
  SelfAttentionOptions options;
  options.spec = AttentionSpec::parse(arguments[1]);
  options.dim = std::stoll(arguments[2]);
  options.heads = std::stoll(arguments[3]);
  options.kv_heads = std::stoll(arguments[4]);
  options.causal = arguments[5] == std::string("1");
  options.seed = std::stoull(arguments[6]);
  SelfAttention layer(options);
  std::map<std::string, at::Tensor> given = read_tensors(std::cin), own = state_of(layer);
  for (const auto& [name, tensor] : own) {
    for (const char* drawn : {"centroids", "counts", "sums", "surrogates"}) {
      if (name.size() > 8 && name.substr(8) == drawn) write("initial." + name, tensor);
    }
    const at::NoGradGuard no_grad;
    at::Tensor(tensor).copy_(given.at(name));
  }
  const at::Tensor x = given.at("x").requires_grad_();
  std::vector<AttentionRecord> records;
  const PassOutput output = layer->forward(x, {.seed = options.seed, .records = &records});
  write("out", output.out);
  at::Tensor loss = output.out.square().sum();
  if (output.commitment.defined()) {
    write("commitment", output.commitment);
    loss = loss + output.commitment;
  }
  write("gradient", ::torch::autograd::grad({loss}, {x})[0]);
  layer->update_centroids(records);
  for (const auto& item : layer->named_buffers()) write(item.key(), item.value());
}

}  // namespace
}  // namespace coterie::torch_api

int main(int count, char** arguments) {
  if (count != 7) return 2;
  try {
    coterie::torch_api::run(arguments);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
