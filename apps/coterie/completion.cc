// SPDX-License-Identifier: MIT
// coterie completion: a script that completes verbs, options and their words in a shell.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <memory>
#include <string>
#include <vector>

#include "train/option_values.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct Completed {
  std::string name, help;          // "--task"
  std::vector<std::string> words;  // that the option takes; empty: other values, or none
  bool takes_value = false;
};

struct CompletedVerb {
  std::string name, help;
  std::vector<Completed> options;
  std::vector<std::string> words;  // of its positional arguments
};

// "cpu|cuda" -> {"cpu", "cuda"}; "mixture|normal|FILE" -> {"mixture", "normal"}; "N" -> {}.
std::vector<std::string> words_of(const CLI::Option& option) {
  std::vector<std::string> words;
  for (const std::string& word : CLI::detail::split(option.get_type_name(), '|')) {
    const auto letter = [](unsigned char c) { return std::islower(c) || c == '-' || c == '_'; };
    const bool plain = std::all_of(word.begin(), word.end(),
                                   [&](unsigned char c) { return letter(c) || std::isdigit(c); });
    if (plain && !word.empty() && letter(static_cast<unsigned char>(word[0]))) {
      words.push_back(word);
    }
  }
  return words;
}

// Up to the end of the first sentence, without the characters that shells treat specially.
std::string short_help(const std::string& text) {
  std::string line = text.substr(0, std::min(text.find_first_of(";\n"), text.find(". ")));
  std::erase_if(line,
                [](char c) { return std::string("'\"`$\\[]:").find(c) != std::string::npos; });
  return line;
}

std::vector<CompletedVerb> completed_verbs(const CLI::App& program) {
  std::vector<CompletedVerb> verbs;
  for (const CLI::App* app : program.get_subcommands([](const CLI::App*) { return true; })) {
    CompletedVerb verb{app->get_name(), short_help(app->get_description()), {}, {}};
    for (const CLI::Option* option : app->get_options()) {
      if (option->get_positional()) {
        verb.words = words_of(*option);
      } else {
        verb.options.push_back({"--" + option->get_lnames().at(0),
                                short_help(option->get_description()), words_of(*option),
                                option->get_items_expected_max() > 0});
      }
    }
    verbs.push_back(std::move(verb));
  }
  return verbs;
}

std::string option_names(const CompletedVerb& verb) {
  std::string text;
  for (const Completed& option : verb.options) text += (text.empty() ? "" : " ") + option.name;
  return text;
}

// Words of an option come after it; otherwise options of the verb, or files.
std::string bash_script(const std::vector<CompletedVerb>& verbs) {
  std::string names, choices, options;
  for (const CompletedVerb& verb : verbs) {
    names += (names.empty() ? "" : " ") + verb.name;
    for (const Completed& option : verb.options) {
      if (option.words.empty()) continue;
      choices += fmt::format("    \"{} {}\") words=\"{}\" ;;\n", verb.name, option.name,
                             CLI::detail::join(option.words, " "));
    }
    options += fmt::format("    {}) words=\"{}\" plain=\"{}\" ;;\n", verb.name, option_names(verb),
                           CLI::detail::join(verb.words, " "));
  }
  return fmt::format(R"(# Completion of coterie for bash: source <(coterie completion bash)
_coterie() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words="" plain=""
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{0} --help --version" -- "$word"))
    return
  fi
  case "$verb ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{1}  esac
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "$verb" in
{2}  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  elif [[ -n $plain ]]; then
    COMPREPLY=($(compgen -W "$plain" -- "$word"))
  fi
}}
complete -o default -F _coterie coterie
)",
                     names, choices, options);
}

std::string zsh_script(const std::vector<CompletedVerb>& verbs) {
  std::string names, cases;
  for (const CompletedVerb& verb : verbs) {
    names += fmt::format("    '{}:{}'\n", verb.name, verb.help);
    cases += fmt::format("    {}) _arguments", verb.name);
    for (const Completed& option : verb.options) {
      cases += fmt::format(" \\\n      '{}[{}]", option.name, option.help);
      if (!option.words.empty()) {
        cases += fmt::format(":value:({})", CLI::detail::join(option.words, " "));
      } else if (option.takes_value) {
        cases += ":value:_files";
      }
      cases += "'";
    }
    cases += verb.words.empty()
                 ? " \\\n      '*:file:_files' ;;\n"
                 : fmt::format(" \\\n      ':value:({})' ;;\n", CLI::detail::join(verb.words, " "));
  }
  return fmt::format(R"(#compdef coterie
# Completion of coterie for zsh: a file _coterie in $fpath, or source <(coterie completion zsh)
_coterie() {{
  local -a verbs=(
{0}  )
  if ((CURRENT == 2)); then
    _describe verb verbs
    return
  fi
  local verb=$words[2]
  shift words
  ((--CURRENT))
  case $verb in
{1}  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _coterie "$@"
else
  compdef _coterie coterie
fi
)",
                     names, cases);
}

std::string fish_script(const std::vector<CompletedVerb>& verbs) {
  std::string text =
      "# Completion of coterie for fish: coterie completion fish | source\n"
      "complete -c coterie -n __fish_use_subcommand -l version -d 'Version'\n";
  for (const CompletedVerb& verb : verbs) {
    text += fmt::format("complete -c coterie -n __fish_use_subcommand -f -a {} -d '{}'\n",
                        verb.name, verb.help);
    const std::string where =
        fmt::format("complete -c coterie -n '__fish_seen_subcommand_from {}'", verb.name);
    for (const Completed& option : verb.options) {
      text += fmt::format("{} -l {} -d '{}'", where, option.name.substr(2), option.help);
      if (!option.words.empty()) {
        text += fmt::format(" -x -a '{}'", CLI::detail::join(option.words, " "));
      } else if (option.takes_value) {
        text += " -r";
      }
      text += "\n";
    }
    if (!verb.words.empty())
      text += fmt::format("{} -f -a '{}'\n", where, CLI::detail::join(verb.words, " "));
  }
  return text;
}

const char* const kCompletionExamples =
    "Examples:\n"
    "  source <(coterie completion bash)\n"
    "  coterie completion zsh > ~/.zfunc/_coterie\n"
    "  coterie completion fish > ~/.config/fish/completions/coterie.fish\n";

}  // namespace

void add_completion(CLI::App& program) {
  CLI::App* verb =
      program.add_subcommand("completion", "Print a script that completes commands in a shell");
  const auto shell = std::make_shared<std::string>();  // lives as long as the callback
  train::add_choice(*verb, "shell", *shell, {"bash", "zsh", "fish"}, "Shell")->required();
  verb->footer(kCompletionExamples);
  verb->callback([shell, &program] {
    const std::vector<CompletedVerb> verbs = completed_verbs(program);
    fmt::print("{}", *shell == "bash"  ? bash_script(verbs)
                     : *shell == "zsh" ? zsh_script(verbs)
                                       : fish_script(verbs));
  });
}

}  // namespace coterie::cli
