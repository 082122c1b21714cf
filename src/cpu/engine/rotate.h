// SPDX-License-Identifier: MIT
// Rotation of rows by the angles of their positions (coterie/positions.h).
#pragma once

#include "coterie/positions.h"

namespace coterie::cpu {

template <class T>
void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out);

}  // namespace coterie::cpu
