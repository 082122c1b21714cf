// SPDX-License-Identifier: MIT
#include "core/arena.h"

#include "core/check.h"

namespace coterie {

Arena::Arena(const char* op, const Workspace& workspace, std::int64_t needed)
    : op_(op),
      counting_(false),
      base_(static_cast<std::byte*>(workspace.data)),
      capacity_(workspace.bytes) {
  COTERIE_CHECK(
      workspace.bytes >= needed, op, "expected a workspace of at least ", needed,
      " bytes (what the operation's workspace_bytes function returns for these inputs); got ",
      workspace.bytes);
  COTERIE_CHECK(base_ || needed == 0, op, "expected a workspace in memory; got a null pointer");
  COTERIE_CHECK(reinterpret_cast<std::uintptr_t>(base_) % kAlignment == 0, op,
                "expected a workspace aligned to ", kAlignment, " bytes; got one that starts ",
                reinterpret_cast<std::uintptr_t>(base_) % kAlignment, " bytes after a boundary");
}

void Arena::refuse(std::int64_t count, std::int64_t size) const {
  fail(op_, "the workspace is too small for ", count, " more elements of ", size, " bytes; got ",
       capacity_ - used_, " of ", capacity_,
       " bytes left. It was sized for other inputs, or workspace_bytes counts too little");
}

}  // namespace coterie
