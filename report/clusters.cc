// SPDX-License-Identifier: MIT
// The section on clusters: how balanced they are, how many are empty, and the mass they keep.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "report/plot.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

bool has_sizes(const LoggedGroup& group) {
  return std::any_of(group.heads.begin(), group.heads.end(),
                     [](const LoggedHead& head) { return !head.sizes.empty(); });
}

double largest_size(const RunLog& run) {
  double largest = 0;
  for (const LoggedGroup& group : run.clusters) {
    for (const LoggedHead& head : group.heads) {
      for (const double size : head.sizes) largest = std::max(largest, size);
    }
  }
  return largest;
}

// "3 empty · keeps 93 %"
std::string head_note(const LoggedHead& head) {
  std::string note = has_collapsed(head.sizes, head.mass) ? "collapsed" : "";
  if (std::isfinite(head.empty)) {
    note += fmt::format("{}{:.3g} empty", note.empty() ? "" : " · ", head.empty);
  }
  if (std::isfinite(head.mass)) {
    note += fmt::format("{}keeps {}", note.empty() ? "" : " · ", percent_text(head.mass));
  }
  return note;
}

// `first` is the number of the group's first head in its layer.
std::string head_figure(const LoggedGroup& group, std::size_t first, std::size_t head,
                        double high) {
  LoggedHead shown = group.heads[head];
  std::sort(shown.sizes.begin(), shown.sizes.end(), std::greater<>());
  const std::string name = fmt::format("layer {} · head {}", group.layer, first + head);
  const BarPlot bars{.title = "Tokens per cluster, " + name,
                     .colour = attention_kind(group.attention).colour,
                     .values = shown.sizes,
                     .high = high};
  return figure_html(name, bar_plot(bars), head_note(shown),
                     has_collapsed(shown.sizes, shown.mass));
}

struct Range {
  double low = kUnknown, high = kUnknown;

  void add(double value) {
    low = std::fmin(low, value);
    high = std::fmax(high, value);
  }
};

std::string range_text(const Range& range, const std::function<std::string(double)>& text) {
  if (!std::isfinite(range.low)) return "–";
  const std::string low = text(range.low), high = text(range.high);
  return low == high ? low : low + " … " + high;
}

std::vector<std::string> group_row(const LoggedGroup& group) {
  Range empty, mass, largest;
  std::size_t clusters = 0;
  std::int64_t collapsed = 0;
  for (const LoggedHead& head : group.heads) {
    collapsed += has_collapsed(head.sizes, head.mass) ? 1 : 0;
    empty.add(head.empty);
    mass.add(head.mass);
    clusters = std::max(clusters, head.sizes.size());
    double sum = 0, high = 0;
    for (const double size : head.sizes) {
      sum += size;
      high = std::max(high, size);
    }
    if (sum > 0) largest.add(high * static_cast<double>(head.sizes.size()) / sum);
  }
  const auto plain = [](double value) { return compact(value); };
  return {std::to_string(group.layer),
          attention_html(group.attention),
          collapsed == 0 ? std::to_string(group.heads.size())
                         : fmt::format("<span class=\"collapsed\">{}, {} collapsed</span>",
                                       group.heads.size(), collapsed),
          clusters > 0 ? std::to_string(clusters) : "–",
          clusters > 0 ? range_text(empty, plain) : "–",
          range_text(largest, plain),
          range_text(mass, percent_text)};
}

std::string run_html(const PanelRun& run, const TaskGroup& group, std::int64_t length,
                     Folding folding) {
  Table table;
  table.columns = {{"layer"}, {"attention", false}, {"heads"},    {"clusters"},
                   {"empty"}, {"largest / mean"},   {"kept mass"}};
  std::vector<std::string> figures;
  const double high = largest_size(*run.log);
  std::size_t next = 0;  // head of the layer
  for (std::size_t g = 0; g < run.log->clusters.size(); ++g) {
    const LoggedGroup& logged = run.log->clusters[g];
    if (g > 0 && run.log->clusters[g - 1].layer != logged.layer) next = 0;
    const std::size_t first = next;
    next += logged.heads.size();
    table.rows.push_back(group_row(logged));
    if (!has_sizes(logged)) continue;
    for (std::size_t head = 0; head < logged.heads.size(); ++head) {
      figures.push_back(head_figure(logged, first, head, high));
    }
  }
  std::string pictures;
  for (const std::string& figure : figures) pictures += figure;
  if (!pictures.empty()) pictures = "<div class=\"heads\">" + pictures + "</div>\n";
  const std::string title = fmt::format(
      "{}<b>{}</b> on {}{}", swatch_html(run.kind.colour, 0), escape(run.label),
      escape(group.title), length > 0 ? fmt::format(", {} tokens", grouped(length)) : "");
  return folded(title, pictures + table_html(table), folding);
}

}  // namespace

std::string cluster_section(const ReportData& data) {
  std::string runs;
  for (const TaskGroup& group : data.groups) {
    for (const Panel& panel : group.panels) {
      for (const PanelRun& run : panel.runs) {
        if (run.log->clusters.empty()) continue;
        runs += run_html(run, group, panel.length, {.open = runs.empty()});
      }
    }
  }
  const char* const lede =
      "<p class=\"lede\">Bars: tokens per cluster, largest first, mean over held-out sequences; "
      "the "
      "dashed line is the mean cluster size. Kept mass: overlap of the attention's weights with "
      "those of full attention over the same queries and keys; 100&nbsp;% is full "
      "attention. Heads in red have collapsed: one cluster has nearly all tokens, or nothing of "
      "full attention is kept.</p>\n";
  const std::string content =
      runs.empty() ? "<p class=\"missing\">No run logged its clusters.</p>\n" : lede + runs;
  return "<section id=\"clusters\"><h2>Cluster health</h2>\n" + content + "</section>\n";
}

}  // namespace coterie::train
