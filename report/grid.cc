// SPDX-License-Identifier: MIT
// Results over sequence length x clusters.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "report/plot.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

struct Mean {
  double sum = 0;
  std::int64_t count = 0;

  void add(double value) {
    if (!std::isfinite(value)) return;
    sum += value;
    ++count;
  }
  double value() const { return count == 0 ? kUnknown : sum / static_cast<double>(count); }
};

// Over the runs of a panel with this family and cluster count.
double mean_result(const Panel& panel, const std::string& family, std::int64_t clusters) {
  Mean mean;
  for (const PanelRun& run : panel.runs) {
    if (run.kind.family == family && run.kind.clusters == clusters) mean.add(run.log->result());
  }
  return mean.value();
}

std::map<std::string, std::set<std::int64_t>> cluster_counts(const TaskGroup& group) {
  std::map<std::string, std::set<std::int64_t>> counts;
  for (const Panel& panel : group.panels) {
    for (const PanelRun& run : panel.runs) {
      if (run.kind.clusters > 0) counts[run.kind.family].insert(run.kind.clusters);
    }
  }
  return counts;
}

HeatMap make_map(const TaskGroup& group, std::string title, std::vector<std::string> rows,
                 const std::vector<std::vector<double>>& results) {
  HeatMap map{.title = std::move(title),
              .x_label = "sequence length (tokens)",
              .y_label = rows.size() > 1 ? "clusters" : "",
              .columns = {},
              .rows = std::move(rows),
              .values = {},
              .texts = {}};
  for (const Panel& panel : group.panels) map.columns.push_back(std::to_string(panel.length));
  for (const std::vector<double>& row : results) {
    auto& values = map.values.emplace_back();
    auto& texts = map.texts.emplace_back();
    for (const double value : row) {
      values.push_back(std::isfinite(value) ? std::optional(value) : std::nullopt);
      texts.push_back(metric_text(group.metric, value));
    }
  }
  return map;
}

// One colour scale for all maps: accuracy from 0 to 1, other metrics from worst to best.
void set_map_scale(const std::string& metric, std::vector<HeatMap>& maps) {
  if (metric == "accuracy") return;  // the default
  double best = INFINITY, worst = -INFINITY;
  for (const HeatMap& map : maps) {
    for (const auto& row : map.values) {
      for (const std::optional<double>& value : row) {
        best = std::min(best, value.value_or(best));
        worst = std::max(worst, value.value_or(worst));
      }
    }
  }
  for (HeatMap& map : maps) {
    map.low = worst > best ? worst : best + 1;
    map.high = best;
  }
}

}  // namespace

std::vector<ClusterGrid> cluster_grids(const TaskGroup& group) {
  std::vector<ClusterGrid> grids;
  for (const auto& [family, counts] : cluster_counts(group)) {
    if (counts.size() < 2) continue;
    ClusterGrid grid{.family = family, .lengths = {}, .clusters = {}, .results = {}};
    for (const Panel& panel : group.panels) grid.lengths.push_back(panel.length);
    for (const std::int64_t clusters : counts) {
      grid.clusters.push_back(clusters);
      std::vector<double>& row = grid.results.emplace_back();
      for (const Panel& panel : group.panels) row.push_back(mean_result(panel, family, clusters));
    }
    grids.push_back(std::move(grid));
  }
  return grids;
}

std::vector<double> full_results(const TaskGroup& group) {
  std::vector<double> results;
  for (const Panel& panel : group.panels) results.push_back(mean_result(panel, "full", 0));
  return results;
}

std::string grid_html(const TaskGroup& group) {
  const std::vector<ClusterGrid> grids = cluster_grids(group);
  if (grids.empty()) return "";
  std::vector<std::string> names;
  std::vector<HeatMap> maps;
  const std::vector<double> full = full_results(group);
  if (std::any_of(full.begin(), full.end(), [](double value) { return std::isfinite(value); })) {
    names.push_back("full");
    maps.push_back(make_map(group, group.metric + " of full attention", {"full"}, {full}));
  }
  for (const ClusterGrid& grid : grids) {
    std::vector<std::string> rows;
    for (const std::int64_t clusters : grid.clusters) rows.push_back(std::to_string(clusters));
    names.push_back(grid.family);
    maps.push_back(make_map(group, group.metric + " of " + grid.family, rows, grid.results));
  }
  set_map_scale(group.metric, maps);
  std::vector<std::string> figures;
  for (std::size_t map = 0; map < maps.size(); ++map) {
    figures.push_back(figure_html(names[map], heat_map(maps[map])));
  }
  return fmt::format("<h3>{} over length and clusters</h3>\n", escape(capitalised(group.metric))) +
         figures_html(figures);
}

}  // namespace coterie::train
