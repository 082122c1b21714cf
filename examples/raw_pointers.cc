// SPDX-License-Identifier: MIT
// Attention on raw memory: a forward pass by a spec, its clusters, and gradients.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "coterie/coterie.h"

using coterie::view;

int main() {
  constexpr std::int64_t B = 1, H = 4, N = 1024, D = 64, kSize = B * H * N * D;
  std::mt19937 random(1);
  const auto normal_values = [&] {
    std::normal_distribution<float> normal;
    std::vector<float> values(kSize);
    for (float& value : values) value = normal(random);
    return values;
  };
  const std::vector<float> q = normal_values(), k = normal_values(), v = normal_values();
  coterie::AttentionInputs inputs;
  inputs.q = view(q.data(), {B, H, N, D});
  inputs.k = view(k.data(), {B, H, N, D});
  inputs.v = view(v.data(), {B, H, N, D});

  const coterie::Attention full("full"), improved("i-clustered(clusters=100,topk=32)");
  std::vector<float> exact(kSize), out(kSize);
  full.forward(inputs, view(exact.data(), {B, H, N, D}));
  const auto saved = improved.forward(inputs, view(out.data(), {B, H, N, D}));

  double error = 0, norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += std::pow(static_cast<double>(out[i]) - static_cast<double>(exact[i]), 2);
    norm += std::pow(static_cast<double>(exact[i]), 2);
  }
  std::printf("relative error against full attention: %.3f\n", std::sqrt(error / norm));

  // The selection can be inspected: offsets of the clusters, here of head 0.
  const auto* offsets = static_cast<const std::int32_t*>(saved.get("offsets").data);
  std::int32_t largest = 0;
  for (int c = 0; c < 100; ++c) largest = std::max(largest, offsets[c + 1] - offsets[c]);
  std::printf("largest of 100 clusters of head 0: %d of 1024 queries\n", largest);

  std::vector<float> dq(kSize), dk(kSize), dv(kSize);
  coterie::AttentionGradients gradients;
  gradients.dq = view(dq.data(), {B, H, N, D});
  gradients.dk = view(dk.data(), {B, H, N, D});
  gradients.dv = view(dv.data(), {B, H, N, D});
  improved.backward(saved, view(exact.data(), {B, H, N, D}), gradients);
  std::printf("gradient of sum(out * exact) for the first query element: %.6f\n",
              static_cast<double>(dq[0]));
  return std::isfinite(dq[0]) && error < norm ? 0 : 1;
}
