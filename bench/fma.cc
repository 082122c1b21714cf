// SPDX-License-Identifier: MIT
// Compiled once per COTERIE_ISA. Only static functions and the table: see src/CMakeLists.txt.
#include "bench/fma.h"

namespace coterie::bench::COTERIE_ISA {

namespace {

// As many accumulators as a kernel's register tile; more than the latency of an operation times
// the operations per cycle.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kAccumulators = 12;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kAccumulators = 24;
#else
constexpr int kBytes = 16, kAccumulators = 12;
#endif

// The constraint of a vector register.
#if defined(__aarch64__)
#define COTERIE_IN_REGISTER "+w"
#else
#define COTERIE_IN_REGISTER "+v"
#endif

template <class T>
constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
template <class T>
constexpr int kFlopsPerRound = 2 * kLanes<T>* kAccumulators;

// The accumulators stay in registers because the loops over them are fully unrolled; without the
// pragma g++ keeps them in memory, and this would measure loads and stores.
template <class T>
double loop(std::int64_t rounds) {
  typedef T Vec __attribute__((vector_size(kBytes)));
  Vec sum[kAccumulators] = {};
  Vec factor = {}, term = {};
  factor += T(0.5);
  term += T(1);
  asm volatile(""
               : COTERIE_IN_REGISTER(factor),
                 COTERIE_IN_REGISTER(term));  // opaque: prevents constant folding
#pragma GCC unroll 24
  for (int i = 0; i < kAccumulators; ++i)
    asm volatile("" : COTERIE_IN_REGISTER(sum[i]));  // keeps them distinct
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kAccumulators; ++i) sum[i] = sum[i] * factor + term;
  }
  Vec all = {};
#pragma GCC unroll 24
  for (int i = 0; i < kAccumulators; ++i) all += sum[i];
  double total = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) total += static_cast<double>(all[lane]);
  return total;
}

}  // namespace

extern const FmaLoops fma_loops;
const FmaLoops fma_loops = {loop<float>, loop<double>, kFlopsPerRound<float>,
                            kFlopsPerRound<double>};

}  // namespace coterie::bench::COTERIE_ISA
