// SPDX-License-Identifier: MIT
// Figures of compared runs: loss, and score against time, memory and stratum.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "report/plot.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

constexpr std::size_t kMostPoints = 100;  // of a curve
constexpr double kLogRatio = 8;  // of largest to smallest loss, above which the axis is logarithmic

using Points = std::vector<std::pair<double, double>>;

// Averages neighbours to reduce a curve to at most kMostPoints.
Points thinned(const Points& points) {
  const std::size_t width = (points.size() + kMostPoints - 1) / kMostPoints;
  if (width <= 1) return points;
  Points means;
  for (std::size_t begin = 0; begin < points.size(); begin += width) {
    const std::size_t end = std::min(begin + width, points.size());
    double sum = 0;
    for (std::size_t at = begin; at < end; ++at) sum += points[at].second;
    means.emplace_back(points[end - 1].first, sum / static_cast<double>(end - begin));
  }
  return means;
}

Plot make_plot(const Panel& panel, const std::function<Points(const RunLog&)>& points_of) {
  Plot plot;
  for (const PanelRun& run : panel.runs) {
    plot.series.push_back({.name = run.label,
                           .colour = run.kind.colour,
                           .dash = run.dash,
                           .points = points_of(*run.log)});
  }
  return plot;
}

std::string loss_figure(const Panel& panel) {
  Plot plot = make_plot(panel, [](const RunLog& run) {
    Points points;
    for (const LoggedStep& step : run.steps) {
      if (std::isfinite(step.loss)) points.emplace_back(step.step, step.loss);
    }
    return thinned(points);
  });
  double low = INFINITY, high = 0;
  for (const PlotSeries& series : plot.series) {
    for (const auto& [step, loss] : series.points) {
      low = std::min(low, loss);
      high = std::max(high, loss);
    }
  }
  plot.title = "Training loss";
  plot.x.label = "step";
  plot.y.label = "loss (nats)";
  if (low > 0 && high > kLogRatio * low) plot.y.kind = ScaleKind::log;
  return figure_html(plot.title, line_plot(plot));
}

// The axis of the metric and the levels of the baselines.
void set_metric_axis(const Panel& panel, Plot& plot) {
  const std::string metric = panel.runs[0].log->metric;
  plot.y.label = metric + (higher_is_better(metric) ? "" : " (lower is better)");
  if (metric == "accuracy") {
    plot.y.percent = true;
    plot.y.low = 0;
    plot.y.high = 1;
  }
  for (const auto& [name, value] : panel.runs[0].log->baselines) {
    plot.levels.push_back({name + " " + metric_text(metric, value), value});
  }
}

struct TimeUnit {
  double seconds;
  const char* name;
};

TimeUnit unit_for(const Panel& panel) {
  double longest = 0;
  for (const PanelRun& run : panel.runs) longest = std::fmax(longest, run.log->seconds());
  return longest < 180     ? TimeUnit{1, "s"}
         : longest < 10800 ? TimeUnit{60, "min"}
                           : TimeUnit{3600, "h"};
}

std::string time_figure(const Panel& panel) {
  const TimeUnit unit = unit_for(panel);
  Plot plot = make_plot(panel, [&](const RunLog& run) {
    Points points;
    for (const LoggedEvaluation& evaluation : run.evaluations) {
      if (evaluation.split == "test") continue;
      points.emplace_back(run.seconds_at(evaluation.step) / unit.seconds, evaluation.metric);
    }
    return points;
  });
  plot.title = capitalised(panel.runs[0].log->metric) + " against wall time";
  plot.x.label = fmt::format("training time ({})", unit.name);
  set_metric_axis(panel, plot);
  return figure_html(plot.title, line_plot(plot));
}

std::string memory_figure(const Panel& panel) {
  Plot plot = make_plot(panel, [](const RunLog& run) {
    return Points{{run.peak_memory_bytes() / (1 << 20), run.result()}};
  });
  plot.title = capitalised(panel.runs[0].log->metric) + " against memory";
  plot.x.label = "peak memory (MiB)";
  set_metric_axis(panel, plot);
  return figure_html(plot.title, scatter_plot(plot));
}

// Names of all strata with scores in some run, in order.
std::vector<std::string> strata_of(const Panel& panel) {
  std::vector<std::string> names;
  for (const PanelRun& run : panel.runs) {
    const LoggedEvaluation* const best = run.log->best_evaluation();
    if (!best) continue;
    for (const auto& [name, value] : best->strata) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

// Length of the first word and its space if all names start with it ("distance 1", "distance 2-3").
std::size_t first_word_if_shared(const std::vector<std::string>& names) {
  const std::size_t size = names[0].find(' ') + 1;  // 0 without a space
  const bool shared = std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    return name.compare(0, size, names[0], 0, size) == 0;
  });
  return shared ? size : 0;
}

}  // namespace

std::vector<std::string> panel_figures(const Panel& panel) {
  return {loss_figure(panel), time_figure(panel), memory_figure(panel)};
}

std::string strata_figure(const Panel& panel) {
  const std::vector<std::string> names = strata_of(panel);
  if (names.empty()) return "";
  Plot plot = make_plot(panel, [&](const RunLog& run) {
    Points points;
    const LoggedEvaluation* const best = run.best_evaluation();
    for (const auto& [name, value] : best ? best->strata : NamedValues()) {
      const auto place = std::find(names.begin(), names.end(), name) - names.begin();
      points.emplace_back(static_cast<double>(place), value);
    }
    return points;
  });
  const std::size_t word = first_word_if_shared(names);
  const std::string by = word > 0 ? names[0].substr(0, word - 1) : "part of the data";
  for (std::size_t place = 0; place < names.size(); ++place) {
    plot.x.ticks.push_back({static_cast<double>(place), names[place].substr(word)});
  }
  plot.title = capitalised(panel.runs[0].log->metric) + " by " + by;
  plot.x.label = by == "distance" ? by + " (tokens)" : by;
  set_metric_axis(panel, plot);
  return figure_html(plot.title, line_plot(plot));
}

}  // namespace coterie::train
