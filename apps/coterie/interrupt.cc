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
static_assert(std::atomic<int>::is_always_lock_free);  // for the signal handler

void note(int signal) {
  constexpr std::string_view kMessage =
      "\ncoterie: finishing the step and saving; again to quit now\n";
  const int error = errno;
  arrived = signal;
  interrupted = true;
  (void)!::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  // Both signals now end the process.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
  errno = error;
}

}  // namespace

const std::atomic<bool>& catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return interrupted;
}

int interrupt_status() { return 128 + arrived; }

}  // namespace coterie::cli
