// SPDX-License-Identifier: MIT
// The program coterie: one verb per job. Catches all exceptions here: one line on stderr, exit
// status 2 for a user's mistake, 1 for a failure.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/coterie/interrupt.h"
#include "coterie/error.h"
#include "coterie/near_miss.h"
#include "coterie/runtime.h"
#include "coterie/wrap.h"
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
                       message.starts_with("[memory]") || message.starts_with("[ranks]") ||
                       message.starts_with("[files] cannot write");
  return failure ? kFailure : kMistake;
}

// "unknown option --train.stepz; did you mean "--train.steps"?": the first word that is not
// expected, an option rather than a value.
std::string unknown_word(const CLI::App& program) {
  const auto verbs = program.get_subcommands();
  const CLI::App* const app = verbs.empty() ? &program : verbs[0];
  std::vector<std::string> names;
  for (const CLI::Option* option : app->get_options()) names.push_back(option->get_name());
  if (verbs.empty()) {
    for (const CLI::App* verb : program.get_subcommands([](const CLI::App*) { return true; }))
      names.push_back(verb->get_name());
  }
  const std::vector<std::string> words = program.remaining(/*recurse=*/true);
  const auto is_option = [](const std::string& word) { return word.starts_with("-"); };
  auto found = std::find_if(words.begin(), words.end(), is_option);
  if (verbs.empty() || found == words.end()) found = words.begin();
  const std::string word = found->substr(0, found->find('='));
  return fmt::format("unknown {} {}{}",
                     is_option(word) ? "option"
                     : verbs.empty() ? "verb"
                                     : "argument",
                     word, coterie::near_miss(word, names));
}

// Help for terminals of 80 columns.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool positional) const override {
    return line(make_option_name(option, positional) + make_option_opts(option),
                option->get_description());
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return line(verb->get_name(), verb->get_description());
  }

 private:
  static std::string line(const std::string& name, const std::string& description) {
    constexpr std::size_t kDescription = 30;  // column
    std::string text = "  " + name;
    coterie::append_wrapped(text, description, kDescription);
    return text;
  }
};

int run(int argc, char** argv) {
  CLI::App program("Content-clustered attention: correct, fast, measured.", "coterie");
  program.formatter(std::make_shared<HelpFormatter>());
  program.set_version_flag("--version", "coterie " + coterie::build_info().version);
  program.require_subcommand(0, 1);
  program.footer(
      "Run coterie VERB --help for options and examples, coterie help spec for the\n"
      "attentions.");
  coterie::cli::add_train(program);
  coterie::cli::add_eval(program);
  coterie::cli::add_generate(program);
  coterie::cli::add_inspect(program);
  coterie::cli::add_report(program);
  coterie::cli::add_export(program);
  coterie::cli::add_compare(program);
  coterie::cli::add_approximate(program);
  coterie::cli::add_bench(program);
  coterie::cli::add_info(program);
  coterie::cli::add_completion(program);
  coterie::cli::add_help(program);
  try {
    program.parse(argc, argv);  // runs the verb
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help, --version
    const auto verbs = program.get_subcommands();
    const std::string verb = verbs.empty() ? "" : verbs[0]->get_name() + " ";
    const bool unknown = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
    const std::string message = unknown ? unknown_word(program) : error.what();
    return report(fmt::format("{} (see coterie {}--help)", message, verb), kMistake);
  }
  if (program.get_subcommands().empty()) fmt::print("{}", program.help());
  return std::fflush(stdout) == 0 ? 0 : report("cannot write to standard output", kFailure);
}

// Threads of OpenMP, which torch uses, wait actively by default: beside other processes a training
// step then takes many times as long, and alone it is not faster (docs/training.md). OpenMP reads
// the policy when it is loaded, so the program starts again with it. This function runs before the
// libraries initialise themselves, which takes torch's half a second, and may not use them.
void wait_passively(int, char** argv, char** environment) {
  static char policy[] = "OMP_WAIT_POLICY=passive";
  constexpr std::string_view kNames[] = {"OMP_WAIT_POLICY=", "GOMP_SPINCOUNT="};
  std::size_t count = 0;
  for (; environment[count] != nullptr; ++count) {
    for (const std::string_view name : kNames) {
      if (std::string_view(environment[count]).starts_with(name)) return;
    }
  }
  const std::size_t bytes = (count + 2) * sizeof(char*);
  auto** const more = static_cast<char**>(__builtin_alloca(bytes));
  std::copy_n(environment, count, more);
  more[count] = policy;
  more[count + 1] = nullptr;
  ::execve("/proc/self/exe", argv, more);  // returns if it fails: then the policy stays as it is
}
[[gnu::section(".preinit_array"),
  gnu::used]] void (*const kBeforeLibraries)(int, char**, char**) = wait_passively;

}  // namespace

namespace {

int run_guarded(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const coterie::cli::Interrupted&) {
    return coterie::cli::interrupt_status();
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

}  // namespace

int main(int argc, char** argv) {
  const int status = run_guarded(argc, argv);
  if (!coterie::cli::leaves_without_destructors()) return status;
  std::fflush(nullptr);
  std::_Exit(status);
}
