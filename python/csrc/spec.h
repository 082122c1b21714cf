// SPDX-License-Identifier: MIT
// Attention specs as operators take them: as text.
#pragma once

#include <string>

#include "coterie/mechanism.h"

namespace coterie::stable_api {

// The mechanism that `text`, a spec of one group without a head count, names. Remembers what it has
// parsed.
Mechanism mechanism_of(const std::string& text);

}  // namespace coterie::stable_api
