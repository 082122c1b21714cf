// SPDX-License-Identifier: MIT
// The verbs of the program: each function adds a subcommand with its options and callback.
#pragma once

namespace CLI {
class App;
}

namespace coterie::cli {

void add_approximate(CLI::App& program);
void add_bench(CLI::App& program);
void add_compare(CLI::App& program);
void add_completion(CLI::App& program);
void add_eval(CLI::App& program);
void add_export(CLI::App& program);
void add_generate(CLI::App& program);
void add_help(CLI::App& program);
void add_info(CLI::App& program);
void add_inspect(CLI::App& program);
void add_report(CLI::App& program);
void add_train(CLI::App& program);

}  // namespace coterie::cli
