// SPDX-License-Identifier: MIT
// Parts of a forward pass that the public interface lets run alone.
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

// The parts of a run that selects: hash, cluster, select, attend, as far as it has them. They point
// to the run. None of a run that does not select: attending is all it does.
std::vector<Part> parts_of(AttentionRun& run);

}  // namespace coterie::bench
