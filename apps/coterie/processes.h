// SPDX-License-Identifier: MIT
// Several processes of coterie train: starting them, and what one of them sets up.
#pragma once

#include <memory>
#include <optional>

#include "train/config.h"
#include "train/place.h"
#include "train/ranks.h"

namespace coterie::cli {

// Runs this command without --processes N in N processes by torchrun; does not return. Throws Error
// if torchrun is not found.
[[noreturn]] void start_processes(int processes);

// Where this process is among several; empty if it is alone.
std::optional<train::Place> own_place();

// Meets the other ranks and prints what they do, once. Throws Error if they have other options.
std::unique_ptr<train::Ranks> meet_ranks(const train::Place& place, const train::Config& config,
                                         int timeout);

}  // namespace coterie::cli
