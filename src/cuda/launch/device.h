// SPDX-License-Identifier: MIT
// Limits of the current device, queried once per device.
#pragma once

namespace coterie::cuda {

struct DeviceLimits {
  int major, minor;  // compute capability
  int multiprocessors;
  int shared_per_block;  // bytes of shared memory that a block may request
  int shared_per_multiprocessor;
};

const DeviceLimits& device_limits();

inline int multiprocessors() { return device_limits().multiprocessors; }
// Whether the device runs the kernels of *_sm90a.cu.
inline bool on_hopper() { return device_limits().major == 9; }

}  // namespace coterie::cuda
