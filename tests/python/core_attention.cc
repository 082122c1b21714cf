// SPDX-License-Identifier: MIT
// Attention by the core alone, for comparison with the operators. Reads from standard input: a line
// with the spec, a line with "causal seed", then tensors q, k, v, centroids, gate, logit_scale,
// lengths, grad_out, each as a line with its sizes (none: absent) and its values (f32, or i32 for
// lengths). Writes the bytes of out, dq, dk, dv.
#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "coterie/coterie.h"

namespace {

using coterie::DType;
using coterie::HostTensor;

HostTensor read_tensor(DType dtype) {
  std::string line;
  std::getline(std::cin, line);
  std::istringstream numbers(line);
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 0; numbers >> size;) sizes.push_back(size);
  if (sizes.empty()) return {};
  HostTensor tensor(dtype, sizes);
  std::cin.read(tensor.data<char>(), tensor.view().count() * coterie::dtype_bytes(dtype));
  return tensor;
}

void write_tensor(const HostTensor& tensor) {
  const auto bytes = tensor.view().count() * coterie::dtype_bytes(tensor.view().dtype);
  std::cout.write(tensor.data<char>(), bytes);
}

HostTensor like(const HostTensor& tensor) {
  const coterie::TensorView& view = tensor.view();
  if (!view.present()) return {};
  return HostTensor(view.dtype, {view.sizes, view.sizes + view.rank});
}

}  // namespace

int main() {
  std::string spec, flags;
  std::getline(std::cin, spec);
  std::getline(std::cin, flags);
  coterie::AttentionInputs inputs;
  std::istringstream(flags) >> inputs.causal >> inputs.seed;
  const HostTensor q = read_tensor(DType::f32), k = read_tensor(DType::f32);
  const HostTensor v = read_tensor(DType::f32), centroids = read_tensor(DType::f32);
  const HostTensor gate = read_tensor(DType::f32), logit_scale = read_tensor(DType::f32);
  const HostTensor lengths = read_tensor(DType::i32), grad_out = read_tensor(DType::f32);
  inputs.q = q;
  inputs.k = k;
  inputs.v = v;
  inputs.centroids = centroids;
  inputs.gate = gate;
  inputs.logit_scale = logit_scale;
  inputs.q_sequences.lengths = inputs.k_sequences.lengths = lengths;
  const coterie::Attention attention(spec);
  const HostTensor out = like(grad_out), dq = like(q), dk = like(k), dv = like(v);
  const auto saved = attention.forward(inputs, out.view());
  coterie::AttentionGradients gradients;
  gradients.dq = dq;
  gradients.dk = dk;
  gradients.dv = dv;
  attention.backward(saved, grad_out, gradients);
  write_tensor(out);
  for (const HostTensor* gradient : {&dq, &dk, &dv}) {
    if (gradient->view().present()) write_tensor(*gradient);
  }
  return 0;
}
