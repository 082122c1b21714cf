// SPDX-License-Identifier: MIT
// A build without CUDA.
#include "bench/device.h"
#include "coterie/error.h"

namespace coterie::bench {
namespace {

[[noreturn]] void refuse() {
  throw Error("[bench] expected a CUDA device; got " + why_no_device());
}

}  // namespace

std::string why_no_device() { return "a program built without CUDA"; }
std::string device_description() { return ""; }
std::shared_ptr<void> device_memory(std::int64_t) { refuse(); }
void copy_to_device(void*, const void*, std::int64_t) { refuse(); }
void copy_to_host(void*, const void*, std::int64_t) { refuse(); }
void fill_device(void*, int, std::int64_t) { refuse(); }
void wait_for_device() { refuse(); }
Stopwatch device_stopwatch() { refuse(); }
double device_copy_gigabytes_per_second() { refuse(); }

}  // namespace coterie::bench
