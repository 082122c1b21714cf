// SPDX-License-Identifier: MIT
// A build without other libraries.
#include "bench/opponent.h"

namespace coterie::bench {

std::vector<Opponent> make_opponents(const AttentionData&, bool, Pass) { return {}; }
std::optional<MatrixProduct> make_matrix_product(DType) { return std::nullopt; }
std::string opponent_name() { return ""; }
std::string opponent_description(Device) { return ""; }

}  // namespace coterie::bench
