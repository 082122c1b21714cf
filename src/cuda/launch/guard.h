// SPDX-License-Identifier: MIT
// Makes the device of a call's tensors the current device for the duration of the call.
#pragma once

#include "coterie/view.h"

namespace coterie::cuda {

class DeviceGuard {
 public:
  // Refuses a device that does not exist.
  DeviceGuard(const char* op, Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;  // the device to return to; -1: it is the current one
};

}  // namespace coterie::cuda
