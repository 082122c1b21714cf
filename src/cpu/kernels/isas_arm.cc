// SPDX-License-Identifier: MIT
// 64-bit ARM: every processor has NEON.
#include "cpu/kernels/isas.h"

namespace coterie::cpu {

namespace neon {
extern const KernelTable kTable;
}

std::vector<IsaEntry> machine_isas() { return {{CpuIsa::neon, &neon::kTable}}; }

}  // namespace coterie::cpu
