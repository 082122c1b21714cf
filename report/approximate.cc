// SPDX-License-Identifier: MIT
// The section of a record of `coterie approximate`: scores against full attention, errors by layer
// and head, and the chosen assignments.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "report/json.h"
#include "report/plot.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

// value, low, high
double bound_at(const Json& object, const char* key, std::size_t place) {
  const Json list = list_at(object, key);
  return place < list.size() && list[place].is_number() ? list[place].get<double>() : kUnknown;
}

std::string signed_text(double value) {
  return std::isfinite(value) ? fmt::format("{:+.4f}", value) : "–";
}

std::string value_text(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "–";
}

// Mean and largest of a list of lists of numbers.
std::pair<double, double> mean_and_most(const Json& layers) {
  double sum = 0, most = 0;
  std::int64_t count = 0;
  for (const Json& layer : layers) {
    if (!layer.is_array()) continue;
    for (const Json& error : layer) {
      if (!error.is_number()) continue;
      sum += error.get<double>();
      most = std::max(most, error.get<double>());
      ++count;
    }
  }
  if (count == 0) return {kUnknown, kUnknown};
  return {sum / static_cast<double>(count), most};
}

std::string results_table(const std::vector<Json>& results) {
  Table table;
  table.columns.push_back({"attention", false});
  const Json first = list_at(results.front(), "scores");
  for (const Json& score : first) {
    table.columns.push_back({text_at(score, "name")});
    table.columns.push_back({"95 % interval"});
    table.columns.push_back({"against full"});
  }
  for (const char* title : {"cosine", "head error, mean", "largest", "exact inputs", "tokens/s",
                            "MiB", "faster from"}) {
    table.columns.push_back({title});
  }
  for (const Json& result : results) {
    std::vector<std::string> row = {attention_html(text_at(result, "attention"))};
    const Json scores = list_at(result, "scores");
    for (std::size_t s = 0; s < first.size(); ++s) {
      const Json score = s < scores.size() ? scores[s] : Json::object();
      row.push_back(value_text(bound_at(score, "value", 0), "{:.4f}"));
      row.push_back(value_text(bound_at(score, "value", 1), "{:.4f}") + " to " +
                    value_text(bound_at(score, "value", 2), "{:.4f}"));
      row.push_back(signed_text(bound_at(score, "difference", 0)) + " (" +
                    signed_text(bound_at(score, "difference", 1)) + " to " +
                    signed_text(bound_at(score, "difference", 2)) + ")");
    }
    const auto [mean, most] = mean_and_most(list_at(result, "head_error"));
    row.push_back(value_text(number_at(result, "cosine"), "{:.5f}"));
    row.push_back(value_text(mean, "{:.3f}"));
    row.push_back(value_text(most, "{:.3f}"));
    const double exact = number_at(result, "exact_share");
    row.push_back(std::isfinite(exact) ? percent_text(exact) : "–");
    const double speed = number_at(result, "tokens_per_s");
    row.push_back(std::isfinite(speed) ? compact(speed) : "–");
    const double memory = number_at(result, "peak_memory_bytes");
    row.push_back(std::isfinite(memory) ? mebibytes_text(memory) : "–");
    row.push_back(value_text(number_at(result, "crossover"), "{:.0f}"));
    table.rows.push_back(std::move(row));
  }
  return table_html(table);
}

// Relative error of each head; one picture per attention.
std::string head_figure(const Json& result) {
  const Json layers = list_at(result, "head_error");
  HeatMap map;
  map.title = text_at(result, "attention");
  map.x_label = "head";
  map.y_label = "layer";
  double most = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    map.rows.push_back(std::to_string(l));
    auto& values = map.values.emplace_back();
    auto& texts = map.texts.emplace_back();
    for (const Json& error : layers[l]) {
      const double value = error.is_number() ? error.get<double>() : 0;
      most = std::max(most, value);
      values.emplace_back(value);
      texts.push_back(fmt::format("{:.2f}", value));
    }
  }
  if (map.rows.empty() || most == 0) return "";
  for (std::size_t h = 0; h < map.values[0].size(); ++h) map.columns.push_back(std::to_string(h));
  map.high = most;
  return figure_html("Head error: " + map.title, heat_map(map));
}

