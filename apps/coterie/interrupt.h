// SPDX-License-Identifier: MIT
// SIGINT and SIGTERM: the first one asks to stop, the second one ends the process.
#pragma once

#include <atomic>

namespace coterie::cli {

// Whether a signal has arrived. The first one prints that the step is finished first.
const std::atomic<bool>& catch_interrupts();

// Thrown by a verb that a signal ended early, after it saved what it had.
struct Interrupted {};

// Exit status for Interrupted: 128 + the signal, as of a process that the signal killed.
int interrupt_status();

}  // namespace coterie::cli
