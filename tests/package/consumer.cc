// SPDX-License-Identifier: MIT
// Uses the installed library like any other project: exits with 0 if the version is the one given
// and attention over equal values returns that value.
#include <coterie/coterie.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace {

double attend_to_ones() {
  coterie::HostTensor q(coterie::DType::f32, {1, 1, 5, 4});
  coterie::HostTensor k(coterie::DType::f32, {1, 1, 5, 4});
  coterie::HostTensor v(coterie::DType::f32, {1, 1, 5, 2});
  coterie::fill(q, [](std::int64_t i) { return 0.1 * static_cast<double>(i); });
  coterie::fill(k, [](std::int64_t i) { return 0.3 - 0.1 * static_cast<double>(i); });
  coterie::fill(v, [](std::int64_t) { return 1.0; });

  coterie::HostTensor out(coterie::DType::f32, {1, 1, 5, 2});
  coterie::AttentionInputs inputs;
  inputs.q = q;
  inputs.k = k;
  inputs.v = v;
  coterie::Attention("full").forward(inputs, out.view());
  return coterie::read_values(out).back();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string version = coterie::build_info().version;
  const double value = attend_to_ones();
  std::printf("coterie %s: %g\n", version.c_str(), value);
  return argc == 2 && version == argv[1] && value > 0.999 && value < 1.001 ? 0 : 1;
}
