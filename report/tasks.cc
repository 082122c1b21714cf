// SPDX-License-Identifier: MIT
// The section of a task.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "formats/files.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

// Empty for a task of a newer version.
std::string task_text(const std::string& task) {
  static const std::map<std::string, std::string> texts = {
      {"copy",
       "A word and its copy with different symbols masked in each: every masked symbol can be "
       "read from the other copy."},
      {"recall", "Pairs of a key and a value, then queries: which value came with this key?"},
      {"bytes", "The next byte of a text."},
      {"masked", "The bytes of a text that are masked, from both sides."},
      {"words", "The next word of a text."},
      {"tokens", "The next token of a text in byte-pair encoding."},
      {"listops", "The value of a nested expression of lists of digits."},
      {"pathfinder", "Whether a dashed path joins the two discs of an image, read by rows."},
      {"images", "Images read by rows: their class, or each value from those before it."},
      {"imdb", "Whether a review, read as bytes, is positive."},
      {"retrieval", "Whether two passages, read as bytes, are from one article."},
      {"speech", "The transcript of recorded speech."}};
  const auto found = texts.find(task);
  return found == texts.end() ? "" : found->second;
}

std::string or_dash(double value, const std::string& text) {
  return std::isfinite(value) ? text : "–";
}

std::string attention_cell(const PanelRun& run) {
  const bool whole = run.log->end && run.log->end->reason != "interrupted";
  std::string badge = whole ? "" : state_text(*run.log);
  if (run.log->leaks) badge += badge.empty() ? "sees the future" : ", sees the future";
  return key_html(run.kind.colour, run.dash, run.log->attention, badge);
}

// The first digits of the checksum tell texts apart.
std::string data_text(const RunLog& log) {
  const std::string sum = log.data_checksum.substr(log.data_checksum.find(':') + 1);
  return sum.empty() ? "–" : sum.substr(0, 6);
}

std::vector<std::string> table_row(const PanelRun& run, bool best) {
  const RunLog& log = *run.log;
  const double result = log.result();
  const std::string score = or_dash(result, metric_text(log.metric, result));
  const auto baseline = best_baseline(log);
  const double seconds = log.seconds(), rate = log.tokens_per_s(), peak = log.peak_memory_bytes();
  return {attention_cell(run),
          best ? "<strong>" + score + "</strong>" : score,
          baseline ? metric_text(log.metric, baseline->second) : "–",
          grouped(log.last_step()),
          std::to_string(log.seed),
          escape(data_text(log)),
          log.parameters > 0 ? grouped(log.parameters) : "–",
          or_dash(seconds, fmt::format("{:.1f}", seconds)),
          or_dash(rate, compact(rate)),
          or_dash(peak, mebibytes_text(peak))};
}

double best_result(const Panel& panel) {
  double best = kUnknown;
  for (const PanelRun& run : panel.runs) {
    const double result = run.log->result();
    best = higher_is_better(run.log->metric) ? std::fmax(best, result) : std::fmin(best, result);
  }
  return best;
}

std::string results_table(const TaskGroup& group) {
  const bool several = group.panels.size() > 1;
  Table table;
  table.columns = {{"attention", false},
                   {group.metric},
                   {"without a model"},
                   {"steps"},
                   {"seed"},
                   {"data", false},
                   {"parameters"},
                   {"time (s)"},
                   {"tokens/s"},
                   {"peak memory (MiB)"}};
  if (several) table.columns.insert(table.columns.begin(), {"tokens"});
  for (const Panel& panel : group.panels) {
    const double best = best_result(panel);
    for (const PanelRun& run : panel.runs) {
      table.rows.push_back(table_row(run, run.log->result() == best));
      if (several) table.rows.back().insert(table.rows.back().begin(), grouped(panel.length));
    }
  }
  return table_html(table);
}

