// SPDX-License-Identifier: MIT
// Chooses the instruction set: the machine's best, or one set by COTERIE_CPU_ISA or by a test.
#include <atomic>
#include <cstdlib>
#include <string>

#include "core/check.h"
#include "cpu/kernels/isas.h"

namespace coterie {

namespace {

using cpu::IsaEntry;

const std::vector<IsaEntry>& isas() {
  static const std::vector<IsaEntry> all = cpu::machine_isas();
  return all;
}

// Null if this machine does not have it.
const IsaEntry* entry_of(CpuIsa isa) {
  for (const IsaEntry& entry : isas())
    if (entry.isa == isa) return &entry;
  return nullptr;
}

const IsaEntry* initial_isa() {
  const char* text = std::getenv("COTERIE_CPU_ISA");
  if (text == nullptr) return &isas().back();
  std::string names;
  for (const IsaEntry& entry : isas()) {
    if (std::string(text) == cpu_isa_name(entry.isa)) return &entry;
    names += std::string(names.empty() ? "" : ", ") + cpu_isa_name(entry.isa);
  }
  fail("COTERIE_CPU_ISA", "expected a level this machine has (", names, "); got ", text);
}

std::atomic<const IsaEntry*>& current_isa() {
  static std::atomic<const IsaEntry*> isa{initial_isa()};
  return isa;
}

}  // namespace

const char* cpu_isa_name(CpuIsa isa) {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "neon"};
  return kNames[static_cast<int>(isa)];
}

std::vector<CpuIsa> supported_cpu_isas() {
  std::vector<CpuIsa> levels;
  for (const IsaEntry& entry : isas()) levels.push_back(entry.isa);
  return levels;
}

CpuIsa cpu_isa() { return current_isa().load()->isa; }

void force_cpu_isa(CpuIsa isa) {
  const IsaEntry* entry = entry_of(isa);
  COTERIE_CHECK(entry != nullptr, "force_cpu_isa", "expected a level this machine has; got ",
                cpu_isa_name(isa));
  current_isa() = entry;
}

namespace cpu {

const KernelTable& kernel_table() { return *current_isa().load()->table; }

}  // namespace cpu

}  // namespace coterie
