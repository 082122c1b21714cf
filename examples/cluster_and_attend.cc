// SPDX-License-Identifier: MIT
// The core library in one page: attend with a spec, look at the clusters, take gradients.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "coterie/coterie.h"

using namespace coterie;

namespace {

HostTensor random_tensor(std::vector<std::int64_t> sizes, std::uint32_t stream) {
  HostTensor tensor(DType::f32, std::move(sizes));
  fill(tensor, [&](std::int64_t i) {
    return random_normal({1, RandomUse::data, stream}, static_cast<std::uint64_t>(i));
  });
  return tensor;
}

// What a call needs besides its inputs, allocated as the library asks.
struct Buffers {
  std::vector<HostTensor> saved;
  HostTensor out, memory;
  AttentionResult result;
  Workspace workspace;

  Buffers(const Mechanism& mechanism, const AttentionInputs& inputs) {
    for (const TensorLayout& layout : attention_saved(mechanism, inputs).tensors)
      saved.emplace_back(layout);
    const TensorView &q = inputs.q, &v = inputs.v;
    out = HostTensor(q.dtype, {q.size(0), q.size(1), q.size(2), v.size(3)});
    const std::int64_t bytes = attention_workspace_bytes(mechanism, inputs);
    memory = HostTensor(DType::u8, {bytes});
    result.out = out;
    for (const HostTensor& tensor : saved) result.saved.push_back(tensor);
    workspace = {memory.view().data, bytes, nullptr};
  }
};

}  // namespace

int main() {
  const std::int64_t B = 1, H = 4, N = 1024, D = 64;
  const HostTensor q = random_tensor({B, H, N, D}, 1), k = random_tensor({B, H, N, D}, 2);
  const HostTensor v = random_tensor({B, H, N, D}, 3);
  AttentionInputs inputs;
  inputs.q = q;
  inputs.k = k;
  inputs.v = v;

  const Mechanism full = AttentionSpec::parse("full").groups[0].mechanism;
  const Mechanism improved =
      AttentionSpec::parse("i-clustered(clusters=100,topk=32)").groups[0].mechanism;
  Buffers exact(full, inputs), fast(improved, inputs);
  attention_forward(full, inputs, exact.result, exact.workspace);
  attention_forward(improved, inputs, fast.result, fast.workspace);

  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < exact.out.view().count(); ++i) {
    const double difference = fast.out.data<float>()[i] - exact.out.data<float>()[i];
    error += difference * difference;
    norm += std::pow(exact.out.data<float>()[i], 2);
  }
  std::printf("relative error against full attention: %.3f\n", std::sqrt(error / norm));

  // The selection is there to look at: saved tensor 2 holds the cluster offsets of each head.
  const std::int32_t* offsets = fast.saved[2].data<std::int32_t>();
  std::int32_t largest = 0;
  for (int c = 0; c < 100; ++c) largest = std::max(largest, offsets[c + 1] - offsets[c]);
  std::printf("largest of 100 clusters of head 0: %d of %d queries\n", largest,
              static_cast<int>(N));

  HostTensor dq(DType::f32, {B, H, N, D}), dk = dq, dv = dq;
  AttentionGradients gradients;
  gradients.dq = dq;
  gradients.dk = dk;
  gradients.dv = dv;
  attention_backward(improved, inputs, fast.result, exact.out, gradients, fast.workspace);
  std::printf("d(out . full)/dq of the first element: %.6f\n",
              static_cast<double>(dq.data<float>()[0]));
  return std::isfinite(dq.data<float>()[0]) && error < norm ? 0 : 1;
}