// What makes the scores of a panel's runs incomparable: "They were trained for 30 and 300 steps."
std::vector<std::string> panel_warnings(const Panel& panel) {
  std::set<std::int64_t> steps;
  std::set<std::string> data, batches, shares;
  bool leaks = false, strict = false;
  for (const PanelRun& run : panel.runs) {
    steps.insert(run.log->last_step());
    data.insert(run.log->data_checksum);
    batches.insert(config_value(*run.log, "train.batch"));
    shares.insert(config_value(*run.log, "text.valid") + " " + config_value(*run.log, "text.test"));
    (run.log->leaks ? leaks : strict) = true;
  }
  std::vector<std::string> warnings;
  if (steps.size() > 1) {
    warnings.push_back(fmt::format("trained for {} steps", fmt::join(steps, ", ")));
  }
  if (batches.size() > 1) {
    warnings.push_back(fmt::format("with batches of {} sequences", fmt::join(batches, ", ")));
  }
  if (data.size() > 1) warnings.emplace_back("on different data");
  if (data.size() == 1 && shares.size() > 1) warnings.emplace_back("with other validation parts");
  if (leaks && strict) warnings.emplace_back("some with heads that see the future");
  return warnings;
}

std::string warnings_html(const TaskGroup& group) {
  std::string html;
  for (const Panel& panel : group.panels) {
    const std::vector<std::string> warnings = panel_warnings(panel);
    if (warnings.empty()) continue;
    html += fmt::format("<p class=\"warning\">Not comparable{}: these runs were {}.</p>\n",
                        group.panels.size() > 1 ? fmt::format(" at {} tokens", panel.length) : "",
                        escape(fmt::format("{}", fmt::join(warnings, "; "))));
  }
  return html;
}

// With several lengths, each has a title and all its figures; with one, the scores by stratum are
// next to the table.
std::string panels_html(const TaskGroup& group) {
  const std::string table = results_table(group);
  if (group.panels.size() == 1) {
    const std::string strata = strata_figure(group.panels[0]);
    return figures_html(panel_figures(group.panels[0])) +
           (strata.empty() ? table : "<div class=\"beside\">" + strata + table + "</div>\n");
  }
  std::string html;
  for (const Panel& panel : group.panels) {
    std::vector<std::string> figures = panel_figures(panel);
    const std::string strata = strata_figure(panel);
    if (!strata.empty()) figures.push_back(strata);
    const std::string title =
        panel.length > 0 ? grouped(panel.length) + " tokens" : "unknown length";
    html += "<h3>" + title + "</h3>\n" + figures_html(figures);
  }
  return html + table;
}

// "Scores are the best on validation data; higher is better. ..."
std::string metric_note(const TaskGroup& group) {
  bool tested = false, whole = true;
  for (const RunLog* run : group.logs()) {
    const LoggedEvaluation* const best = run->best_evaluation();
    tested = tested || (best && best->split == "test");
    whole = whole && run->final_evaluation && run->final_evaluation->share == 1.0;
  }
  return fmt::format("Scores are {}; {} is better. Time is training time without evaluation.",
                     tested  ? "from the test data"
                     : whole ? "from all validation data at the end of the run"
                             : "the best on validation data",
                     higher_is_better(group.metric) ? "higher" : "lower");
}

}  // namespace

std::optional<std::pair<std::string, double>> best_baseline(const RunLog& run) {
  std::optional<std::pair<std::string, double>> best;
  for (const auto& baseline : run.baselines) {
    if (!std::isfinite(baseline.second)) continue;
    const bool better = !best || (higher_is_better(run.metric) ? baseline.second > best->second
                                                               : baseline.second < best->second);
    if (better) best = baseline;
  }
  return best;
}

// Pictures of runs, by their file's name.
std::string pictures_html(const TaskGroup& group, const char* file, const char* title) {
  std::vector<std::string> figures;
  for (const RunLog* run : group.logs()) {
    const std::string path = run->folder + "/" + file;
    if (!std::filesystem::exists(path)) continue;
    const std::string png = base64(read_file(path, kSmallFile));
    figures.push_back(
        figure_html(run->attention,
                    fmt::format("<img alt=\"{}\" src=\"data:image/png;base64,{}\">", title, png)));
  }
  return figures.empty() ? "" : fmt::format("<h3>{}</h3>\n", title) + figures_html(figures);
}

std::string task_section(const TaskGroup& group) {
  std::string html = fmt::format("<section id=\"{}\"><h2>{}</h2>\n", group.id, escape(group.title));
  html += fmt::format("<p class=\"lede\">{}</p>\n", escape(task_text(group.task)));
  html += warnings_html(group) + grid_html(group) + panels_html(group);
  html += pictures_html(group, "samples.png", "Samples") +
          pictures_html(group, "clusters.png", "Clusters of held-out images, layer by layer");
  return html + fmt::format("<p class=\"note\">{}</p></section>\n", metric_note(group));
}

}  // namespace coterie::train
