// SPDX-License-Identifier: MIT
// coterie inspect: statistics of a trained model's attention, head by head.
#include "train/inspect.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "formats/files.h"
#include "loaded_model.h"
#include "train/collapse.h"
#include "train/option_values.h"
#include "train/save_rows.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InspectOptions {
  ModelOptions model;
  std::int64_t rows = 4;
  std::uint64_t seed = 1;
  bool json = false;
  std::string save_rows, picture;
};

// "27 18 9 ... 0 0": the largest and the smallest sizes.
std::string sizes_text(const std::vector<double>& sizes) {
  constexpr std::size_t kShown = 8, kLast = 2;
  std::string text;
  for (std::size_t cluster = 0; cluster < sizes.size(); ++cluster) {
    const bool left_out =
        sizes.size() > kShown && cluster >= kShown - kLast && cluster + kLast < sizes.size();
    if (left_out && cluster > kShown - kLast) continue;
    if (!text.empty()) text += ' ';
    text += left_out ? "..." : fmt::format("{:.0f}", sizes[cluster]);
  }
  return text.empty() ? "-" : text;
}

std::string largest_text(const std::vector<double>& sizes) {
  double sum = 0, largest = 0;
  for (const double size : sizes) {
    sum += size;
    largest = std::max(largest, size);
  }
  if (sum <= 0) return "-";
  return fmt::format("{:.2f}", largest * static_cast<double>(sizes.size()) / sum);
}

void print_groups(const std::vector<train::GroupReport>& groups) {
  std::size_t width = 9;
  for (const train::GroupReport& group : groups)
    width = std::max(width, group.attention.size() + 2);
  fmt::print("{:>5} {:>5}  {:<{}} {:>7} {:>8} {:>9} {:>6} {:>13}  {}\n", "layer", "head",
             "attention", width, "kept", "entropy", "clusters", "empty", "largest/mean",
             "tokens per cluster");
  std::int64_t layer = -1, first = 0;  // heads are counted over the groups of a layer
  for (const train::GroupReport& group : groups) {
    if (group.layer != layer) first = 0;
    layer = group.layer;
    for (const train::HeadReport& head : group.heads) {
      const bool clusters = !head.sizes.empty();
      fmt::print(
          "{:>5} {:>5}  {:<{}} {:>6.1f}% {:>8.3f} {:>9} {:>6} {:>13}  {}\n", layer, first++,
          train::has_collapsed(head.sizes, head.mass) ? "! " + group.attention : group.attention,
          width, 100 * head.mass, head.entropy,
          clusters ? fmt::format("{}", head.sizes.size()) : "-",
          clusters ? fmt::format("{:.1f}", head.empty) : "-", largest_text(head.sizes),
          sizes_text(head.sizes));
    }
  }
}

void print_divergences(const std::vector<train::Divergence>& divergences) {
  if (divergences.empty()) return;
  fmt::print("\nJensen-Shannon divergence between heads, nats (0: equal, 0.693: nothing shared)\n");
  fmt::print("{:>5}  {:<26} {:>8} {:>10}\n", "layer", "heads", "mean", "deviation");
  for (const train::Divergence& divergence : divergences) {
    fmt::print("{:>5}  {:<26} {:>8.4f} {:>10.4f}\n", divergence.layer,
               divergence.a + " | " + divergence.b, divergence.mean, divergence.deviation);
  }
}

Json to_json(const train::Inspection& inspection, const LoadedModel& loaded) {
  Json groups = Json::array(), divergences = Json::array();
  for (const train::GroupReport& group : inspection.groups) {
    Json heads = Json::array();
    for (const train::HeadReport& head : group.heads) {
      heads.push_back({{"sizes", head.sizes},
                       {"empty", head.empty},
                       {"mass", head.mass},
                       {"entropy", head.entropy}});
    }
    groups.push_back({{"layer", group.layer},
                      {"group", group.group},
                      {"attention", group.attention},
                      {"heads", heads}});
  }
  for (const train::Divergence& divergence : inspection.divergences) {
    divergences.push_back({{"layer", divergence.layer},
                           {"a", divergence.a},
                           {"b", divergence.b},
                           {"mean", divergence.mean},
                           {"deviation", divergence.deviation}});
  }
  return {{"checkpoint", loaded.checkpoint},
          {"step", loaded.step},
          {"groups", groups},
          {"divergences", divergences}};
}

void save_rows(const InspectOptions& options, LoadedModel& loaded) {
  const std::vector<std::string> paths =
      train::save_rows(loaded.model, *loaded.task,
                       {.folder = options.save_rows,
                        .rows = options.rows,
                        .seed = options.seed,
                        .bf16 = loaded.config.train.dtype == "bf16"});
  for (const std::string& path : paths) fmt::print("{}\n", path);
}

void run_inspect(const InspectOptions& options) {
  LoadedModel loaded = load_model(options.model, UsesData::yes);
  if (!options.save_rows.empty()) return save_rows(options, loaded);
  if (!options.picture.empty()) {
    const train::Picture picture =
        train::cluster_picture(loaded.model, *loaded.task, options.rows, options.seed);
    train::write_file(options.picture, train::encode_png(picture));
    fmt::print("{}\n", options.picture);
    return;
  }
  const train::Inspection inspection =
      train::inspect(loaded.model, *loaded.task, options.rows, options.seed);
  if (options.json) {
    fmt::print("{}\n", to_json(inspection, loaded).dump(2));
    return;
  }
  fmt::print("{} at step {}, {}\n\n", loaded.checkpoint, loaded.step, loaded.task->name());
  print_groups(inspection.groups);
  for (const std::string& line : train::collapse_warnings(inspection.groups)) {
    fmt::print("\n! {}\n", line);
  }
  print_divergences(inspection.divergences);
}

const char* const kInspectExamples =
    R"help(kept: overlap of the head's weights with those of full attention over the same
queries and keys; 100% is full attention. entropy: of a head's weights, in nats.
empty: clusters without tokens per sequence. All are means over held-out
sequences, cut to 512 tokens.

--save-rows writes q, k and v of each head group instead, for coterie bench
--data FILE.

--picture draws the clusters of the first head of every layer and group on
held-out images instead (tasks images and pathfinder). The report shows
clusters.png in the run's folder.

Examples:
  coterie inspect runs/copy-clustered
  coterie inspect runs/bytes/checkpoints/step-00000200 --rows 8 --json
  coterie inspect runs/bytes --rows 1 --save-rows rows
  coterie inspect runs/digits-cast --picture runs/digits-cast/clusters.png
)help";

}  // namespace

void add_inspect(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "inspect", "Show clusters, kept attention mass and diversity of a model's heads");
  const auto shared = std::make_shared<InspectOptions>();  // lives as long as the callback
  InspectOptions& options = *shared;
  add_model_options(*verb, options.model, UsesData::yes);
  train::add_number(*verb, "--rows", options.rows, 1, 1024, "Number of held-out sequences to use");
  train::add_number(*verb, "--seed", options.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "Random seed of clusters");
  verb->add_flag("--json", options.json, "Print JSON instead of tables");
  verb->add_option("--save-rows", options.save_rows,
                   "Write q, k and v of each head group, at full length, to files in this folder")
      ->type_name("FOLDER");
  verb->add_option("--picture", options.picture, "Draw the clusters of images into this PNG file")
      ->type_name("FILE")
      ->excludes("--save-rows");
  verb->footer(kInspectExamples);
  verb->callback([shared] { run_inspect(*shared); });
}

}  // namespace coterie::cli
