// SPDX-License-Identifier: MIT
// The section of a bench record: speed and error compared with full attention.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "report/plot.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

std::string length_text(double length) {
  const bool whole = length >= 1024 && std::fmod(length, 1024) == 0;
  return whole ? fmt::format("{:.0f}k", length / 1024) : fmt::format("{:.0f}", length);
}

std::string ms_text(double ms) {
  if (!std::isfinite(ms)) return "–";
  return ms >= 100 ? fmt::format("{:.0f}", ms) : fmt::format("{:#.3g}", ms);
}

// Series of one causality and thread count, with distinct short names.
struct Part {
  std::vector<const BenchSeries*> series;
  std::vector<std::string> names;
  std::vector<AttentionKind> kinds;
  std::vector<std::int64_t> lengths;
};

Part make_part(const BenchLog& log, bool causal, std::int64_t threads) {
  Part part;
  std::set<std::int64_t> lengths;
  std::vector<std::string> specs;
  for (const BenchSeries& series : log.series) {
    if (series.causal != causal || series.threads != threads) continue;
    part.series.push_back(&series);
    part.kinds.push_back(series.opponent ? AttentionKind{.family = series.attention}
                                         : attention_kind(series.attention));
    specs.push_back(series.attention);
    for (const BenchPoint& point : series.points) lengths.insert(point.length);
  }
  part.names = short_names(specs);
  part.lengths.assign(lengths.begin(), lengths.end());
  return part;
}

double mebibytes(const BenchPoint& point) { return point.extra_bytes / (1 << 20); }

bool is_baseline(const BenchSeries& series) { return series.attention == series.against; }

Plot make_plot(const Part& part) {
  Plot plot;
  std::vector<int> used(kPlotColours, 0);
  for (std::size_t s = 0; s < part.series.size(); ++s) {
    const int colour = part.kinds[s].colour;
    plot.series.push_back({.name = part.names[s],
                           .colour = colour,
                           .dash = used[static_cast<std::size_t>(colour)]++});
  }
  return plot;
}

// Lines over the lengths measured, both axes logarithmic.
Plot length_plot(const Part& part, const std::function<double(const BenchPoint&)>& value) {
  Plot plot = make_plot(part);
  for (std::size_t s = 0; s < part.series.size(); ++s) {
    for (const BenchPoint& point : part.series[s]->points) {
      plot.series[s].points.emplace_back(static_cast<double>(point.length), value(point));
    }
  }
  plot.x = {.label = "tokens", .kind = ScaleKind::log};
  plot.y.kind = ScaleKind::log;
  for (const std::int64_t length : part.lengths) {
    const auto tokens = static_cast<double>(length);
    plot.x.ticks.push_back({tokens, length_text(tokens)});
  }
  return plot;
}

std::string speed_figure(const Part& part) {
  Plot plot = length_plot(part, [](const BenchPoint& point) { return point.speed; });
  std::string against;
  for (std::size_t s = 0; s < part.series.size(); ++s) {
    against = part.series[s]->against;
    if (is_baseline(*part.series[s])) plot.series[s].points.clear();  // the level
  }
  plot.title = "Speed against " + against;
  plot.y.label = "times as fast";
  plot.levels = {{against, 1}};
  return figure_html(plot.title, line_plot(plot));
}

std::string memory_figure(const Part& part) {
  Plot plot = length_plot(part, [](const BenchPoint& point) { return mebibytes(point); });
  plot.title = "Extra memory";
  plot.y.label = "workspace and saved tensors (MiB)";
  return figure_html(plot.title, line_plot(plot));
}

std::string error_figure(const Part& part) {
  Plot plot = make_plot(part);
  for (std::size_t s = 0; s < part.series.size(); ++s) {
    const BenchSeries& series = *part.series[s];
    if (series.points.empty() || series.points.back().length != part.lengths.back()) continue;
    plot.series[s].points.emplace_back(series.points.back().total_ms(), series.points.back().error);
  }
  const std::string tokens = length_text(static_cast<double>(part.lengths.back()));
  plot.title = "Error against time at " + tokens + " tokens";
  plot.x = {.label = "time (ms)", .kind = ScaleKind::log};
  plot.y.label = "relative error";
  return figure_html(plot.title, scatter_plot(plot));
}

std::string name_cell(const BenchSeries& series, const PlotSeries& style) {
  return key_html(style.colour, style.dash, series.attention,
                  series.leaks_future ? "sees the future" : "");
}

const BenchPoint* point_at(const BenchSeries& series, std::int64_t length) {
  const auto found = std::find_if(series.points.begin(), series.points.end(),
                                  [&](const BenchPoint& point) { return point.length == length; });
  return found == series.points.end() ? nullptr : &*found;
}

std::string speed_text(double speed) {
  if (!std::isfinite(speed)) return "–";
  const std::string text = fmt::format("{:.{}f}×", speed, speed < 10 ? 2 : 1);
  return speed > 1 ? "<strong>" + text + "</strong>" : text;
}

