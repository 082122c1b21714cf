// SPDX-License-Identifier: MIT
#include "core/arena.h"

#include "core/check.h"

namespace coterie {

Arena::Arena(const char* op, const Workspace& workspace, std::int64_t needed)
    : base_(static_cast<std::byte*>(workspace.data)) {
  COTERIE_CHECK(workspace.bytes >= needed, op, "expected a workspace of at least ", needed,
                " bytes; got ", workspace.bytes);
  COTERIE_CHECK(base_ || needed == 0, op, "expected a workspace in memory; got a null pointer");
  COTERIE_CHECK(reinterpret_cast<std::uintptr_t>(base_) % kAlignment == 0, op,
                "expected a workspace aligned to ", kAlignment, " bytes");
}

}  // namespace coterie
