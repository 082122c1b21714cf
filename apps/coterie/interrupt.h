// SPDX-License-Identifier: MIT
// SIGINT and SIGTERM as a request to finish the step, save and stop.
#pragma once

#include <atomic>

namespace coterie::cli {

// Set by the first signal; the second one ends the process at once.
const std::atomic<bool>& catch_interrupts();

}  // namespace coterie::cli
