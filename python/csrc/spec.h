// SPDX-License-Identifier: MIT
// Attention specs as text, which is how operators take them.
#pragma once

#include <string>

#include "coterie/mechanism.h"

namespace coterie::stable_api {

// Parses `text`, a spec of one group without a head count. Caches results.
Mechanism mechanism_of(const std::string& text);

}  // namespace coterie::stable_api
