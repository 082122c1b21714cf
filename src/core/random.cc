// SPDX-License-Identifier: MIT
#include "coterie/random.h"

#include <cmath>

namespace coterie {

double random_normal(const RandomStream& stream, std::uint64_t index) {
  const RandomBits bits = stream.at(index);
  const double radius = std::sqrt(-2.0 * std::log(random_unit(bits.word[0])));
  return radius * std::cos(6.283185307179586 * random_unit(bits.word[1]));
}

}  // namespace coterie
