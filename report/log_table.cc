// SPDX-License-Identifier: MIT
#include "report/log_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>

#include "coterie/error.h"
#include "report/json.h"

namespace coterie::train {
namespace {

// "2026-01-31T12:00:00Z" in seconds since 1970; 0 if it is something else.
double seconds_of(const std::string& date) {
  std::tm fields{};
  const char* const end = ::strptime(date.c_str(), "%Y-%m-%dT%H:%M:%SZ", &fields);
  return end == nullptr ? 0 : static_cast<double>(::timegm(&fields));
}

void add_value(const std::string& name, double value, NamedValues& values) {
  if (std::isfinite(value)) values.emplace_back(name, value);
}

// All numbers but the step, also those of objects inside.
void add_numbers(const Json& object, const std::string& prefix, NamedValues& values) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_number() && name != "step") {
      add_value(prefix + name, value.get<double>(), values);
    } else if (value.is_object()) {
      add_numbers(value, prefix + name + ".", values);
    }
  }
}

void add_clusters(const Json& line, NamedValues& values) {
  for (const Json& layer : list_at(line, "layers")) {
    const std::string prefix =
        fmt::format("layer{}.group{}.", integer_at(layer, "layer"), integer_at(layer, "group"));
    const Json heads = list_at(layer, "heads");
    for (const char* name : {"mass", "empty"}) {
      double sum = 0;
      for (const Json& head : heads) sum += number_at(head, name);
      add_value(prefix + name, sum / static_cast<double>(heads.size()), values);
    }
  }
}

constexpr const char* kColumns[] = {"loss",         "metric",    "accuracy",
                                    "lr",           "grad_norm", "commitment",
                                    "tokens_per_s", "seconds",   "memory_bytes"};

// The known columns that occur, then the others in the order in which they occur.
std::vector<std::string> columns_of(const std::vector<LogRow>& rows) {
  std::vector<std::string> found;
  for (const LogRow& row : rows) {
    for (const auto& [name, value] : row.values) {
      if (std::find(found.begin(), found.end(), name) == found.end()) found.push_back(name);
    }
  }
  const auto place = [](const std::string& name) {
    return std::find(std::begin(kColumns), std::end(kColumns), name);
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const std::string& a, const std::string& b) { return place(a) < place(b); });
  return found;
}

std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char letter : text)
    quoted += letter == '"' ? std::string("\"\"") : std::string(1, letter);
  return quoted + "\"";
}

std::string csv_number(double value) {  // gives the same number back
  constexpr double kExact = 9007199254740992.0;
  const bool whole = std::abs(value) < kExact && value == std::trunc(value);
  return whole ? fmt::format("{:.0f}", value) : fmt::format("{}", value);
}

}  // namespace

LogTable read_log_table(const std::string& folder) {
  LogTable table;
  double trained = 0;
  for_each_line((std::filesystem::path(folder) / "log.jsonl").string(), [&](const Json& line) {
    const std::string kind = text_at(line, "kind");
    if (kind == "run") {
      table.start = seconds_of(text_at(line, "date"));
      table.metric = text_at(line, "metric");
    }
    if (kind != "step" && kind != "eval" && kind != "clusters") return;
    const double seconds = number_at(line, "seconds");
    if (kind == "step" && std::isfinite(seconds)) trained = seconds;
    LogRow row{.kind = kind,
               .split = kind == "eval" ? text_at(line, "split") : "",
               .step = integer_at(line, "step"),
               .time = table.start + trained,
               .values = {}};
    kind == "clusters" ? add_clusters(line, row.values) : add_numbers(line, "", row.values);
    table.rows.push_back(std::move(row));
  });
  if (table.rows.empty()) {
    throw Error("[export] expected a log with steps; got none in " + folder + "/log.jsonl");
  }
  return table;
}

std::string log_csv(const LogTable& table) {
  std::vector<LogRow> rows = table.rows;
  std::erase_if(rows, [](const LogRow& row) { return row.kind == "clusters"; });
  const std::vector<std::string> columns = columns_of(rows);
  std::string text = "kind,step,split";
  for (const std::string& column : columns) text += "," + csv_text(column);
  text += "\n";
  for (const LogRow& row : rows) {
    text += fmt::format("{},{},{}", row.kind, row.step, csv_text(row.split));
    for (const std::string& column : columns) {
      const auto found = std::find_if(row.values.begin(), row.values.end(),
                                      [&](const auto& item) { return item.first == column; });
      text += "," + (found == row.values.end() ? std::string() : csv_number(found->second));
    }
    text += "\n";
  }
  return text;
}

std::vector<ScalarEvent> log_events(const LogTable& table) {
  std::string metric = table.metric.empty() ? "metric" : table.metric;
  std::replace(metric.begin(), metric.end(), ' ', '_');
  std::vector<ScalarEvent> events;
  for (const LogRow& row : table.rows) {
    const std::string group = row.kind == "step"   ? "train"
                              : row.kind == "eval" ? row.split
                                                   : row.kind;
    for (const auto& [name, value] : row.values) {
      if (name == metric) continue;  // "accuracy": equals the metric
      events.push_back({.time = row.time,
                        .step = row.step,
                        .tag = group + "/" + (name == "metric" ? metric : name),
                        .value = static_cast<float>(value)});
    }
  }
  return events;
}

}  // namespace coterie::train
