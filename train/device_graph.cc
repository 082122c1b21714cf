// SPDX-License-Identifier: MIT
#include "train/device_graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>

namespace coterie::train {

struct DeviceGraph::Parts {
  at::cuda::CUDAGraph graph;
};

DeviceGraph::DeviceGraph() : parts_(std::make_unique<Parts>()) {}

DeviceGraph::~DeviceGraph() = default;

void DeviceGraph::record(const std::function<void()>& work) {
  c10::cuda::device_synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();  // the graph has memory of its own
  const c10::cuda::CUDAStreamGuard other(c10::cuda::getStreamFromPool());  // not the default one
  parts_->graph.capture_begin();
  work();
  parts_->graph.capture_end();
}

void DeviceGraph::run() { parts_->graph.replay(); }

}  // namespace coterie::train
