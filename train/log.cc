// SPDX-License-Identifier: MIT
#include "train/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "coterie/error.h"
#include "formats/files.h"
#include "formats/json_lines.h"

namespace coterie::train {
namespace {

// Whether a line belongs to a run up to `step`. A line cut off by a kill is not valid JSON.
bool belongs(std::string_view line, std::int64_t step) {
  const auto parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return false;
  const auto kind = parsed.find("kind"), at = parsed.find("step");
  if (kind == parsed.end() || !kind->is_string() || *kind == "end") return false;
  if (*kind == "run") return true;
  return at != parsed.end() && at->is_number_integer() && *at <= step;
}

std::string lines_up_to(const std::string& path, std::int64_t step) {
  std::string kept;
  for_each_json_line(path, [&](std::string_view line) {
    if (belongs(line, step)) kept += std::string(line) + "\n";
  });
  return kept;
}

}  // namespace

Log::Log(std::string path, std::int64_t resumed_step) : path_(std::move(path)) {
  const bool resumes = resumed_step != kNew && std::filesystem::exists(path_);
  write_file(path_, resumes ? lines_up_to(path_, resumed_step) : "");
}

// One write call per line: a killed process leaves whole lines, and at most the last one is cut
// off.
void Log::write(const nlohmann::json& line) const {
  const std::string text = line.dump() + "\n";
  const int file = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  const ssize_t written = file < 0 ? -1 : ::write(file, text.data(), text.size());
  const int error = errno;
  if (file >= 0) ::close(file);
  if (written == static_cast<ssize_t>(text.size())) return;
  throw Error("[log] cannot write " + path_ + ": " +
              (written < 0 ? std::generic_category().message(error) : "the disk is full"));
}

}  // namespace coterie::train
