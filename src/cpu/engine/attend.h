// SPDX-License-Identifier: MIT
// The CPU back end of attend.h, for checked calls and lists.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "coterie/attend.h"

namespace coterie::cpu {

std::int64_t banded_bytes(const AttentionCall& call, const BandedLists& lists);
void attend_banded(const AttentionCall& call, const BandedLists& lists,
                   const AttentionResult& result, const Workspace& workspace);
void attend_banded_backward(const AttentionCall& call, const BandedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace);

std::int64_t shared_bytes(const AttentionCall& call, const SharedLists& lists);
void attend_shared(const AttentionCall& call, const SharedLists& lists,
                   const AttentionResult& result, const Workspace& workspace);
void attend_shared_backward(const AttentionCall& call, const SharedLists& lists,
                            const AttentionResult& result, const TensorView& grad_out,
                            const AttentionGradients& gradients, const Workspace& workspace);

std::int64_t members_bytes(const AttentionCall& call, const MemberLists& lists);
void attend_members(const AttentionCall& call, const MemberLists& lists,
                    const AttentionResult& result, const Workspace& workspace);
void attend_members_backward(const AttentionCall& call, const MemberLists& lists,
                             const AttentionResult& result, const TensorView& grad_out,
                             const AttentionGradients& gradients, const Workspace& workspace);

void merge_partials(const TensorView& parts, const TensorView& part_lse, const TensorView& out,
                    const TensorView& lse);

}  // namespace coterie::cpu
