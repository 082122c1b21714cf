// SPDX-License-Identifier: MIT
// Cases of k-means, and checks of a result that need no other implementation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coterie/kmeans.h"
#include "coterie/tensor.h"
#include "ref/ref.h"

namespace coterie::test {

struct KMeansCase {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t problems = 1, rows = 1, width = 1, clusters = 1;
  KMeansParams params = {};
  // integers: sums are exact; offset: far from zero; spoilt: some rows are not finite; equal: few
  // different rows.
  bool integers = false, offset = false, spoilt = false, equal = false;
  bool exact = false;  // equals the specification
};
void PrintTo(const KMeansCase& c, std::ostream* out);

std::vector<KMeansCase> kmeans_cases(bool cpu);

// Rows of a case, and memory for its results.
struct KMeansOutcome {
  HostTensor x, centroids, labels, counts;

  explicit KMeansOutcome(const KMeansCase& c);
  KMeansResult result() const { return {centroids, labels, counts}; }
};

// Labels are of the nearest centroids, up to rounding; counts are those of the labels; rows that
// are not finite have none; no cluster is empty if that was asked for and can be.
void expect_clustering(const KMeansCase& c, const KMeansOutcome& got);
void expect_equal(const KMeansOutcome& got, const KMeansOutcome& want);

}  // namespace coterie::test
