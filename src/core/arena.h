// SPDX-License-Identifier: MIT
// Hands out aligned pieces of a workspace. Without memory it only counts, so that the size a call
// needs is asked of the very code that takes it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "coterie/view.h"

namespace coterie {

class Arena {
 public:
  static constexpr std::int64_t kAlignment = 64;

  Arena() = default;  // counts only
  // Throws for a workspace of less than `needed` bytes.
  Arena(const char* op, const Workspace& workspace, std::int64_t needed);

  template <class T>
  T* take(std::int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }

  std::int64_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  std::int64_t used_ = 0;
};

}  // namespace coterie
