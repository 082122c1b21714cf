// SPDX-License-Identifier: MIT
#include "apps/coterie/processes.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "apps/coterie/interrupt.h"
#include "coterie/error.h"
#include "coterie/runtime.h"
#include "train/corpus.h"
#include "train/options.h"

namespace coterie::cli {
namespace {

namespace fs = std::filesystem;

// On the PATH, or with the torch that the program was built for.
std::string find_torchrun() {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = folder + "/torchrun";
    if (::access(file.c_str(), X_OK) == 0) return file;
  }
  if (::access(COTERIE_TORCHRUN, X_OK) == 0) return COTERIE_TORCHRUN;
  throw Error(
      "[train] --processes needs torchrun, which is not on the PATH: activate the Python "
      "environment with torch, or start ranks as docs/scaling.md says");
}

// The words of this command, without --processes and its number.
std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  std::vector<std::string> kept;
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] == "--processes")
      ++i;
    else if (!words[i].starts_with("--processes="))
      kept.push_back(words[i]);
  }
  return kept;
}

// Makes one GPU visible, that of the local rank, which is cuda:0 from here on. CUDA reads the
// variable when it starts.
void choose_gpu(const train::Place& place) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::vector<std::string> devices;
  std::istringstream list(visible == nullptr ? "" : visible);
  for (std::string device; std::getline(list, device, ',');) devices.push_back(device);
  if (devices.size() == 1) return;  // bound by the scheduler
  const auto own = static_cast<std::size_t>(place.local_rank);
  if (visible != nullptr && own >= devices.size()) {
    throw Error(
        fmt::format("[train] expected a GPU for each of {} ranks on this machine; "
                    "CUDA_VISIBLE_DEVICES names {}",
                    place.local_size, devices.size()));
  }
  const std::string device = visible == nullptr ? std::to_string(own) : devices[own];
  ::setenv("CUDA_VISIBLE_DEVICES", device.c_str(), 1);
}

void check_options(const train::Config& config) {
  if (config.device.starts_with("cuda:")) {
    throw Error(
        fmt::format("[train] expected --device cuda with several ranks, each of which takes "
                    "its own GPU; got {}",
                    config.device));
  }
  if (config.data == train::kStandardInput) {
    throw Error("[train] several ranks cannot share standard input: give --data a file or folder");
  }
}

// Options of this rank that differ from those of rank 0. The number of threads may.
void compare_options(const train::Config& config, train::Ranks& ranks) {
  const std::string first = ranks.from_first(train::config_text(config));
  std::string differences;
  for (const train::OptionChange& change :
       train::option_changes(train::parse_config(first, "rank 0"), config)) {
    if (change.name == "threads") continue;
    differences += fmt::format("{}--{} is {} instead of {}", differences.empty() ? "" : ", ",
                               change.name, change.after, change.before);
  }
  if (differences.empty()) return;
  throw Error(
      fmt::format("[train] rank {} has other options than rank 0: {}", ranks.rank(), differences));
}

void describe(const train::Config& config, const train::Ranks& ranks) {
  const std::int64_t parts = ranks.data_size(), rows = config.train.batch;
  fmt::print(stderr,
             "coterie: {} by {}: {} sequences of each batch on {}; optimiser state {}; rank 0 "
             "writes\n",
             ranks.size() == 1 ? std::string("1 rank") : fmt::format("{} ranks", ranks.size()),
             ranks.back_end(),
             rows % parts == 0 ? fmt::format("{}", rows / parts)
                               : fmt::format("{} or {}", rows / parts, rows / parts + 1),
             ranks.context_size() == 1
                 ? std::string("each")
                 : fmt::format("each of {} groups of {}, which split sequences and heads", parts,
                               ranks.context_size()),
             config.optimizer.shard ? "sharded" : "on each");
}

}  // namespace

void start_processes(int processes) {
  const std::string torchrun = find_torchrun();
  const std::string program = fs::read_symlink("/proc/self/exe").string();
  std::vector<std::string> words = {torchrun,           "--standalone",
                                    "--nproc-per-node", std::to_string(processes),
                                    "--no-python",      program};
  for (const std::string& word : own_words()) words.push_back(word);
  // torchrun warns and sets 1 unless it is set.
  const int each = std::max(1, coterie::threads() / processes);
  ::setenv("OMP_NUM_THREADS", std::to_string(each).c_str(), 0);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(torchrun.c_str(), arguments.data());
  throw Error("[train] cannot start " + torchrun);
}

std::optional<train::Place> own_place() {
  return train::find_place([](const char* name) { return std::getenv(name); });
}

std::unique_ptr<train::Ranks> meet_ranks(const train::Place& place, const train::Config& config,
                                         int timeout) {
  check_options(config);
  const bool gpu = config.device == "cuda";
  if (gpu) choose_gpu(place);
  leave_without_destructors();
  const auto other_failed = [](const std::string& message) {
    fmt::print(stderr, "coterie: {}\n", message);
    std::fflush(nullptr);
    std::_Exit(1);
  };
  auto ranks = std::make_unique<train::Ranks>(
      place,
      train::RankOptions{config.train.context, gpu, std::chrono::seconds(timeout), other_failed});
  try {
    compare_options(config, *ranks);
  } catch (const std::exception& error) {
    throw Error(ranks->explain(error));
  }
  if (ranks->first()) describe(config, *ranks);
  return ranks;
}

}  // namespace coterie::cli
