// SPDX-License-Identifier: MIT
// Attention by any mechanism: forward, backward, the two halves of forward, and the quality.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel attention;
Kernel attention_backward;
Kernel attention_select;
Kernel attention_attend;
Kernel attention_quality;

}  // namespace coterie::stable_api
