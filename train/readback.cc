// SPDX-License-Identifier: MIT
#include "train/readback.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace coterie::train {

void synchronise(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::DeviceIndex{0};
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(index);
}

Readback::Readback(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> wide;
  for (const at::Tensor& value : values) wide.push_back(value.detach().to(at::kDouble));
  const at::Tensor all = at::stack(wide);
  if (all.is_cpu()) {
    host_ = all;
    return;
  }
  host_ = at::empty(all.sizes(), at::TensorOptions(at::kDouble).pinned_memory(true));
  host_.copy_(all, /*non_blocking=*/true);
  copied_.emplace(all.device().type());
  copied_->record(c10::impl::VirtualGuardImpl(all.device().type()).getStream(all.device()));
}

std::vector<double> Readback::read() const {
  if (copied_) copied_->synchronize();
  const double* const data = host_.const_data_ptr<double>();
  return {data, data + host_.numel()};
}

}  // namespace coterie::train
