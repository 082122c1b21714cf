// SPDX-License-Identifier: MIT
#include "bench_options.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>

#include "bench_saved.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "train/option_values.h"
#include "train/options.h"

namespace coterie::cli {
namespace {

// "512", "4k" (4096), "1M" (1048576).
std::int64_t parse_length(const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  const std::string suffix(result.ptr, end);
  const std::int64_t factor = suffix == ""                     ? 1
                              : suffix == "k"                  ? 1024
                              : suffix == "m" || suffix == "M" ? 1 << 20
                                                               : 0;
  constexpr std::int64_t kLongest = 1 << 30;
  if (result.ec != std::errc() || factor == 0 || value < 1 || value > kLongest / factor) {
    refuse_option("--lengths", "expected lengths like 512, 4k or 1k:8k; got \"" + text + "\"");
  }
  return value * factor;
}

std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> lengths;
  for (const std::string& part : CLI::detail::split(text, ',')) {
    const std::size_t colon = part.find(':');
    const std::int64_t first = parse_length(part.substr(0, colon));
    const std::int64_t last =
        colon == std::string::npos ? first : parse_length(part.substr(colon + 1));
    for (std::int64_t length = first; length <= last; length *= 2) lengths.push_back(length);
  }
  if (lengths.empty()) {
    refuse_option("--lengths", "expected at least one length; got \"" + text + "\"");
  }
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

bool is_file(const std::string& data) { return data != "mixture" && data != "normal"; }

void add_problem_options(CLI::App& verb, BenchOptions& options) {
  verb.add_option("--attention", options.attention,
                  "Attention specs to measure; coterie help spec explains them")
      ->type_name("SPEC");
  verb.add_option("--lengths", options.lengths,
                  "Sequence lengths: a list (512,1k,4k) or a doubling range (1k:8k). Default: "
                  "512:4k, or all tokens of a --data file")
      ->type_name("LIST");
  train::add_number(verb, "--heads", options.heads, 1, 1024, "Number of query heads");
  train::add_number(verb, "--kv-heads", options.kv_heads, 0, 1024,
                    "Number of key/value heads; same as --heads if 0");
  train::add_number(verb, "--dim", options.dim, 1, 1024, "Head dimension");
  train::add_number(verb, "--batch", options.batch, 1, 4096, "Batch size");
  verb.add_flag("--causal", options.causal, "Causal attention");
  train::add_choice(verb, "--device", options.device, {"cpu", "cuda"}, "Device to run on")
      ->type_name(train::built_with_cuda() ? "cpu|cuda" : "cpu");
  train::add_choice(verb, "--pass", options.pass, {"forward", "backward", "both"}, "Pass to time");
  verb.add_option("--data", options.data,
                  "Input data: a mixture of Gaussians with Zipf-distributed weights (mixture), "
                  "independent normal tokens (normal), or a safetensors file with a model's q, k "
                  "and v of shape (batch, heads, tokens, dim) or (heads, tokens, dim)")
      ->type_name("mixture|normal|FILE")
      ->capture_default_str();
  train::add_choice(verb, "--dtype", options.dtype, {"f32", "bf16", "f16", "f64"},
                    "Element type of queries, keys and values");
  train::add_number(verb, "--seed", options.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "Random seed of data and clusters");
}

void add_timing_options(CLI::App& verb, BenchOptions& options) {
  const auto set_threads = [&options](const std::vector<std::string>& counts) {
    options.threads.clear();
    for (const std::string& count : counts) {
      options.threads.push_back(train::parse_number<int>("--threads", count, 1, kMaxThreads));
    }
  };
  verb.add_option_function<std::vector<std::string>>(
          "--threads", set_threads,
          "CPU thread counts to measure, as a list (1,2). Default: all cores")
      ->delimiter(',')
      ->type_name("LIST");
  train::add_number(
      verb, "--repeats", options.repeats, 0, 1000000,
      "Timed runs per attention; if 0, as many as --seconds allows, up to 20 (50 on a GPU)");
  train::add_number(verb, "--seconds", options.seconds, 1e-3, 1e6,
                    "Target duration when --repeats is 0");
  verb.add_flag("--gate", options.gate,
                "Compare all outputs with the specification first; stop if one is wrong");
  verb.add_flag("--alone", options.alone,
                "Skip full attention, and with it the speeds; for long sequences");
  verb.add_option("--json", options.json, "Write the results to this file as JSON lines")
      ->type_name("FILE");
  verb.add_option("--title", options.title, "Title of the results in a report")->type_name("TEXT");
  verb.add_option("--report", options.report,
                  "Print a Markdown report of JSON results instead of measuring")
      ->type_name("FILE");
}

const char* const kBenchExamples =
    R"help(Without --attention, a default set with every mechanism is measured; on a GPU,
those that have kernels there. Errors are relative to full attention on the same
data, over all queries or, for long sequences, a sample. The reference is causal
for causal attentions, and uses the queries as keys for attentions with shared
queries and keys. Speeds are relative to torch's full attention if this program
is built with torch (timed in turn with ours), otherwise to our own. Learned
centroids are replaced by k-means of the data; positions are not applied.

Examples:
  coterie bench
  coterie bench --attention "i-clustered(clusters=256)" --lengths 1k:16k
  coterie bench --causal --attention "local(window=256)" \
    "routing(clusters=32,window=256)"
  coterie bench --pass forward --dtype bf16 --lengths 512,3k --json bench.jsonl
  coterie bench --threads 1,2 --data model.safetensors
  coterie bench --report bench.jsonl > report.md
)help";
const char* const kBenchCudaExample =
    "  coterie bench --device cuda --dtype bf16 --heads 16 --lengths 4k,64k\n";

}  // namespace

