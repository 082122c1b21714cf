// SPDX-License-Identifier: MIT
// Hands out aligned pieces of a workspace. Without memory it only counts, so that the size a call
// needs is asked of the very code that takes it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/check.h"
#include "coterie/tensor.h"

namespace coterie {

class Arena {
 public:
  static constexpr std::int64_t kAlignment = 64;

  Arena() = default;  // counts only
  Arena(const char* op, const Workspace& workspace, std::int64_t needed)
      : base_(static_cast<std::byte*>(workspace.data)) {
    COTERIE_CHECK(workspace.bytes >= needed, op, "expected a workspace of at least ", needed,
                  " bytes; got ", workspace.bytes);
    COTERIE_CHECK(base_ || needed == 0, op, "expected a workspace in memory; got a null pointer");
    COTERIE_CHECK(reinterpret_cast<std::uintptr_t>(base_) % kAlignment == 0, op,
                  "expected a workspace aligned to ", kAlignment, " bytes");
  }

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
