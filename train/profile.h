// SPDX-License-Identifier: MIT
// Where the time of training steps goes, by torch's profiler (Kineto).
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace coterie::train {

// Per step, in milliseconds.
struct ProfileRow {
  std::string name;
  double milliseconds = 0;
  double calls = 0;  // kernels, or operations on the CPU
};

struct StepProfile {
  double milliseconds = 0;          // of a step while it is profiled
  std::vector<ProfileRow> parts;    // attention, matrix products, ...; largest first
  std::vector<ProfileRow> kernels;  // the same time by kernel or operation, largest first
};

// Runs `step` that many times. On a GPU the time is that of its kernels and copies, and the part
// "idle" is the time without any; on the CPU it is the time of operations without those they call.
StepProfile profile_steps(int steps, c10::Device device, const std::function<void()>& step);

// The part that a kernel or operation belongs to, by its name.
std::string profile_part(const std::string& name);

}  // namespace coterie::train
