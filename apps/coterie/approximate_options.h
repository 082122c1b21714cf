// SPDX-License-Identifier: MIT
// Options of `coterie approximate`, and what it writes.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/pretrained/calibrate.h"

namespace coterie::cli {

struct ApproximateVerb {
  std::string model;  // folder of an encoder, or of a run
  std::vector<std::string> attention;
  train::EncoderTaskOptions task;
  bool torch = false;                                   // speeds with torch's attention too
  std::vector<std::string> target_words, length_words;  // as they are given
  std::vector<double> targets;                          // empty: no choice
  std::vector<std::string> ladder;
  std::int64_t samples = 4;  // texts to measure, and as many to verify
  std::vector<std::int64_t> lengths;
  std::int64_t batch_tokens = 0;  // 0: by device
  std::int64_t draws = 1000;
  double seconds = 0.5;  // of each timing
  std::string device = "cpu", dtype = "f32";
  int threads = 0;
  std::uint64_t seed = 1;
  std::string json, report, out;
};

// Lines of the record (--json).
nlohmann::ordered_json approximate_line(const ApproximateVerb& verb,
                                        const train::EncoderTask* task);
nlohmann::ordered_json result_line(const train::ApproximateResult& result);
nlohmann::ordered_json calibration_line(const train::Calibration& calibration,
                                        const ApproximateVerb& verb);

void print_results_header(const train::EncoderTask& task);
void print_approximation(const train::ApproximateResult& result,
                         const train::ApproximateResult& full);
void print_calibration(const train::Calibration& calibration, std::int64_t length);

// {"coterie_specs": 1, "layers": [{"name", "spec"}], "about": ...}: what --attention FILE.json and
// coterie.hf.use read.
nlohmann::ordered_json spec_file_json(const train::CalibratedTarget& target,
                                      const train::Calibration& calibration,
                                      const std::vector<std::string>& layers,
                                      const ApproximateVerb& verb);

}  // namespace coterie::cli
