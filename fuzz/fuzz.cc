// SPDX-License-Identifier: MIT
// The driver without libFuzzer: fuzz_spec [seconds [seed]]. A child process works through the
// inputs and keeps the index of the current one in shared memory, so the parent knows which input
// failed even if the child crashes. operator new limits memory. Returns 0 when all inputs behaved;
// writes the first that did not to a file.
#include "fuzz/fuzz.h"

#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <stdexcept>

#include "fuzz/mutate.h"

namespace {

constexpr std::size_t kMostMemory = std::size_t{64} << 20;  // a thousand times the longest input
constexpr std::size_t kMostLeft = std::size_t{4} << 20;     // after an input
std::atomic<std::size_t> allocated{0};

}  // namespace

void* operator new(std::size_t size) {
  void* const memory = size > kMostMemory ? nullptr : std::malloc(size);
  if (memory == nullptr || (allocated += malloc_usable_size(memory)) > kMostMemory) {
    std::fprintf(stderr, "a huge allocation: %zu bytes on top of %zu\n", size, allocated.load());
    std::abort();
  }
  return memory;
}

void operator delete(void* memory) noexcept {
  if (memory != nullptr) allocated -= malloc_usable_size(memory);
  std::free(memory);
}

// Without these, sanitizers bring their own, which do not count.
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return operator new(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return operator new(size);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }

namespace coterie::fuzz {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::duration;

constexpr double kLongest = 10.0;  // seconds for one input

struct Progress {
  std::atomic<std::uint64_t> index{0}, accepted{0};
};

struct Options {
  double seconds = 60.0;
  std::uint64_t seed = 1;
};

double seconds_since(Clock::time_point start) {
  return duration<double>(Clock::now() - start).count();
}

// In the child; does not return.
[[noreturn]] void work(const Target& target, const Options& options, Progress& progress) {
  const auto start = Clock::now();
  for (; seconds_since(start) < options.seconds; ++progress.index) {
    const std::string input = make_input(target, options.seed, progress.index);
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
    progress.accepted = accepted_inputs();
    if (allocated > kMostLeft) {
      std::fprintf(stderr, "memory is not freed: %zu bytes\n", allocated.load());
      std::abort();
    }
  }
  std::_Exit(0);
}

// Waits for the child; kills it when one input takes too long. Returns whether all inputs behaved.
bool watch(pid_t child, const Progress& progress) {
  std::uint64_t last = 0;
  auto since = Clock::now();
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    usleep(20'000);
    if (progress.index != last) {
      last = progress.index;
      since = Clock::now();
    } else if (seconds_since(since) > kLongest) {
      std::fprintf(stderr, "one input takes more than %.0f s\n", kLongest);
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      return false;
    }
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

Options parse_options(int argc, char** argv) {
  Options options;
  if (argc > 1) options.seconds = std::strtod(argv[1], nullptr);
  if (argc > 2) options.seed = std::strtoull(argv[2], nullptr, 10);
  return options;
}

int run(int argc, char** argv) {
  const Target target = fuzz::target();
  const Options options = parse_options(argc, argv);
  void* const shared =
      mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("cannot share memory");
  Progress& progress = *new (shared) Progress;
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("cannot fork");
  if (child == 0) work(target, options, progress);
  const bool good = watch(child, progress);
  const std::uint64_t index = progress.index, accepted = progress.accepted;
  if (good) {
    std::printf("%llu inputs, %llu of them accepted\n", static_cast<unsigned long long>(index),
                static_cast<unsigned long long>(accepted));
    return 0;
  }
  const std::string file = std::string(argv[0]) + ".input";
  std::ofstream(file, std::ios::binary) << make_input(target, options.seed, index);
  std::fprintf(stderr, "input %llu of seed %llu did not behave; it is in %s\n",
               static_cast<unsigned long long>(index),
               static_cast<unsigned long long>(options.seed), file.c_str());
  return 1;
}

}  // namespace
}  // namespace coterie::fuzz

int main(int argc, char** argv) { return coterie::fuzz::run(argc, argv); }
