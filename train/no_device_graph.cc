// SPDX-License-Identifier: MIT
#include "coterie/error.h"
#include "train/device_graph.h"

namespace coterie::train {

struct DeviceGraph::Parts {};

DeviceGraph::DeviceGraph() {
  throw Error("[train] this program was built without CUDA graphs: leave out --train.graph");
}

DeviceGraph::~DeviceGraph() = default;

void DeviceGraph::record(const std::function<void()>&) {}

void DeviceGraph::run() {}

}  // namespace coterie::train
