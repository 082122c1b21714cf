// SPDX-License-Identifier: MIT
// The attention of every layer and head of an encoder, chosen from measurements: the cheapest whose
// error of the encoder's output stays under a target (coterie/choice.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coterie/choice.h"
#include "train/pretrained/approximate.h"

namespace coterie::train {

// Specs from cheap to exact for sequences of `length` tokens; the last is "full". Those that would
// be exact at this length are left out.
std::vector<std::string> default_ladder(std::int64_t length);

struct CalibrateOptions {
  std::vector<std::string> ladder;
  std::vector<double> targets;  // relative errors of the encoder's rows, Frobenius
  double seconds = 0.3;         // of each timing
  std::uint64_t seed = 1;
  std::function<void(const std::string& work, std::int64_t done, std::int64_t all)> progress{};
};

// A whole model on the held-out texts.
struct MeasuredAttention {
  std::string name;
  std::vector<AttentionSpec> specs;  // one per layer
  double error = 0;                  // of the rows, relative
  double seconds = 0;                // of a pass over a text
};

struct CalibratedTarget {
  double target = 0;
  Choice choice;
  MeasuredAttention measured;
};

struct Calibration {
  std::vector<std::string> ladder;
  std::size_t full = 0;  // place of full attention in the ladder
  std::vector<LayerMeasurements> layers;
  std::vector<MeasuredAttention> uniform;  // every rung in all heads
  std::vector<CalibratedTarget> targets;
};

// Measures on `texts`, verifies on `held_out`; all have the same length.
Calibration calibrate(PretrainedEncoder& encoder, const std::vector<EncodedText>& texts,
                      const std::vector<EncodedText>& held_out, const CalibrateOptions& options);

// "full: at 512 tokens no other attention of the ladder is faster", or which heads stay full and
// why; lines for readers.
std::vector<std::string> explain(const CalibratedTarget& target, std::int64_t length);

}  // namespace coterie::train
