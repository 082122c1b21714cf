// SPDX-License-Identifier: MIT
// Makes the device of a call's tensors the current device for the duration of the call.
#pragma once

#include "coterie/view.h"

namespace coterie::cuda {

class DeviceGuard {
 public:
  // Throws if the device does not exist.
  DeviceGuard(const char* op, Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;  // the device to restore; -1: none, it was already current
};

}  // namespace coterie::cuda
