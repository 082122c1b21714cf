// SPDX-License-Identifier: MIT
// Hands out aligned pieces of a workspace. Without memory it only counts, so that the size a call
// needs is asked of the very code that takes it.
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
  // Throws for a workspace of less than `needed` bytes.
  Arena(const char* op, const Workspace& workspace, std::int64_t needed);

  // Throws for a piece that the workspace has no room for.
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t size = sizeof(T), room = (capacity_ - used_) / kAlignment * kAlignment;
    if (count < 0 || count > room / size) refuse(count, size);
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * size + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }

  std::int64_t used() const { return used_; }
  // Whether there is no memory: nothing may be launched. A workspace of 0 bytes is one.
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
