// SPDX-License-Identifier: MIT
// The instruction sets that the kernels are compiled for on this architecture (cmake/isa.cmake).
// isas_x86.cc and isas_arm.cc define them; one of the two is compiled.
#pragma once

#include <vector>

#include "coterie/runtime.h"
#include "cpu/kernels/kernels.h"

namespace coterie::cpu {

struct IsaEntry {
  CpuIsa isa;
  const KernelTable* table;
};

// Those that this machine has, weakest first. The first one is on every machine.
std::vector<IsaEntry> machine_isas();

}  // namespace coterie::cpu
