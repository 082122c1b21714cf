// SPDX-License-Identifier: MIT
// Hands out aligned pieces of a workspace. Without memory it only counts, so the code that takes
// the pieces also computes the size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "coterie/view.h"

namespace coterie {

class Arena {
 public:
  static constexpr std::int64_t kAlignment = 64;

  Arena() = default;  // counts only
  // Throws if the workspace has fewer than `needed` bytes.
  Arena(const char* op, const Workspace& workspace, std::int64_t needed);

  // Throws if the piece does not fit.
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t size = sizeof(T), room = (capacity_ - used_) / kAlignment * kAlignment;
    if (count < 0 || count > room / size) refuse(count, size);
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * size + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }

  std::int64_t used() const { return used_; }
  // Whether this only counts, so nothing may be launched. False for a workspace of 0 bytes.
  bool counting() const { return counting_; }

 private:
  [[noreturn]] void refuse(std::int64_t count, std::int64_t size) const;

  const char* op_ = "workspace";
  bool counting_ = true;
  std::byte* base_ = nullptr;
  std::int64_t capacity_ = std::numeric_limits<std::int64_t>::max();
  std::int64_t used_ = 0;
};

}  // namespace coterie
