// SPDX-License-Identifier: MIT
// Matrix products in bf16 within a scope.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>

namespace coterie::train {

class AutocastGuard {
 public:
  AutocastGuard(c10::Device device, bool bf16)
      : type_(device.type()),
        was_enabled_(at::autocast::is_autocast_enabled(type_)),
        was_dtype_(at::autocast::get_autocast_dtype(type_)) {
    at::autocast::set_autocast_enabled(type_, bf16);
    at::autocast::set_autocast_dtype(type_, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastGuard() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, was_enabled_);
    at::autocast::set_autocast_dtype(type_, was_dtype_);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType type_;
  bool was_enabled_;
  at::ScalarType was_dtype_;
};

}  // namespace coterie::train
