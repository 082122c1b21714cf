// SPDX-License-Identifier: MIT
// What the current device has, asked once per device.
#pragma once

namespace coterie::cuda {

struct DeviceLimits {
  int major, minor;  // compute capability
  int multiprocessors;
  int shared_per_block;  // bytes of shared memory that a block may request
  bool hopper;           // runs the kernels of *_sm90a.cu
  bool early;            // programmatic dependent launch, see prim/dependent.cuh
};

// Throws if this build has no kernels for the device. COTERIE_GPU_SHARED_KB, for tests, lowers the
// shared memory of a block; below that of a Hopper GPU its own kernels do not run.
const DeviceLimits& device_limits();

inline int multiprocessors() { return device_limits().multiprocessors; }
inline int shared_per_block() { return device_limits().shared_per_block; }
inline bool on_hopper() { return device_limits().hopper; }

// Every GPU of compute capability 8.0 and later lets a block have this much.
constexpr int kLeastShared = 99 * 1024;
// What a kernel may take of a block's shared memory if it uses as much as there is: less a part for
// its static arrays.
inline int shared_for_tables() { return shared_per_block() - 3 * 1024; }

// Whether the kernels of *_sm90a.cu are in this build: in hopper_sm90a.cu, or no_sm90a/kernels.cu.
bool has_sm90a_kernels();

}  // namespace coterie::cuda
