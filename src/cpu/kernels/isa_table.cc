// SPDX-License-Identifier: MIT
// Chooses the instruction set: the machine's best, or one set by COTERIE_CPU_ISA or by a test.
#include <atomic>
#include <cstdlib>
#include <string>

#include "core/check.h"
#include "cpu/kernels/kernels.h"

namespace coterie {

namespace {

constexpr CpuIsa kLevels[] = {CpuIsa::baseline, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16};

bool supported(CpuIsa isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi");
  switch (isa) {
    case CpuIsa::baseline:
      return true;
    case CpuIsa::avx2:
      return avx2;
    case CpuIsa::avx512_bf16:
      return supported(CpuIsa::avx512) && __builtin_cpu_supports("avx512bf16");
    case CpuIsa::avx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512ifma");
  }
  return false;
}

CpuIsa initial_isa() {
  CpuIsa best = CpuIsa::baseline;
  for (CpuIsa isa : kLevels)
    if (supported(isa)) best = isa;
  if (const char* text = std::getenv("COTERIE_CPU_ISA")) {
    for (CpuIsa isa : kLevels)
      if (std::string(text) == cpu_isa_name(isa) && supported(isa)) return isa;
    fail("COTERIE_CPU_ISA", "expected a level this machine has, at most ", cpu_isa_name(best),
         " (baseline, avx2, avx512, avx512_bf16); got ", text);
  }
  return best;
}

std::atomic<CpuIsa>& current_isa() {
  static std::atomic<CpuIsa> isa{initial_isa()};
  return isa;
}

}  // namespace

const char* cpu_isa_name(CpuIsa isa) {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa)];
}

std::vector<CpuIsa> supported_cpu_isas() {
  std::vector<CpuIsa> levels;
  for (CpuIsa isa : kLevels)
    if (supported(isa)) levels.push_back(isa);
  return levels;
}

CpuIsa cpu_isa() { return current_isa(); }

void force_cpu_isa(CpuIsa isa) {
  COTERIE_CHECK(supported(isa), "force_cpu_isa", "expected a level this machine has; got ",
                cpu_isa_name(isa));
  current_isa() = isa;
}

namespace cpu {

const KernelTable& kernel_table() {
  switch (cpu_isa()) {
    case CpuIsa::avx512_bf16:
      return avx512_bf16::kTable;
    case CpuIsa::avx512:
      return avx512::kTable;
    case CpuIsa::avx2:
      return avx2::kTable;
    default:
      return baseline::kTable;
  }
}

}  // namespace cpu

}  // namespace coterie
