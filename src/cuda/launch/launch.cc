// SPDX-License-Identifier: MIT
#include "cuda/launch/launch.h"

#include <atomic>
#include <cstdint>

namespace coterie::cuda {
namespace {

// Kernels whose limit was raised, with the device in the 16 bits that addresses leave free: a
// lock-free hash set that only grows. Once it is full, other limits are raised on every launch.
class RaisedLimits {
 public:
  bool contains(std::uint64_t key) const {
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      const std::uint64_t found = place(key, probe).load(std::memory_order_acquire);
      if (found == key) return true;
      if (found == 0) return false;
    }
    return false;
  }
  void insert(std::uint64_t key) {
    for (std::size_t probe = 0; probe < kProbes; ++probe) {
      std::uint64_t expected = 0;
      std::atomic<std::uint64_t>& at = place(key, probe);
      if (at.compare_exchange_strong(expected, key, std::memory_order_acq_rel) || expected == key)
        return;
    }
  }

 private:
  static constexpr std::size_t kPlaces = 4096, kProbes = 64;

  std::atomic<std::uint64_t>& place(std::uint64_t key, std::size_t probe) const {
    const std::uint64_t mixed = key * 0x9e3779b97f4a7c15ull;
    return places_[((mixed >> 40) + probe) % kPlaces];
  }
  mutable std::atomic<std::uint64_t> places_[kPlaces] = {};
};

RaisedLimits raised;

}  // namespace

void allow_shared_memory(const void* kernel) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  const std::uint64_t key =
      static_cast<std::uint64_t>(device) << 48 | reinterpret_cast<std::uintptr_t>(kernel);
  if (raised.contains(key)) return;
  const int most = device_limits().shared_per_block;
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "asking for the attributes of a kernel");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  most - static_cast<int>(attributes.sharedSizeBytes)),
             "raising the shared memory of a kernel");
  raised.insert(key);  // after the limit: a thread that finds the key may launch
}

}  // namespace coterie::cuda
