// SPDX-License-Identifier: MIT
// The results in sentences.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

// Accuracy differences up to this count as equal.
constexpr double kPoint = 0.01;

struct Scored {
  std::string name;
  double value;
};

// "full 99.6 %, i-clustered 99.4 %, clustered(8) 61.0 %": best first.
std::string ranking(std::vector<Scored> scores, const std::string& metric) {
  std::stable_sort(scores.begin(), scores.end(), [&](const Scored& a, const Scored& b) {
    return higher_is_better(metric) ? a.value > b.value : a.value < b.value;
  });
  std::string text;
  for (const Scored& score : scores) {
    text += fmt::format("{}{}&nbsp;<b>{}</b>", text.empty() ? "" : ", ", escape(score.name),
                        metric_text(metric, score.value));
  }
  return text;
}

// The panel of the longest sequences with a score.
const Panel* last_scored(const TaskGroup& group) {
  const Panel* found = nullptr;
  for (const Panel& panel : group.panels) {
    for (const PanelRun& run : panel.runs) {
      if (std::isfinite(run.log->result())) found = &panel;
    }
  }
  return found;
}

std::string result_sentence(const TaskGroup& group) {
  const Panel* const panel = last_scored(group);
  if (!panel) return fmt::format("On {}, nothing has been evaluated yet.", escape(group.title));
  std::vector<Scored> scores;
  for (const PanelRun& run : panel->runs) {
    if (std::isfinite(run.log->result())) scores.push_back({run.label, run.log->result()});
  }
  std::string text = fmt::format("On <a href=\"#{}\">{}</a>", group.id, escape(group.title));
  if (panel->length > 0) text += fmt::format(" ({} tokens)", grouped(panel->length));
  text += fmt::format(", {}: {}", escape(group.metric), ranking(scores, group.metric));
  const auto baseline = best_baseline(*panel->runs[0].log);
  if (!baseline) return text + ".";
  return text + fmt::format(". Without a model ({}): {}.", escape(baseline->first),
                            metric_text(group.metric, baseline->second));
}

// Whether a score is as good as that of full attention: within a point of accuracy, or a hundredth
// of another metric.
bool as_good(const RunLog& run, const RunLog& full) {
  if (run.metric == "accuracy") return run.result() >= full.result() - kPoint;
  return higher_is_better(run.metric) ? run.result() >= 0.99 * full.result()
                                      : run.result() <= 1.01 * full.result();
}

// The fastest run of long sequences that is as good as full attention, compared with it.
std::string headline_sentence(const TaskGroup& group) {
  const Panel* const panel = last_scored(group);
  if (!panel || panel->length < kLongSequence) return "";
  const PanelRun *full = nullptr, *fastest = nullptr;
  for (const PanelRun& run : panel->runs) {
    if (run.kind.family == "full" && std::isfinite(run.log->result())) full = &run;
  }
  for (const PanelRun& run : panel->runs) {
    if (!full || run.kind.family == "full" || run.log->leaks) continue;
    const RunLog &log = *run.log, &exact = *full->log;
    if (log.last_step() != exact.last_step() || !as_good(log, exact)) continue;
    const double best = fastest ? fastest->log->seconds() : exact.seconds();
    if (log.seconds() < best) fastest = &run;
  }
  if (!fastest) return "";
  return fmt::format(
      "With <b>{} tokens</b>, {} trains <b>{:.1f} times as fast</b> as full attention and reaches "
      "the same score, within {}: {} after {:.1f}&nbsp;s of training, full attention {} after "
      "{:.1f}&nbsp;s.",
      grouped(panel->length), attention_html(fastest->log->attention),
      full->log->seconds() / fastest->log->seconds(),
      group.metric == "accuracy" ? "a point" : "one percent",
      metric_text(group.metric, fastest->log->result()), fastest->log->seconds(),
      metric_text(group.metric, full->log->result()), full->log->seconds());
}

