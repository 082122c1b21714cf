// SPDX-License-Identifier: MIT
// Uses the installed library as a stranger would: exit 0 when it is the version named and attention
// over equal values gives that value back.
#include <coterie/coterie.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

double attend_to_ones() {
  coterie::HostTensor q(coterie::DType::f32, {1, 1, 5, 4});
  coterie::HostTensor k(coterie::DType::f32, {1, 1, 5, 4});
  coterie::HostTensor v(coterie::DType::f32, {1, 1, 5, 2});
  coterie::HostTensor out(coterie::DType::f32, {1, 1, 5, 2});
  coterie::fill(q, [](std::int64_t i) { return 0.1 * static_cast<double>(i); });
  coterie::fill(k, [](std::int64_t i) { return 0.3 - 0.1 * static_cast<double>(i); });
  coterie::fill(v, [](std::int64_t) { return 1.0; });

  const coterie::Mechanism full = coterie::FullParams{};
  coterie::AttentionInputs inputs;
  inputs.q = q;
  inputs.k = k;
  inputs.v = v;

  coterie::AttentionResult result;
  result.out = out;
  std::vector<coterie::HostTensor> saved;
  for (const auto& layout : coterie::attention_saved(full, inputs).tensors) {
    saved.emplace_back(layout);
  }
  for (const auto& tensor : saved) result.saved.push_back(tensor);

  coterie::HostTensor memory(coterie::DType::u8,
                             {coterie::attention_workspace_bytes(full, inputs) + 64});
  const auto address = reinterpret_cast<std::uintptr_t>(memory.view().data);
  coterie::Workspace workspace;
  workspace.data = reinterpret_cast<void*>((address + 63) / 64 * 64);
  workspace.bytes = memory.view().count() - 64;
  coterie::attention_forward(full, inputs, result, workspace);
  return coterie::read_values(out).back();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string version = coterie::build_info().version;
  const double value = attend_to_ones();
  std::printf("coterie %s: %g\n", version.c_str(), value);
  return argc == 2 && version == argv[1] && value > 0.999 && value < 1.001 ? 0 : 1;
}
