// SPDX-License-Identifier: MIT
// GPU memory, copies and timing for the driver. The implementation is chosen at link time:
// device_cuda.cc or device_none.cc. All work runs in CUDA's default stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bench/driver.h"

namespace coterie::bench {

// Why nothing can run on a GPU (no CUDA in this build, no device on this machine); "" if it can.
std::string why_no_device();

// "NVIDIA H200, sm_90, 132 multiprocessors, 139 GiB"
std::string device_description();

// The functions below throw coterie::Error if there is no device.

// At least one byte.
std::shared_ptr<void> device_memory(std::int64_t bytes);
void copy_to_device(void* to, const void* from, std::int64_t bytes);
void copy_to_host(void* to, const void* from, std::int64_t bytes);
void fill_device(void* memory, int byte, std::int64_t bytes);
void wait_for_device();

// Times the stages with CUDA events, in milliseconds. Each run first writes memory larger than the
// caches; meanwhile the host enqueues the stages, so that launches do not delay them.
Stopwatch device_stopwatch();

// Bytes read and written per second, in 10^9, copying memory larger than the caches.
double device_copy_gigabytes_per_second();

}  // namespace coterie::bench