// The number of grid cells in which a family is within a point of full attention or better.
std::string grid_sentence(const TaskGroup& group) {
  if (group.metric != "accuracy") return "";
  const std::vector<double> full = full_results(group);
  std::string text;
  for (const ClusterGrid& grid : cluster_grids(group)) {
    int places = 0, close = 0;
    for (const std::vector<double>& row : grid.results) {
      for (std::size_t length = 0; length < row.size(); ++length) {
        if (!std::isfinite(row[length]) || !std::isfinite(full[length])) continue;
        ++places;
        close += row[length] >= full[length] - kPoint ? 1 : 0;
      }
    }
    if (places == 0) continue;
    text += fmt::format("{}{} at <b>{} of {}</b>", text.empty() ? "" : ", ", escape(grid.family),
                        close, places);
  }
  if (text.empty()) return "";
  return fmt::format(
      "Over the grid of lengths and clusters of {}, within a point of full "
      "attention or better: {}.",
      escape(group.title), text);
}

// Scores of the last stratum: the greatest distance.
std::string distance_sentence(const TaskGroup& group) {
  const Panel* const panel = last_scored(group);
  std::vector<Scored> scores;
  std::string part;
  for (const PanelRun& run : panel ? panel->runs : std::vector<PanelRun>()) {
    const LoggedEvaluation* const best = run.log->best_evaluation();
    if (!best || best->strata.size() < 2) continue;
    if (part.empty()) part = best->strata.back().first;
    if (best->strata.back().first == part)
      scores.push_back({run.label, best->strata.back().second});
  }
  if (scores.empty()) return "";
  return fmt::format("At {}: {}.", escape(part), ranking(scores, group.metric));
}

// How many are faster than full attention at the longest length, and which of them has the smallest
// error.
std::string bench_sentence(const BenchLog& bench) {
  const BenchPoint* closest = nullptr;
  std::string name, against;
  int total = 0, faster = 0;
  for (const BenchSeries& series : bench.series) {
    const bool full = series.opponent || attention_kind(series.attention).family == "full";
    if (full || series.points.empty()) continue;
    const BenchPoint& last = series.points.back();
    ++total;
    against = series.against;
    if (!(last.speed > 1)) continue;
    ++faster;
    if (series.leaks_future || (closest && !(last.error < closest->error))) continue;
    closest = &last;
    name = series.attention;
  }
  if (total == 0) return "";
  std::string text = fmt::format(
      "<a href=\"#bench\">Timed in isolation</a>, <b>{} of {}</b> attentions "
      "are faster than {} at the longest length measured",
      faster, total, escape(against));
  if (closest) {
    text += fmt::format(
        ". The smallest error among them is that of {}: <b>{:.3f}</b>, {:.1f} times as fast at {} "
        "tokens",
        escape(name), closest->error, closest->speed, grouped(closest->length));
  }
  return text + ".";
}

std::string state_sentence(const std::vector<RunLog>& runs) {
  const auto unfinished = std::count_if(runs.begin(), runs.end(), [](const RunLog& run) {
    return !run.end || run.end->reason == "interrupted";
  });
  if (unfinished == 0) return "";
  return fmt::format("{} of {} runs did not finish; their results so far are shown.", unfinished,
                     runs.size());
}

}  // namespace

std::string summary_section(const ReportData& data) {
  std::vector<std::string> sentences;
  for (const TaskGroup& group : data.groups) sentences.push_back(headline_sentence(group));
  for (const TaskGroup& group : data.groups) {
    sentences.push_back(result_sentence(group));
    for (const std::string& more : {distance_sentence(group), grid_sentence(group)}) {
      if (!more.empty()) sentences.back() += " " + more;
    }
  }
  if (data.bench) sentences.push_back(bench_sentence(*data.bench));
  sentences.push_back(state_sentence(data.runs));
  for (const std::string& problem : data.problems) {
    sentences.push_back("<span class=\"badge\">left out</span> " + escape(problem));
  }
  std::string html = "<section id=\"summary\"><h2>Summary</h2>\n<ul class=\"summary\">";
  for (const std::string& sentence : sentences) {
    if (!sentence.empty()) html += "<li>" + sentence + "</li>\n";
  }
  return html + "</ul></section>\n";
}

}  // namespace coterie::train
