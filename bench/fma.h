// SPDX-License-Identifier: MIT
// A loop of multiply-adds on registers, one per instruction set.
#pragma once

#include <cstdint>

namespace coterie::bench {

// Each loop runs `rounds` rounds of flops_per_round and returns a sum, so that no work can be
// optimised away.
struct FmaLoops {
  double (*f32)(std::int64_t rounds);
  double (*f64)(std::int64_t rounds);
  int f32_flops_per_round, f64_flops_per_round;
};

namespace baseline {
extern const FmaLoops fma_loops;
}
namespace avx2 {
extern const FmaLoops fma_loops;
}
namespace avx512 {
extern const FmaLoops fma_loops;
}
namespace avx512_bf16 {
extern const FmaLoops fma_loops;
}
namespace neon {
extern const FmaLoops fma_loops;
}

}  // namespace coterie::bench
