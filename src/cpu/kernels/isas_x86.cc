// SPDX-License-Identifier: MIT
// x86-64: asks the processor what it has.
#include "cpu/kernels/isas.h"

namespace coterie::cpu {

namespace baseline {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512_bf16 {
extern const KernelTable kTable;
}

std::vector<IsaEntry> machine_isas() {
  __builtin_cpu_init();
  std::vector<IsaEntry> all = {{CpuIsa::baseline, &baseline::kTable}};
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi");
  if (!avx2) return all;
  all.push_back({CpuIsa::avx2, &avx2::kTable});
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vpopcntdq") &&
                      __builtin_cpu_supports("avx512ifma");
  if (!avx512) return all;
  all.push_back({CpuIsa::avx512, &avx512::kTable});
  if (__builtin_cpu_supports("avx512bf16"))
    all.push_back({CpuIsa::avx512_bf16, &avx512_bf16::kTable});
  return all;
}

}  // namespace coterie::cpu
