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
  const AttentionBuffers exact(full, inputs), fast(improved, inputs);
  attention_forward(full, inputs, exact.result(), exact.workspace());
  attention_forward(improved, inputs, fast.result(), fast.workspace());

  const std::vector<double> wanted = read_values(exact.result().out);
  const std::vector<double> got = read_values(fast.result().out);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    error += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  std::printf("relative error against full attention: %.3f\n", std::sqrt(error / norm));

  // The selection is there to look at: saved tensor 2 holds the cluster offsets of each head.
  const auto* offsets = static_cast<const std::int32_t*>(fast.result().saved[2].data);
  std::int32_t largest = 0;
  for (int c = 0; c < 100; ++c) largest = std::max(largest, offsets[c + 1] - offsets[c]);
  std::printf("largest of 100 clusters of head 0: %d of %d queries\n", largest,
              static_cast<int>(N));

  HostTensor dq(DType::f32, {B, H, N, D}), dk = dq, dv = dq;
  AttentionGradients gradients;
  gradients.dq = dq;
  gradients.dk = dk;
  gradients.dv = dv;
  attention_backward(improved, inputs, fast.result(), exact.result().out, gradients,
                     fast.workspace());
  std::printf("d(out . full)/dq of the first element: %.6f\n",
              static_cast<double>(dq.data<float>()[0]));
  return std::isfinite(dq.data<float>()[0]) && error < norm ? 0 : 1;
}
