// SPDX-License-Identifier: MIT
// SIGINT and SIGTERM: the first one asks to stop, the second one ends the process.
#pragma once

#include <atomic>
#include <cstdint>

namespace coterie::cli {

// Whether a signal has arrived. The first one prints that the step is finished first. One of
// several ranks also stays at the second one: torchrun and terminals send more than one, and ranks
// stop together.
enum class Interrupts : std::uint8_t { alone, first_rank, other_rank };
const std::atomic<bool>& catch_interrupts(Interrupts kind = Interrupts::alone);

// Thrown by a verb that a signal ended early, after it saved what it had.
struct Interrupted {};

// Exit status for Interrupted: 128 + the signal, as of a process that the signal killed.
int interrupt_status();

// Ends the program without destructors of static objects: threads of c10d may still run.
void leave_without_destructors();
bool leaves_without_destructors();

}  // namespace coterie::cli
