// SPDX-License-Identifier: MIT
// Attention by any mechanism: forward, backward, and the selection alone.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel attention;
Kernel attention_backward;
Kernel attention_select;

}  // namespace coterie::stable_api
