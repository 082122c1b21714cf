// SPDX-License-Identifier: MIT
#include "core/arena.h"

#include "core/check.h"

namespace coterie {

Arena::Arena(const char* op, const Workspace& workspace, std::int64_t needed)
    : op_(op),
      counting_(false),
      base_(static_cast<std::byte*>(workspace.data)),
      capacity_(workspace.bytes) {
  COTERIE_CHECK(workspace.bytes >= needed, op, "expected a workspace of at least ", needed,
                " bytes, as the operation's workspace_bytes function counts for these inputs; got ",
                workspace.bytes);
  COTERIE_CHECK(base_ || needed == 0, op, "expected a workspace in memory; got a null pointer");
  COTERIE_CHECK(reinterpret_cast<std::uintptr_t>(base_) % kAlignment == 0, op,
                "expected a workspace aligned to ", kAlignment, " bytes");
}

void Arena::refuse(std::int64_t count, std::int64_t size) const {
  fail(op_, "expected room for ", count, " elements of ", size, " bytes in the workspace; got ",
       capacity_ - used_, " of ", capacity_,
       " bytes left. The operation takes more than it counts, or a size is not what was counted");
}

}  // namespace coterie
