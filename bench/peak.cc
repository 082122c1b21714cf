// SPDX-License-Identifier: MIT
#include "bench/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "bench/driver.h"
#include "bench/fma.h"
#include "bench/threads.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "ops/parts.h"

namespace coterie::bench {
namespace {

using Clock = std::chrono::steady_clock;

#if defined(__aarch64__)
const FmaLoops& loops_in_use() { return neon::fma_loops; }
#else
const FmaLoops& loops_in_use() {
  switch (cpu_isa()) {
    case CpuIsa::avx512_bf16:
      return avx512_bf16::fma_loops;
    case CpuIsa::avx512:
      return avx512::fma_loops;
    case CpuIsa::avx2:
      return avx2::fma_loops;
    default:
      return baseline::fma_loops;
  }
}
#endif

}  // namespace

// Threads beyond the number of cores add no arithmetic units.
FmaPeak::FmaPeak(DType dtype)
    : windows_ms_(std::min<std::size_t>(threads(), std::thread::hardware_concurrency())) {
  constexpr double kWindowFlops = 2e7;
  const FmaLoops& loops = loops_in_use();
  const bool wide = dtype == DType::f64;
  const int per_round = wide ? loops.f64_flops_per_round : loops.f32_flops_per_round;
  loop_ = wide ? loops.f64 : loops.f32;
  rounds_ = static_cast<std::int64_t>(kWindowFlops / per_round);
  flops_ = static_cast<double>(rounds_) * per_round;
}

void FmaPeak::run() {
  constexpr int kWindows = 40;
  static std::atomic<double> sink;  // keeps the loops from being optimised away
  run_in_threads(static_cast<int>(windows_ms_.size()), [this](int thread) {
    for (int window = 0; window < kWindows; ++window) {
      const Clock::time_point begin = Clock::now();
      sink = loop_(rounds_);
      const std::chrono::duration<double, std::milli> elapsed = Clock::now() - begin;
      windows_ms_[thread].push_back(elapsed.count());
    }
  });
}

double FmaPeak::gflops() const {
  double sum = 0;
  for (const auto& windows : windows_ms_) sum += flops_ / (1e6 * quantile(windows, 0.5));
  return sum;
}

double copy_gigabytes_per_second() {
  constexpr std::size_t kBytes = std::size_t{1} << 27;
  std::vector<char> from(kBytes, 1), to(kBytes);
  const int count = threads();
  const std::size_t share = kBytes / static_cast<std::size_t>(count);
  const Contender copy{"copy", {[&] {
                         run_in_threads(count, [&](int t) {
                           std::memcpy(to.data() + t * share, from.data() + t * share, share);
                         });
                       }}};
  const Timing timing = time_interleaved({copy}, {.repeats = 5, .min_repeats = 5})[0].total;
  return 2e-6 * static_cast<double>(share * count) / timing.fastest_ms;
}

double hamming_pairs_per_second() {
  constexpr std::int64_t kCodes = 65536, kCentroids = 256;
  HostTensor codes(DType::u64, {1, 1, kCodes}), labels(DType::i32, {1, 1, kCodes});
  const HostTensor centroids(DType::u64, {1, 1, kCentroids});
  const RandomStream stream{1, RandomUse::data, 0};
  for (std::int64_t i = 0; i < kCodes; ++i) {
    codes.data<std::uint64_t>()[i] = random_u64(stream, static_cast<std::uint64_t>(i)) >> 1;
  }
  const int before = threads();
  set_threads(1);
  const Contender assign{
      "", {[&] { hamming_kmeans({.iterations = 0}, codes, {}, labels, centroids); }}};
  const Timing timing = time_interleaved({assign}, {.repeats = 20, .min_repeats = 20})[0].total;
  set_threads(before);
  return 1e3 * static_cast<double>(kCodes * kCentroids) / timing.median_ms;
}

}  // namespace coterie::bench