// Speeds by length; error, time and memory at the longest.
std::string speed_table(const Part& part) {
  Table table;
  table.columns = {{"attention", false}};
  for (const std::int64_t length : part.lengths) {
    table.columns.push_back({"speed at " + length_text(static_cast<double>(length))});
  }
  table.columns.push_back({"error"});
  table.columns.push_back({"time (ms)"});
  table.columns.push_back({"extra memory (MiB)"});
  table.columns.push_back({"faster"});
  const Plot styles = make_plot(part);
  for (std::size_t s = 0; s < part.series.size(); ++s) {
    const BenchSeries& series = *part.series[s];
    std::vector<std::string> row = {name_cell(series, styles.series[s])};
    for (const std::int64_t length : part.lengths) {
      const BenchPoint* const point = point_at(series, length);
      row.push_back(point ? speed_text(point->speed) : "–");
    }
    const BenchPoint* const last = point_at(series, part.lengths.back());
    const BenchPoint point = last ? *last : BenchPoint();
    row.push_back(std::isfinite(point.error) ? fmt::format("{:.4f}", point.error) : "–");
    row.push_back(ms_text(point.total_ms()));
    row.push_back(std::isfinite(point.extra_bytes) ? mebibytes_text(point.extra_bytes) : "–");
    row.push_back(escape(crossover_text(series)));
    table.rows.push_back(std::move(row));
  }
  return table_html(table);
}

std::string times_table(const Part& part) {
  Table table;
  table.columns = {{"attention", false},  {"tokens"},        {"select (ms)"}, {"attend (ms)"},
                   {"forward (ms)"},      {"backward (ms)"}, {"speed"},       {"error"},
                   {"extra memory (MiB)"}};
  const Plot styles = make_plot(part);
  for (const std::int64_t length : part.lengths) {
    for (std::size_t s = 0; s < part.series.size(); ++s) {
      const BenchPoint* const point = point_at(*part.series[s], length);
      if (!point) continue;
      table.rows.push_back(
          {name_cell(*part.series[s], styles.series[s]), grouped(length), ms_text(point->select_ms),
           ms_text(point->attend_ms), ms_text(point->forward_ms), ms_text(point->backward_ms),
           speed_text(point->speed),
           std::isfinite(point->error) ? fmt::format("{:.4f}", point->error) : "–",
           std::isfinite(point->extra_bytes) ? mebibytes_text(point->extra_bytes) : "–"});
    }
  }
  return table_html(table);
}

std::string part_html(const Part& part, const std::string& title) {
  if (part.lengths.empty()) return "";
  return "<h3>" + title + "</h3>\n" +
         figures_html({speed_figure(part), error_figure(part), memory_figure(part)}) +
         speed_table(part) + folded("All times", times_table(part));
}

std::string parts_html(const BenchLog& log) {
  std::set<std::int64_t> threads;
  for (const BenchSeries& series : log.series) threads.insert(series.threads);
  std::string html;
  for (const bool causal : {false, true}) {
    for (const std::int64_t count : threads) {
      const std::string with =
          threads.size() > 1 ? fmt::format(", {}", counted(count, "thread")) : "";
      html += part_html(make_part(log, causal, count), (causal ? "Causal" : "Not causal") + with);
    }
  }
  return html;
}

std::string missing_html(const BenchLog& log) {
  std::string html;
  for (const std::string& refused : log.refused) {
    html += "<p class=\"missing\">Not measured: " + escape(refused) + "</p>\n";
  }
  if (log.unreadable > 0) {
    html += fmt::format("<p class=\"missing\">{} of {} could not be read.</p>\n",
                        counted(log.unreadable, "line"), escape(log.file));
  }
  return html;
}

std::string bench_content(const BenchLog& log) {
  if (log.series.empty()) {
    return fmt::format("<p class=\"missing\">{} has no measurements.</p>\n", escape(log.file)) +
           missing_html(log);
  }
  const std::string lede = fmt::format(
      "<p class=\"lede\">One attention layer in isolation, {}. Speed is relative to the platform's "
      "full attention; error, time and extra memory are for the longest length.</p>\n",
      log.pass == "both" ? "forward and backward" : escape(log.pass) + " pass");
  return lede + parts_html(log) + missing_html(log) +
         folded("Machine and problem", facts_html(log.facts));
}

}  // namespace

std::string crossover_text(const BenchSeries& series) {
  if (is_baseline(series)) return "";
  std::string wins;
  std::size_t count = 0;
  for (const BenchPoint& point : series.points) {
    if (!(point.speed > 1)) continue;
    wins += (wins.empty() ? "" : ", ") + length_text(static_cast<double>(point.length));
    ++count;
  }
  if (count == 0) return "never";
  if (count == series.points.size()) return "at every length";
  if (!series.crossover) return "only at " + wins;
  return fmt::format("from {} tokens", grouped(std::llround(*series.crossover)));
}

std::string bench_section(const ReportData& data) {
  const std::string content =
      data.bench
          ? bench_content(*data.bench)
          : "<p class=\"missing\">No bench record was given: create one with <code>coterie bench "
            "--json FILE</code> and include it with <code>coterie report --bench "
            "FILE</code>.</p>\n";
  return "<section id=\"bench\"><h2>Speed and error</h2>\n" + content + "</section>\n";
}

}  // namespace coterie::train
