// SPDX-License-Identifier: MIT
#include "train/reviews.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "coterie/error.h"
#include "formats/json_lines.h"

namespace coterie::train {

std::vector<Review> read_reviews(const std::vector<CorpusFile>& files, const std::string& part) {
  using nlohmann::json;
  for (const CorpusFile& file : files) {
    if (file.name.find("." + part + ".jsonl") == std::string::npos) continue;
    std::vector<Review> reviews;
    std::istringstream lines(file.text);
    for (std::string line; std::getline(lines, line);) {
      if (line.empty()) continue;
      check_json(line, "[data] " + file.name);
      const json row = json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!row.is_object() || !row.contains("text") || !row["text"].is_string() ||
          !row.contains("label") || !row["label"].is_number_integer()) {
        throw Error(fmt::format("[data] {}: expected an object with text and label in line {}",
                                file.name, reviews.size() + 1));
      }
      reviews.push_back({row["text"].get<std::string>(), row["label"] == 1});
    }
    if (reviews.empty()) throw Error("[data] " + file.name + ": expected reviews; got none");
    return reviews;
  }
  throw Error("[data] expected a file *." + part + ".jsonl or .jsonl.xz with reviews");
}

}  // namespace coterie::train
