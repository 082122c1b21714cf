// SPDX-License-Identifier: MIT
// A stand-in for the CUDA runtime, on machines without a GPU: several devices that launch nothing,
// but check that every launch would fit. The host reads no device memory, so whole passes run.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace coterie::fake_cuda {

struct Gpu {
  const char* name;
  int major, minor;
  int multiprocessors;
  int shared_per_block, shared_per_multiprocessor;  // KiB
  int threads_per_multiprocessor;
};

// The devices, by number.
const std::vector<Gpu>& gpus();

// What a kernel needs, as cuobjdump --dump-resource-usage tells; by mangled name.
struct KernelUse {
  int registers = 0, shared = 0;  // bytes
  bool hopper = false;            // compiled for sm_90a only
};
void set_uses(std::map<std::string, KernelUse> uses);

struct Launches {
  int count = 0;
  int most_shared = 0;              // bytes of a block
  std::vector<std::string> faults;  // launches that the device would refuse
};
// The launches since the last call.
Launches take_launches();

}  // namespace coterie::fake_cuda
