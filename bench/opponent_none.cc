// SPDX-License-Identifier: MIT
// A build without other libraries.
#include "bench/opponent.h"

namespace coterie::bench {

std::vector<Opponent> make_opponents(const AttentionData&, bool) { return {}; }
std::string opponent_name() { return ""; }
std::string opponent_description() { return ""; }

}  // namespace coterie::bench
