// SPDX-License-Identifier: MIT
// Work on a GPU that is recorded once and then repeated with one call: a CUDA graph. The host has
// nothing to do for it but the call.
#pragma once

#include <functional>
#include <memory>

namespace coterie::train {

class DeviceGraph {
 public:
  DeviceGraph();  // throws if the build has no CUDA
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  // Records what `work` launches without running it. Tensors that it allocates keep their memory,
  // those it reads are read again in every run. It must not wait for the GPU.
  void record(const std::function<void()>& work);
  // Runs it, in the order of the current stream.
  void run();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace coterie::train
