// SPDX-License-Identifier: MIT
// Where this process is among those of a run, by the environment variables of torchrun, of Slurm's
// srun, or set by hand. Without torch.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace coterie::train {

struct Place {
  int rank = 0, size = 1;              // of the whole run
  int local_rank = 0, local_size = 1;  // on this machine
  std::string address;                 // of rank 0, where processes meet
  int port = 0;
  bool agent = false;  // torchrun's agent serves that port, not rank 0
  int restarts = 0;    // after failures (torchrun) or preemption (Slurm)
  bool restarts_allowed = false;
};

// The value of a variable, or null.
using Environment = std::function<const char*(const char* name)>;

// Empty if this process is alone: no variables, or one task of Slurm. Throws Error on variables
// that are missing or make no sense.
std::optional<Place> find_place(const Environment& environment);

// The first name of a Slurm list: "gpu[003-006,9],login" -> "gpu003".
std::string first_host(const std::string& list);

}  // namespace coterie::train
