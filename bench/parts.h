// SPDX-License-Identifier: MIT
// Parts of a forward pass that can run alone through the public interface.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "bench/run.h"

namespace coterie::bench {

struct Part {
  std::optional<Timing> Measurement::*time;  // where its time belongs
  std::function<void()> run;
};

// The parts that a run has, among hash, cluster, select and attend; they point to the run. Empty
// for a run without a selection, which only attends.
std::vector<Part> parts_of(AttentionRun& run);

}  // namespace coterie::bench
