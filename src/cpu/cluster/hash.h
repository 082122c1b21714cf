// SPDX-License-Identifier: MIT
// Hash codes on the CPU (see ops/parts.h).
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cpu/engine/segment.h"

namespace coterie::cpu {

// planes (bits x width) and thresholds (bits), row-major f32.
void isotropic_planes(std::uint64_t seed, bool bias, std::int64_t bits, std::int64_t width,
                      float* planes, float* thresholds);

// Planes (bits x Dk) of one item and key/value head from differences of its keys.
template <class T>
void key_difference_planes(const AttentionCall& call, std::int64_t item, std::int64_t kv_head,
                           std::int64_t bits, float* planes);

// thresholds[r] = plane_r . mean query of one item and head; `mean` is scratch of Dk elements.
template <class T>
void mean_query_thresholds(const AttentionCall& call, std::int64_t item, std::int64_t head,
                           std::int64_t bits, const float* planes, T* mean, float* thresholds);

// Writes the codes of rows [first, first + count), count <= kQueryTile.
template <class T>
void hash_tile(const Rows& x, std::int64_t first, std::int64_t count, std::int64_t bits,
               const float* planes, const float* thresholds, Tiles<T>& tiles, std::uint64_t* codes);

}  // namespace coterie::cpu
