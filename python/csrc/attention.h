// SPDX-License-Identifier: MIT
// Attention by any mechanism: forward, backward, the selection alone, and the quality.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel attention;
Kernel attention_backward;
Kernel attention_select;
Kernel attention_quality;

}  // namespace coterie::stable_api