std::string speed_plot(const std::vector<Json>& results) {
  Plot plot;
  plot.title = "Speed by length";
  plot.x = {.label = "tokens", .kind = ScaleKind::log};
  plot.y = {.label = "tokens per second", .kind = ScaleKind::log};
  for (std::size_t i = 0; i < results.size(); ++i) {
    PlotSeries series{.name = shortened(text_at(results[i], "attention"), 24),
                      .colour = static_cast<int>(i) % kPlotColours,
                      .dash = static_cast<int>(i) / kPlotColours};
    for (const Json& point : list_at(results[i], "speeds")) {
      series.points.emplace_back(number_at(point, "length"), number_at(point, "tokens_per_s"));
    }
    if (!series.points.empty()) plot.series.push_back(std::move(series));
  }
  return plot.series.empty() ? "" : figure_html(plot.title, line_plot(plot));
}

// Error against time: rungs of the ladder in all heads, and the chosen assignments.
std::string choice_html(const Json& calibration) {
  Plot plot;
  plot.title =
      fmt::format("Error against time at {} tokens", grouped(integer_at(calibration, "length")));
  plot.x = {.label = "seconds of a pass", .kind = ScaleKind::log};
  plot.y = {.label = "relative error of the output"};
  PlotSeries uniform{.name = "one spec in all heads", .colour = 1};
  PlotSeries chosen{.name = "chosen per head", .colour = 2};
  Table table;
  table.columns = {{"attention", false}, {"error"}, {"ms"}};
  const auto add = [&](const Json& measured, PlotSeries& series, const std::string& name) {
    series.points.emplace_back(number_at(measured, "seconds"), number_at(measured, "error"));
    table.rows.push_back({name, value_text(number_at(measured, "error"), "{:.4f}"),
                          value_text(1e3 * number_at(measured, "seconds"), "{:.2f}")});
  };
  for (const Json& rung : list_at(calibration, "uniform")) {
    add(rung, uniform, attention_html(text_at(rung, "name")));
  }
  std::string lists;
  for (const Json& target : list_at(calibration, "targets")) {
    const std::string name = fmt::format("chosen for {}", number_at(target, "target"));
    if (target.contains("measured")) add(target["measured"], chosen, escape(name));
    std::string lines;
    for (const Json& line : list_at(target, "explanation")) {
      if (line.is_string()) lines += "<p>" + escape(line.get<std::string>()) + "</p>\n";
    }
    std::int64_t layer = 0;
    for (const Json& spec : list_at(target, "layers")) {
      if (!spec.is_string()) continue;
      lines +=
          fmt::format("<p>layer {}: {}</p>\n", layer++, attention_html(spec.get<std::string>()));
    }
    lists += folded(escape(name), lines);
  }
  plot.series = {uniform, chosen};
  return figures_html({figure_html(plot.title, scatter_plot(plot))}) + table_html(table) + lists;
}

}  // namespace

std::string approximation_section(const std::string& path, const std::string& id,
                                  std::string& name) {
  Json head = Json::object();
  std::vector<Json> results, speeds, calibrations;
  const std::int64_t unreadable = for_each_line(path, [&](const Json& line) {
    const std::string kind = text_at(line, "kind");
    if (kind == "approximate") head = line;
    if (kind == "result") results.push_back(line);
    if (kind == "result" || kind == "torch") speeds.push_back(line);
    if (kind == "calibration") calibrations.push_back(line);
  });
  const std::string glue = text_at(head, "glue");
  name = text_at(head, "model") + ": " + text_at(head, "task") + (glue.empty() ? "" : " " + glue);
  std::string html = fmt::format("<section id=\"{}\"><h2>{}</h2>\n", id, escape(name));
  for (const Json& note : list_at(head, "notes")) {
    if (note.is_string()) html += "<p class=\"lede\">" + escape(note.get<std::string>()) + "</p>\n";
  }
  if (!results.empty()) {
    html += results_table(results);
    std::vector<std::string> figures;
    const std::string speed = speed_plot(speeds);
    if (!speed.empty()) figures.push_back(speed);
    for (const Json& result : results) {
      const std::string figure = head_figure(result);
      if (!figure.empty()) figures.push_back(figure);
    }
    if (!figures.empty()) html += figures_html(figures);
  }
  for (const Json& calibration : calibrations) html += choice_html(calibration);
  if (results.empty() && calibrations.empty()) {
    html += "<p class=\"missing\">The record has no results.</p>\n";
  }
  if (unreadable > 0) {
    html += fmt::format("<p class=\"missing\">{} of the record could not be read.</p>\n",
                        counted(unreadable, "line"));
  }
  if (head.contains("machine") && head["machine"].is_object())
    html += facts_html(facts_of(head["machine"]));
  return html + "</section>\n";
}

}  // namespace coterie::train
