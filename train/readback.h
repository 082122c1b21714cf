// SPDX-License-Identifier: MIT
// Numbers that are read from the device later, so that the host need not wait for it in every step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <vector>

namespace coterie::train {

// Waits for all work on a device.
void synchronise(c10::Device device);

class Readback {
 public:
  // `values` are 0-dimensional. On a GPU the copy runs after the work in the current stream.
  explicit Readback(const std::vector<at::Tensor>& values);
  // Waits for that copy, not for work that was launched after it.
  std::vector<double> read() const;

 private:
  at::Tensor host_;
  std::optional<c10::Event> copied_;
};

}  // namespace coterie::train
