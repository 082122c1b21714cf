// SPDX-License-Identifier: MIT
// Threads, instruction sets, devices and build facts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace coterie {

// Number of threads of CPU operations, 1 to kMaxThreads; initially COTERIE_THREADS or the number of
// cores. Results do not depend on it. An operation keeps the number that it started with. It runs
// with fewer if the system does not grant as many, or if its workspace was sized for fewer.
constexpr int kMaxThreads = 1024;
int threads();
void set_threads(int count);

// CPU instruction-set levels, weakest first.
// x86-64: baseline to avx512_bf16; 64-bit ARM: neon.
enum class CpuIsa : std::uint8_t { baseline, avx2, avx512, avx512_bf16, neon };
const char* cpu_isa_name(CpuIsa isa);
std::vector<CpuIsa> supported_cpu_isas();  // of this machine and build, weakest first

// The level in use: the best one, or the one that COTERIE_CPU_ISA names.
CpuIsa cpu_isa();
void force_cpu_isa(CpuIsa isa);  // throws if unsupported; call it while no operation runs

struct CudaDevice {
  std::string name;
  int major = 0, minor = 0, multiprocessors = 0;
  std::int64_t memory_bytes = 0;
};
bool cuda_available();
std::vector<CudaDevice> cuda_devices();

struct BuildInfo {
  std::string version, compiler, build_type, cuda_toolkit;  // cuda_toolkit: "none" without CUDA
  bool asserts = false;
};
BuildInfo build_info();
std::string cpu_model();  // as the operating system names it

}  // namespace coterie
