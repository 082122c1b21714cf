// SPDX-License-Identifier: MIT
// Peak rates of the machine, measured with as many threads as the library uses.
#pragma once

#include <cstdint>
#include <vector>

#include "coterie/tensor.h"

namespace coterie::bench {

// Multiplications and additions on registers only, in the instruction set in use, compiled like
// the kernels. Each thread times windows of a fraction of a millisecond and reports its median: on
// a machine with other load a thread is often preempted, but not in most windows.
class FmaPeak {
 public:
  explicit FmaPeak(DType dtype);  // f32 or f64
  void run();                     // some milliseconds
  double gflops() const;          // over all runs so far, sum of all threads

 private:
  double (*loop_)(std::int64_t rounds);
  std::int64_t rounds_ = 0;                      // of a window
  double flops_ = 0;                             // of a window
  std::vector<std::vector<double>> windows_ms_;  // of each thread
};

// Bytes read and written per second, in 10^9, copying memory larger than the caches.
double copy_gigabytes_per_second();

// Pairs of a 63-bit code and a centroid whose Hamming distance one thread compares per second,
// assigning 65,536 codes to the nearest of 256 centroids.
double hamming_pairs_per_second();

}  // namespace coterie::bench
