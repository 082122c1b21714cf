// SPDX-License-Identifier: MIT
// coterie report: an HTML page about runs and a bench record.
#include "report/report.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "formats/files.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct ReportOptions {
  train::ReportInputs inputs;
  std::string out = "report.html";
};

const char* const kReportExamples =
    R"help(RUN is a folder written by coterie train, or a folder that contains some. Runs
of the same task are compared.

Examples:
  coterie report runs/
  coterie report runs/copy-full runs/copy-clustered --title Copy --out copy.html
  coterie bench --json bench.jsonl && coterie report runs/ --bench bench.jsonl
)help";

}  // namespace

void add_report(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "report", "Write an HTML page with curves, scores, speeds and clusters of runs");
  const auto shared = std::make_shared<ReportOptions>();  // lives as long as the callback
  ReportOptions& options = *shared;
  verb->add_option("runs", options.inputs.runs, "Run folders")->type_name("RUN");
  verb->add_option("--bench", options.inputs.bench, "Output of coterie bench --json to include")
      ->type_name("FILE");
  verb->add_option("--approximate", options.inputs.approximations,
                   "Outputs of coterie approximate --json to include")
      ->type_name("FILE");
  verb->add_option("--out", options.out, "Output file")->type_name("FILE")->capture_default_str();
  verb->add_option("--title", options.inputs.title, "Title of the page")
      ->type_name("TEXT")
      ->capture_default_str();
  verb->footer(kReportExamples);
  verb->callback([shared] {
    train::write_file(shared->out, train::make_report(shared->inputs));
    fmt::print("{}\n", shared->out);
  });
}

}  // namespace coterie::cli
