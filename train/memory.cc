// SPDX-License-Identifier: MIT
#include "train/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace coterie::train {
namespace {

// The value of a line "VmRSS:   1234 kB" in /proc/self/status; 0 if it is missing.
std::int64_t process_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kibibytes = 0;
    if (word == key + ":" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

c10::CachingDeviceAllocator::Stat device_bytes(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[0];  // of all pools together
}

}  // namespace

MemoryMeter::MemoryMeter(c10::Device device) : device_(device) {
  if (!device_.is_cpu()) {
    if (!device_.has_index()) device_.set_index(0);
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
    return;
  }
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // resets VmHWM
  start_ = process_bytes("VmRSS");
}

std::int64_t MemoryMeter::bytes() const {
  if (!device_.is_cpu()) return device_bytes(device_).current;
  return std::max<std::int64_t>(0, process_bytes("VmRSS") - start_);
}

std::int64_t MemoryMeter::peak_bytes() const {
  if (!device_.is_cpu()) return device_bytes(device_).peak;
  return std::max<std::int64_t>(0, process_bytes("VmHWM") - start_);
}

}  // namespace coterie::train
