// SPDX-License-Identifier: MIT
// Preconditions of index lists that a caller gives (attend.h). Kernels trust their lists: shapes
// are checked before memory is asked for, contents before every pass.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "coterie/group.h"

namespace coterie::ops {

// Shapes and types. Returns the number of clusters of groups with order (B, heads, rows) and
// offsets (items, heads, clusters + 1).
std::int64_t check_group_shapes(const AttentionCall& call, const char* side, const Groups& groups,
                                std::int64_t heads, std::int64_t rows);
// Returns the number of lists of a head in a tensor (items, heads, lists, size).
std::int64_t check_list_shape(const AttentionCall& call, const char* side, const TensorView& lists,
                              std::int64_t heads);

// Contents, item by item: offsets ascend from 0 to the number of rows and `order` holds each row
// once; with `ascending`, the rows of a cluster ascend.
void check_groups(const AttentionCall& call, const char* side, const Groups& groups,
                  const std::vector<Span>& spans, bool ascending);
// Every list ascends within the item's rows and ends with -1s.
void check_lists(const AttentionCall& call, const char* side, const TensorView& lists,
                 const std::vector<Span>& spans);

}  // namespace coterie::ops
