// SPDX-License-Identifier: MIT
#include "train/place.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "coterie/error.h"

namespace coterie::train {
namespace {

constexpr int kMostRanks = 1 << 20, kMostPorts = 65535;

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  bool has(const char* name) const { return !text(name).empty(); }

  std::string text(const char* name) const {
    const char* const value = environment_(name);
    return value == nullptr ? "" : value;
  }

  std::string needed(const char* name) const {
    if (has(name)) return text(name);
    throw Error(
        fmt::format("[train] {} is not set: start ranks with torchrun or srun, or set RANK, "
                    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT (docs/scaling.md)",
                    name));
  }

  int number(const char* name, int low, int high) const {
    const std::string value = needed(name);
    int found = 0;
    const char* const end = value.data() + value.size();
    const auto read = std::from_chars(value.data(), end, found);
    if (read.ec == std::errc() && read.ptr == end && found >= low && found <= high) return found;
    throw Error(
        fmt::format("[train] expected {} from {} to {}; got \"{}\"", name, low, high, value));
  }

  int number_or(const char* name, int low, int high, int otherwise) const {
    return has(name) ? number(name, low, high) : otherwise;
  }

 private:
  const Environment& environment_;
};

Place place_of_torchrun(const Variables& variables) {
  Place place;
  place.size = variables.number("WORLD_SIZE", 1, kMostRanks);
  place.rank = variables.number("RANK", 0, place.size - 1);
  place.address = variables.needed("MASTER_ADDR");
  place.port = variables.number("MASTER_PORT", 1, kMostPorts);
  place.local_size = variables.number_or("LOCAL_WORLD_SIZE", 1, kMostRanks, place.size);
  place.local_rank =
      variables.number_or("LOCAL_RANK", 0, place.local_size - 1, place.rank % place.local_size);
  place.agent = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  place.restarts = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0, kMostRanks, 0);
  place.restarts_allowed = variables.number_or("TORCHELASTIC_MAX_RESTARTS", 0, kMostRanks, 0) > 0;
  return place;
}

// "4(x2),3": the tasks of the first node.
int leading_number(const std::string& text, int otherwise) {
  int found = otherwise;
  std::from_chars(text.data(), text.data() + text.size(), found);
  return found;
}

Place place_of_slurm(const Variables& variables) {
  constexpr int kFirstPort = 20000, kPorts = 20000;  // one per job, so that jobs can share nodes
  Place place;
  place.size = variables.number("SLURM_STEP_NUM_TASKS", 1, kMostRanks);
  place.rank = variables.number("SLURM_PROCID", 0, place.size - 1);
  place.local_rank = variables.number("SLURM_LOCALID", 0, kMostRanks);
  place.local_size = std::max(place.local_rank + 1,
                              leading_number(variables.text("SLURM_STEP_TASKS_PER_NODE"), 1));
  place.address = variables.has("MASTER_ADDR")
                      ? variables.text("MASTER_ADDR")
                      : first_host(variables.needed("SLURM_STEP_NODELIST"));
  const int job = leading_number(variables.text("SLURM_JOB_ID"), 0);
  place.port = variables.number_or("MASTER_PORT", 1, kMostPorts, kFirstPort + job % kPorts);
  place.restarts = variables.number_or("SLURM_RESTART_COUNT", 0, kMostRanks, 0);
  place.restarts_allowed = place.restarts > 0;
  return place;
}

}  // namespace

std::optional<Place> find_place(const Environment& environment) {
  const Variables variables(environment);
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) return place_of_torchrun(variables);
  // A batch script has SLURM_PROCID too, but only srun starts steps.
  if (!variables.has("SLURM_PROCID") || !variables.has("SLURM_STEP_NUM_TASKS")) return std::nullopt;
  const Place place = place_of_slurm(variables);
  return place.size > 1 ? std::optional(place) : std::nullopt;
}

std::string first_host(const std::string& list) {
  const std::size_t open = list.find('['), comma = list.find(',');
  if (open == std::string::npos || comma < open) return list.substr(0, comma);
  const std::size_t close = list.find(']', open);
  const std::string inside = list.substr(open + 1, close - open - 1);
  std::string rest = close == std::string::npos ? "" : list.substr(close + 1);
  rest = rest.substr(0, rest.find(','));
  return list.substr(0, open) + inside.substr(0, inside.find_first_of("-,")) + rest;
}

}  // namespace coterie::train
