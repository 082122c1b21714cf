// SPDX-License-Identifier: MIT
// The GPU through the CUDA runtime.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "bench/device.h"
#include "coterie/error.h"
#include "coterie/runtime.h"

namespace coterie::bench {
namespace {

// Several times the largest L2 cache; writing it takes longer than the host needs to launch a pass.
constexpr std::int64_t kFlushBytes = std::int64_t{512} << 20;

void check(cudaError_t status) {
  if (status != cudaSuccess) throw Error(std::string("[cuda] ") + cudaGetErrorString(status));
}

std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

class Event {
 public:
  Event() { check(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() const { check(cudaEventRecord(event_, nullptr)); }
  void wait() const { check(cudaEventSynchronize(event_)); }
  double ms_since(const Event& earlier) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, earlier.event_, event_));
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

std::vector<double> time_by_events(const Contender& contender, void* flushed) {
  const std::vector<Event> events(contender.stages.size() + 1);
  check(cudaMemsetAsync(flushed, 0, size(kFlushBytes), nullptr));
  events[0].record();
  for (std::size_t s = 0; s < contender.stages.size(); ++s) {
    contender.stages[s]();
    events[s + 1].record();
  }
  events.back().wait();
  std::vector<double> stages_ms;
  for (std::size_t s = 0; s < contender.stages.size(); ++s) {
    stages_ms.push_back(events[s + 1].ms_since(events[s]));
  }
  return stages_ms;
}

}  // namespace

std::string why_no_device() { return cuda_available() ? "" : "no CUDA device that answers"; }

std::string device_description() {
  const std::vector<CudaDevice> devices = cuda_devices();
  if (devices.empty()) return "";
  const CudaDevice& device = devices[0];
  return device.name + ", sm_" + std::to_string(device.major) + std::to_string(device.minor) +
         ", " + std::to_string(device.multiprocessors) + " multiprocessors, " +
         std::to_string(device.memory_bytes >> 30) + " GiB";
}

std::shared_ptr<void> device_memory(std::int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, size(std::max<std::int64_t>(bytes, 1))));
  return {memory, [](void* p) { cudaFree(p); }};
}

void copy_to_device(void* to, const void* from, std::int64_t bytes) {
  check(cudaMemcpy(to, from, size(bytes), cudaMemcpyHostToDevice));
}

void copy_to_host(void* to, const void* from, std::int64_t bytes) {
  check(cudaMemcpy(to, from, size(bytes), cudaMemcpyDeviceToHost));
}

void fill_device(void* memory, int byte, std::int64_t bytes) {
  check(cudaMemset(memory, byte, size(bytes)));
}

void wait_for_device() { check(cudaDeviceSynchronize()); }

Stopwatch device_stopwatch() {
  return [flushed = device_memory(kFlushBytes)](const Contender& contender) {
    return time_by_events(contender, flushed.get());
  };
}

double device_copy_gigabytes_per_second() {
  const std::shared_ptr<void> from = device_memory(kFlushBytes), to = device_memory(kFlushBytes);
  fill_device(from.get(), 1, kFlushBytes);
  const Contender copy{"copy", {[&] {
                         check(cudaMemcpyAsync(to.get(), from.get(), size(kFlushBytes),
                                               cudaMemcpyDeviceToDevice, nullptr));
                       }}};
  const TimingPlan plan{.repeats = 10, .min_repeats = 10};
  const Timing timing = time_interleaved({copy}, plan, {}, device_stopwatch())[0].total;
  return 2e-6 * static_cast<double>(kFlushBytes) / timing.median_ms;
}

}  // namespace coterie::bench
