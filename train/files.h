// SPDX-License-Identifier: MIT
// Files written as a whole or not at all. A process that is killed leaves at most entries whose
// names contain kPartial.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace coterie::train {

constexpr std::string_view kPartial = ".partial-";

// Writes to a temporary name beside `path`, syncs to disk and renames; removes it and throws Error
// (with the system's reason: "No space left on device") when anything fails.
void write_file(const std::string& path, std::string_view content);
void write_file(const std::string& path, const std::vector<std::string_view>& parts);

// Calls `fill` with a temporary folder beside `path`, syncs what is in it and renames it to `path`;
// what was there before is removed afterwards. Removes the temporary folder when `fill` throws.
void write_folder(const std::string& path, const std::function<void(const std::string&)>& fill);

std::string read_file(const std::string& path);  // throws Error when it cannot

}  // namespace coterie::train
