// SPDX-License-Identifier: MIT
#include "train/checkpoint.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "formats/files.h"
#include "formats/json_lines.h"

namespace coterie::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kModel = "model.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kConfig = "config.toml";
constexpr const char* kState = "state.json";
constexpr const char* kBest = "best";
constexpr const char* kDamaged = ".damaged";

std::string write_tensors(const std::string& path, const NamedTensors& tensors) {
  write_safetensors(path, to_safetensors(tensors));
  return file_checksum(path);
}

NamedTensors read_tensors(const std::string& path, const std::string& expected) {
  if (expected.empty()) {  // other programs may leave the checksum out
    return from_safetensors(read_safetensors(path));
  }
  if (!expected.starts_with(kChecksumKind)) {
    throw Error(
        fmt::format("[checkpoint] {}: state.json has checksum \"{}\", which does not start "
                    "with {} (an older version wrote this checkpoint; train again)",
                    path, expected, kChecksumKind));
  }
  const SafeTensors stored = read_safetensors(path);
  const std::string got = file_checksum(path);
  if (got != expected) {
    throw Error(fmt::format("[checkpoint] {} is damaged: expected checksum {}; got {}", path,
                            expected, got));
  }
  return from_safetensors(stored);
}

json state_json(const TrainState& state) {
  json out = {{"step", state.step},
              {"evaluations_without_improvement", state.evaluations_without_improvement},
              {"best", nullptr},
              {"best_step", state.best_step},
              {"seconds", state.seconds},
              {"evaluated_step", state.evaluated_step},
              {"threads", state.threads}};
  if (state.best) out["best"] = *state.best;
  return out;
}

TrainState parse_state(const json& in) {
  TrainState state;
  in.at("step").get_to(state.step);
  in.at("evaluations_without_improvement").get_to(state.evaluations_without_improvement);
  if (!in.at("best").is_null()) state.best = in.at("best").get<double>();
  in.at("best_step").get_to(state.best_step);
  in.at("seconds").get_to(state.seconds);
  state.evaluated_step = in.value("evaluated_step", state.step);  // absent: another program's
  state.threads = in.value("threads", 0);
  return state;
}

// The task's files that state.json lists.
TaskFiles read_files(const std::string& folder, const json& checksums) {
  TaskFiles files;
  for (const auto& [name, sum] : checksums.items()) {
    if (name != fs::path(name).filename() || name.empty() || name == "." || name == "..") {
      throw Error(fmt::format("[checkpoint] {}/{}: expected names of files; got \"{}\"", folder,
                              kState, name));
    }
    std::string text = read_file(folder + "/" + name, kTaskFile);
    const std::string expected = sum.get<std::string>(), got = text_checksum(text);
    if (got != expected) {
      throw Error(fmt::format("[checkpoint] {}/{} is damaged: expected checksum {}; got {}", folder,
                              name, expected, got));
    }
    files[name] = std::move(text);
  }
  return files;
}

// The step in "step-00000200"; none in other names.
std::optional<std::int64_t> step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  const std::string digits = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : "";
  const bool number =
      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (digits.empty() || digits.size() > 18 || !number) return std::nullopt;
  return std::stoll(digits);
}

void make_folders(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw Error(fmt::format("[files] cannot create folder {}: {}", path, error.message()));
}

void remove_entry(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw Error(fmt::format("[files] cannot remove {}: {}", path, error.message()));
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  const bool missing =
      error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
  if (error && !missing) {
    throw Error(fmt::format("[files] cannot list {}: {}", folder, error.message()));
  }
  return names;
}

