// SPDX-License-Identifier: MIT
// The log of a run: OUT/log.jsonl, one JSON object a line. The report reads it.
//
//   {"kind":"run","task":...,"attention":...,"config":"<toml>","machine":{...},"parameters":n,
//    "metric":"accuracy","baselines":[{"name":..,"value":..}],"seed":..,"date":"...","leaks":bool,
//    "data":{"checksum":..,"bytes":..},"ranks":{"size":4,"data":2,"context":2,"backend":"gloo"}}
//   {"kind":"resume","step":100,"config":"<toml>","machine":{...},"date":"..."}
//   {"kind":"step","step":10,"loss":..,"lr":..,"grad_norm":..,"commitment":..,"tokens_per_s":..,
//    "seconds":..,"memory_bytes":..}
//   {"kind":"eval","step":200,"split":"valid","loss":..,"metric":..,"accuracy":..,"seconds":..,
//    "share":..,"strata":{"name":value,...}}
//   {"kind":"final",...}: as eval, at the end of the run
//   {"kind":"clusters","step":200,"layers":[{"layer":0,"group":1,"attention":"routing(...)",
//    "heads":[{"sizes":[..],"empty":n,"mass":..}]}]}
//   {"kind":"end","step":1000,"reason":"steps"|"patience"|"interrupted","seconds":..,
//    "peak_memory_bytes":..,"best":..,"best_step":..,"collectives":{"gradients":{"calls":..,
//    "bytes":..},...}}
//
// leaks: the selection of some heads sees the future. share: fraction of the validation data that
// was used. In a step line, loss and commitment are those of this step, commitment only with
// routing heads; seconds count training since step 0 without evaluations and checkpoints. In an
// eval line, metric is in the unit of the run line, accuracy is the fraction of correct answers and
// seconds is the duration of the evaluation. Memory is measured by memory.h. ranks and collectives:
// only if there are ranks (ranks.h); bytes are those that rank 0 gave to collectives.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace coterie::train {

// Appends lines, each written immediately. When a run resumes, drops the end line and all lines
// after the step from which it resumes.
class Log {
 public:
  static constexpr std::int64_t kNew = -1;
  Log(std::string path, std::int64_t resumed_step);
  void write(const nlohmann::json& line) const;  // throws Error on failure

 private:
  std::string path_;
};

// Progress shown to the user.
struct ProgressLine {
  std::string label;  // "copy  i-clustered(clusters=16)"
  std::int64_t step = 0, steps = 0;
  std::string score;  // "loss 0.512  accuracy 0.993", "bits per byte 2.31, valid 2.38"
  double tokens_per_s = 0, seconds_left = 0;
};
using ShowProgress = std::function<void(const ProgressLine&)>;

}  // namespace coterie::train