void refuse_option(const std::string& option, const std::string& message) {
  throw CLI::ValidationError(option, message);
}

void add_bench_options(CLI::App& verb, BenchOptions& options) {
  add_problem_options(verb, options);
  add_timing_options(verb, options);
  verb.footer(std::string(kBenchExamples) + (train::built_with_cuda() ? kBenchCudaExample : "") +
              "\n");
}

void check_conflicts(const CLI::App& verb, const BenchOptions& options) {
  const auto given = [&](const char* name) { return verb.get_option(name)->count() > 0; };
  for (const char* name : {"--heads", "--kv-heads", "--dim", "--batch"}) {
    if (is_file(options.data) && given(name)) {
      refuse_option(name,
                    "the shape comes from the tensors in " + options.data + "; remove this option");
    }
  }
  for (const CLI::Option* option : verb.get_options()) {
    if (!options.report.empty() && option->count() > 0 && option->get_name() != "--report") {
      refuse_option(option->get_name(), "cannot be combined with --report, which measures nothing");
    }
  }
}

std::string bench_command(const CLI::App& verb) {
  std::string command = "coterie " + verb.get_name();
  for (const CLI::Option* option : verb.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || name == "--json" || name == "--title") continue;
    command += " " + name;
    if (option->get_items_expected_max() == 0) continue;  // a flag
    for (const std::string& value : option->results()) {
      const bool plain = value.find_first_of(" ()*\"") == std::string::npos;
      command += plain ? " " + value : " \"" + value + "\"";
    }
  }
  return command;
}

bench::Problem make_problem(const BenchOptions& options) {
  bench::Problem problem;
  problem.B = options.batch;
  problem.heads = options.heads;
  problem.kv_heads = options.kv_heads > 0 ? options.kv_heads : options.heads;
  problem.D = options.dim;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    if (options.dtype == dtype_name(dtype)) problem.dtype = dtype;
  }
  problem.device = options.device == "cuda" ? Device::cuda : Device::cpu;
  problem.seed = options.seed;
  if (options.data == "normal") {
    problem.data = bench::DataKind::normal;
  } else if (is_file(options.data)) {
    use_saved_rows(options.data, problem);
  }
  if (problem.heads % problem.kv_heads != 0) {
    refuse_option("--kv-heads", fmt::format("expected a divisor of the {} heads; got {}",
                                            problem.heads, problem.kv_heads));
  }
  return problem;
}

std::vector<std::int64_t> make_lengths(const BenchOptions& options, const bench::Problem& problem) {
  const bool saved = problem.data == bench::DataKind::saved;
  if (saved && options.lengths.empty()) return {problem.N};
  std::vector<std::int64_t> lengths =
      parse_lengths(options.lengths.empty() ? "512:4k" : options.lengths);
  if (saved && lengths.back() > problem.N) {
    refuse_option("--lengths", fmt::format("expected at most the {} tokens of {}; got {}",
                                           problem.N, options.data, lengths.back()));
  }
  return lengths;
}

bench::Pass make_pass(const std::string& name) {
  if (name == "both") return bench::Pass::both;
  return name == "forward" ? bench::Pass::forward : bench::Pass::backward;
}

}  // namespace coterie::cli