// What is wrong with a checkpoint; empty if it can be loaded.
std::string damage(const std::string& folder) {
  try {
    load_checkpoint(folder);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

void Checkpoints::save(const Checkpoint& checkpoint, bool best) const {
  make_folders(folder_);
  const std::string target = path(checkpoint.state.step);
  write_folder(target, [&](const std::string& folder) {
    json state = state_json(checkpoint.state);
    state["checksums"] = {
        {kModel, write_tensors(folder + "/" + kModel, checkpoint.model)},
        {kOptimizer, write_tensors(folder + "/" + kOptimizer, checkpoint.optimizer)}};
    write_file(folder + "/" + kConfig, checkpoint.config);
    state["files"] = json::object();
    for (const auto& [name, text] : checkpoint.files) {
      write_file(folder + "/" + name, text);
      state["files"][name] = text_checksum(text);
    }
    state["data"] = {{"checksum", checkpoint.data.checksum}, {"bytes", checkpoint.data.bytes}};
    write_file(folder + "/" + kState, state.dump(2) + "\n");
  });
  if (best) mark_best(checkpoint.state.step);
}

void Checkpoints::mark_best(std::int64_t step) const {
  write_file(folder_ + "/" + kBest, fs::path(path(step)).filename().string() + "\n");
}

void Checkpoints::set_aside_after(const TrainState& state) const {
  for (const std::int64_t step : steps()) {
    if (step <= state.step) continue;
    const std::string aside = path(step) + kDamaged;
    remove_entry(aside);
    std::error_code error;
    fs::rename(path(step), aside, error);
    if (error) {
      throw Error(
          fmt::format("[files] cannot rename {} to {}: {}", path(step), aside, error.message()));
    }
  }
  if (!best() && fs::exists(path(state.best_step))) mark_best(state.best_step);
}

void Checkpoints::prune(std::int64_t keep) const {
  const std::vector<std::int64_t> all = steps();
  const std::optional<std::int64_t> kept = best();
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(all.size()) - keep; ++i) {
    const std::int64_t step = all[static_cast<std::size_t>(i)];
    if (step != kept) remove_entry(path(step));
  }
  for (const std::string& name : names_in(folder_)) {
    if (name.find(kPartial) != std::string::npos) remove_entry(folder_ + "/" + name);
  }
}

std::vector<std::int64_t> Checkpoints::steps() const {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(folder_)) {
    if (const auto step = step_of(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<std::int64_t> Checkpoints::best() const {
  const std::string file = folder_ + "/" + kBest;
  if (!fs::exists(file)) return std::nullopt;
  std::string name = read_file(file, kSmallFile);
  while (!name.empty() && name.back() == '\n') name.pop_back();
  const auto step = step_of(name);
  return step && fs::exists(path(*step)) ? step : std::nullopt;
}

std::string Checkpoints::path(std::int64_t step) const {
  return fmt::format("{}/step-{:08}", folder_, step);
}

Checkpoint load_checkpoint(const std::string& folder) {
  Checkpoint checkpoint;
  const std::string state_file = folder + "/" + kState;
  const std::string text = read_file(state_file, kSmallFile);
  check_json(text, "[checkpoint] " + state_file);
  std::string model_sum, optimizer_sum;
  try {
    const json state = json::parse(text);
    checkpoint.state = parse_state(state);
    model_sum = state.at("checksums").value(kModel, "");
    optimizer_sum = state.at("checksums").at(kOptimizer).get<std::string>();
    checkpoint.files = read_files(folder, state.value("files", json::object()));
    const json data = state.value("data", json::object());
    checkpoint.data = {data.value("checksum", ""), data.value("bytes", std::int64_t{0})};
  } catch (const json::exception& error) {
    throw Error(fmt::format("[checkpoint] {} is damaged: {}", state_file, error.what()));
  }
  checkpoint.model = read_tensors(folder + "/" + kModel, model_sum);
  checkpoint.optimizer = read_tensors(folder + "/" + kOptimizer, optimizer_sum);
  checkpoint.config = read_file(folder + "/" + kConfig, kConfigFile);
  return checkpoint;
}

std::string find_checkpoint(const std::string& path, bool best, std::string* warning) {
  if (fs::exists(path + "/" + kState) || fs::exists(path + "/" + kModel)) return path;
  const Checkpoints run(path);
  std::vector<std::int64_t> candidates = run.steps();
  if (candidates.empty()) {
    throw Error(fmt::format(
        "[checkpoint] expected a checkpoint or a run's folder with checkpoints; got {}{}", path,
        fs::exists(path) ? "" : ", which does not exist"));
  }
  const std::int64_t wanted = best ? run.best().value_or(candidates.back()) : candidates.back();
  std::erase_if(candidates, [&](std::int64_t step) { return step > wanted; });
  std::string first_damage;
  while (!candidates.empty()) {
    const std::string folder = run.path(candidates.back());
    const std::string wrong = damage(folder);
    if (wrong.empty()) {
      if (!first_damage.empty() && warning != nullptr) {
        *warning = fmt::format("{}; using {} instead", first_damage, folder);
      }
      return folder;
    }
    if (first_damage.empty()) first_damage = wrong;
    candidates.pop_back();
  }
  throw Error(first_damage);
}

}  // namespace coterie::train
