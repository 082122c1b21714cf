// SPDX-License-Identifier: MIT
#include "apps/coterie/interrupt.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

namespace coterie::cli {
namespace {

std::atomic<bool> interrupted{false};
std::atomic<int> arrived{0};
Interrupts own_kind = Interrupts::alone;
bool without_destructors = false;
static_assert(std::atomic<int>::is_always_lock_free);  // for the signal handler

void note(int signal) {
  constexpr std::string_view kMessage =
      "\ncoterie: finishing the step and saving; again to quit now\n";
  constexpr std::string_view kTogether = "\ncoterie: finishing the step on all ranks and saving\n";
  const int error = errno;
  const bool first = !interrupted;
  arrived = signal;
  interrupted = true;
  if (own_kind != Interrupts::alone) {
    if (first && own_kind == Interrupts::first_rank) {
      (void)!::write(STDERR_FILENO, kTogether.data(), kTogether.size());
    }
    errno = error;
    return;
  }
  (void)!::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  // Both signals now end the process.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
  errno = error;
}

}  // namespace

const std::atomic<bool>& catch_interrupts(Interrupts kind) {
  own_kind = kind;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return interrupted;
}

int interrupt_status() { return 128 + arrived; }

void leave_without_destructors() { without_destructors = true; }
bool leaves_without_destructors() { return without_destructors; }

}  // namespace coterie::cli
