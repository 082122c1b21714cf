// SPDX-License-Identifier: MIT
// The program coterie: one verb per job. Catches all exceptions here: one line on stderr, exit
// status 2 for a user's mistake, 1 for a failure.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "verbs.h"

namespace {

constexpr int kFailure = 1, kMistake = 2;

// Prints one line of limited length without control characters: messages quote untrusted files.
int report(std::string message, int status) {
  constexpr std::size_t kLongest = 2000;
  while (!message.empty() && message.back() == '\n') message.pop_back();
  if (message.size() > kLongest) message.replace(kLongest, std::string::npos, " ...");
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::replace_if(
      message.begin(), message.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  fmt::print(stderr, "coterie: {}\n", message);
  return status;
}

// Broken invariants and device failures are not mistakes of the user.
int status_of(const coterie::Error& error) {
  const std::string message = error.what();
  const bool failure = message.starts_with("[internal]") || message.starts_with("[cuda") ||
                       message.starts_with("[files] cannot write");
  return failure ? kFailure : kMistake;
}

int run(int argc, char** argv) {
  CLI::App program("Content-clustered attention: correct, fast, measured.", "coterie");
  program.set_version_flag("--version", "coterie " + coterie::build_info().version);
  program.require_subcommand(0, 1);
  program.footer("Run coterie VERB --help for options and examples.");
  coterie::cli::add_train(program);
  coterie::cli::add_eval(program);
  coterie::cli::add_generate(program);
  coterie::cli::add_inspect(program);
  coterie::cli::add_report(program);
  coterie::cli::add_export(program);
  coterie::cli::add_compare(program);
  coterie::cli::add_bench(program);
  coterie::cli::add_info(program);
  try {
    program.parse(argc, argv);  // runs the verb
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help, --version
    const auto verbs = program.get_subcommands();
    const std::string verb = verbs.empty() ? "" : verbs[0]->get_name() + " ";
    return report(fmt::format("{} (see coterie {}--help)", error.what(), verb), kMistake);
  }
  if (program.get_subcommands().empty()) {
    return report("expected a verb; got none (see coterie --help)", kMistake);
  }
  return std::fflush(stdout) == 0 ? 0 : report("cannot write to standard output", kFailure);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const coterie::Error& error) {
    return report(error.what(), status_of(error));
  } catch (const std::bad_alloc&) {
    return report("not enough memory", kFailure);
  } catch (const std::exception& error) {
    const std::string message = error.what();  // torch appends a trace
    return report(message.substr(0, message.find("\nException raised from")), kFailure);
  } catch (...) {
    return report("unknown failure", kFailure);
  }
}
