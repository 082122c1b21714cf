// SPDX-License-Identifier: MIT
// coterie bench: time, error and memory of attentions beside full attention.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bench/gate.h"
#include "bench/peak.h"
#include "bench_report.h"
#include "coterie/runtime.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

struct BenchOptions {
  std::vector<std::string> attention;
  std::string lengths = "512:4k";
  std::int64_t heads = 8;
  std::int64_t kv_heads = 0;  // 0: as many as heads
  std::int64_t dim = 64;
  std::int64_t batch = 1;
  bool causal = false;
  std::string pass = "both";
  std::string data = "mixture";
  std::string dtype = "f32";
  int threads = 0;  // 0: the library's choice
  int repeats = 0;  // 0: as many as fit in `seconds`
  double seconds = 60;
  std::uint64_t seed = 1;
  bool gate = false;
  std::string json;
};

// Measured when nothing is named: every mechanism, and the causal forms of those that have one.
std::vector<bench::Entry> default_entries(bool causal_only) {
  std::vector<bench::Entry> entries;
  const std::vector<std::string> open = {"local(window=256)",
                                         "strided(stride=32)",
                                         "oracle-top",
                                         "clustered(clusters=100)",
                                         "i-clustered(clusters=100)",
                                         "i-clustered(clusters=100,clustering=hamming-keys)",
                                         "lsh(combine=mean)",
                                         "routing(clusters=16,window=256)",
                                         "routing(clusters=16,membership=balanced)",
                                         "cast(clusters=16,size=256)"};
  const std::vector<std::string> causal = {
      "local(window=256)", "routing(clusters=16,window=256,causal=strict)",
      "routing(clusters=16,window=256,causal=paper)", "i-clustered(clusters=100,causal=reference)",
      "lsh(combine=mean)"};
  for (const std::string& spec : open) {
    if (!causal_only) entries.push_back(bench::make_entry(spec, false));
  }
  for (const std::string& spec : causal) entries.push_back(bench::make_entry(spec, true));
  return entries;
}

// What there is to measure: full attention of each causality that occurs, then the rest.
std::vector<bench::Entry> make_entries(const BenchOptions& options) {
  std::vector<bench::Entry> wanted;
  if (options.attention.empty()) wanted = default_entries(options.causal);
  for (const std::string& spec : options.attention) {
    wanted.push_back(bench::make_entry(spec, options.causal));
  }
  std::vector<bench::Entry> entries;
  for (const bool causal : {false, true}) {
    const bool occurs = std::any_of(wanted.begin(), wanted.end(), [&](const bench::Entry& entry) {
      return entry.causal == causal;
    });
    if (occurs) entries.push_back(bench::make_entry("full", causal));
  }
  for (const bench::Entry& entry : wanted) {
    entry.spec.head_counts(options.heads);  // refuses counts that do not add up
    if (!bench::is_full(entry)) entries.push_back(entry);
  }
  return entries;
}

[[noreturn]] void refuse(const std::string& option, const std::string& message) {
  throw CLI::ValidationError(option, message);
}

// "512", "4k" (4096), "1m" (1048576).
std::int64_t parse_length(const std::string& text) {
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  const std::string suffix(result.ptr, end);
  const std::int64_t factor = suffix == "" ? 1 : suffix == "k" ? 1024 : suffix == "m" ? 1 << 20 : 0;
  constexpr std::int64_t kLongest = 1 << 30;
  if (result.ec != std::errc() || factor == 0 || value < 1 || value > kLongest / factor) {
    refuse("--lengths", "expected lengths like 512, 4k or 1k:8k; got \"" + text + "\"");
  }
  return value * factor;
}

// "512,1k,4k" or "1k:8k" (doubling), or both.
std::vector<std::int64_t> parse_lengths(const std::string& text) {
  std::vector<std::int64_t> lengths;
  for (const std::string& part : CLI::detail::split(text, ',')) {
    const std::size_t colon = part.find(':');
    const std::int64_t first = parse_length(part.substr(0, colon));
    const std::int64_t last =
        colon == std::string::npos ? first : parse_length(part.substr(colon + 1));
    for (std::int64_t length = first; length <= last; length *= 2) lengths.push_back(length);
  }
  if (lengths.empty()) refuse("--lengths", "expected at least one length; got \"" + text + "\"");
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

bench::Problem make_problem(const BenchOptions& options) {
  bench::Problem problem;
  problem.B = options.batch;
  problem.heads = options.heads;
  problem.kv_heads = options.kv_heads > 0 ? options.kv_heads : options.heads;
  if (problem.heads % problem.kv_heads != 0) {
    refuse("--kv-heads", fmt::format("expected a divisor of the {} heads; got {}", problem.heads,
                                     problem.kv_heads));
  }
  problem.D = options.dim;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    if (options.dtype == dtype_name(dtype)) problem.dtype = dtype;
  }
  problem.data = options.data == "normal" ? bench::DataKind::normal : bench::DataKind::mixture;
  problem.seed = options.seed;
  return problem;
}

bench::Pass make_pass(const std::string& name) {
  if (name == "both") return bench::Pass::both;
  return name == "forward" ? bench::Pass::forward : bench::Pass::backward;
}

// A line on the terminal that says what is being run; nothing when stderr is a file.
void show_progress(const std::string& text) {
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  if (!terminal) return;
  fmt::print(stderr, "\r\x1b[K{:.78}", text);  // back to the start, clear
  std::fflush(stderr);
}

// The time for a length out of what is left: long ones get more, and what short ones leave.
bench::TimingPlan make_plan(const BenchOptions& options, double seconds_left, double share) {
  if (options.repeats > 0) {
    return {.repeats = options.repeats, .min_repeats = options.repeats, .seconds = 0};
  }
  return {.seconds = std::max(0.001, seconds_left * share)};
}

void check_json_path(const std::string& path) {
  if (path.empty()) return;
  if (!std::filesystem::is_directory(std::filesystem::absolute(path).parent_path())) {
    refuse("--json", "expected a file in a folder that exists; got \"" + path + "\"");
  }
}

// Compares all entries with the specification; throws when one is wrong.
void run_gate(const std::vector<bench::Entry>& entries, const bench::Problem& problem) {
  const std::vector<bench::Check> checks = bench::gate(
      entries, problem,
      [](const bench::Contender& contender, int, int) { show_progress(contender.name); });
  show_progress("");
  bench::refuse_wrong(checks);
  fmt::print("{} outputs and gradients agree with the specification.\n", checks.size());
}

// Measures one length after the other and prints each.
void measure_lengths(const BenchOptions& options, const std::vector<std::int64_t>& lengths,
                     const std::vector<bench::Entry>& entries, BenchReport& report) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  std::int64_t tokens_left = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  for (const std::int64_t N : lengths) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double share = static_cast<double>(N) / static_cast<double>(tokens_left);
    const bench::TimingPlan plan = make_plan(options, options.seconds - seconds, share);
    report.problem.N = N;
    const auto measured = bench::measure(
        entries, report.problem, report.pass, plan,
        [&](const bench::Contender& contender, int round, int rounds) {
          show_progress(fmt::format("{} tokens, {}/{}: {}", N, round, rounds, contender.name));
        });
    show_progress("");
    print_table(measured);
    std::fflush(stdout);
    report.measurements.insert(report.measurements.end(), measured.begin(), measured.end());
    tokens_left -= N;
  }
}

void run_bench(const BenchOptions& options) {
  const std::vector<std::int64_t> lengths = parse_lengths(options.lengths);
  check_json_path(options.json);
  const std::vector<bench::Entry> entries = make_entries(options);
  BenchReport report;
  report.problem = make_problem(options);
  report.problem.N = lengths.back();
  report.pass = make_pass(options.pass);
  if (options.threads > 0) set_threads(options.threads);

  if (options.gate) run_gate(entries, report.problem);
  report.gated = options.gate;
  report.copy_gbs = bench::copy_gigabytes_per_second();
  print_header(report);
  measure_lengths(options, lengths, entries, report);
  print_crossovers(report);
  if (!options.json.empty()) write_json(report, options.json);
}

// The range stands in the message of the check, not in the help.
template <class Integer>
void add_integer(CLI::App& verb, const char* name, Integer& field, Integer low, Integer high,
                 const char* help) {
  verb.add_option(name, field, help)
      ->check(CLI::Range(low, high).description(""))
      ->type_name("N")
      ->capture_default_str();
}

void add_choice(CLI::App& verb, const char* name, std::string& field,
                const std::vector<std::string>& words, const char* help) {
  verb.add_option(name, field, help)
      ->check(CLI::IsMember(words).description(""))
      ->type_name(CLI::detail::join(words, "|"))
      ->capture_default_str();
}

const char* const kExamples =
    "Without --attention, a set with every mechanism is measured. Errors are against this "
    "library's\n"
    "full attention on the same data, causal for attentions that are causal; with shared queries "
    "and\n"
    "keys, over the queries as keys. Speeds are against torch's full attention where this program "
    "is\n"
    "built with torch, timed in turn with ours; else against our own.\n"
    "Learned centroids are replaced by k-means of the data; positions are not applied.\n"
    "\n"
    "Examples:\n"
    "  coterie bench\n"
    "  coterie bench --attention \"i-clustered(clusters=256)\" --lengths 1k:16k\n"
    "  coterie bench --causal --attention \"local(window=256)\" "
    "\"routing(clusters=32,window=256)\"\n"
    "  coterie bench --pass forward --dtype bf16 --lengths 512,3000 --json bench.jsonl\n\n";

}  // namespace

void add_bench(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "bench", "Measure time, error and memory of attentions beside full attention");
  const auto shared = std::make_shared<BenchOptions>();  // lives as long as the callback
  BenchOptions& options = *shared;
  verb->add_option("--attention", options.attention, "Attention specs; see below")
      ->type_name("SPEC");
  verb->add_option("--lengths", options.lengths,
                   "Tokens: a list (512,1k,4k), or a range that doubles (1k:8k)")
      ->type_name("LIST")
      ->capture_default_str();
  add_integer<std::int64_t>(*verb, "--heads", options.heads, 1, 1024, "Query heads");
  add_integer<std::int64_t>(*verb, "--kv-heads", options.kv_heads, 0, 1024,
                            "Key and value heads; as many as --heads if 0");
  add_integer<std::int64_t>(*verb, "--dim", options.dim, 1, 1024, "Elements of a head");
  add_integer<std::int64_t>(*verb, "--batch", options.batch, 1, 4096, "Sequences");
  verb->add_flag("--causal", options.causal, "No query sees later keys");
  add_choice(*verb, "--pass", options.pass, {"forward", "backward", "both"}, "What to time");
  add_choice(*verb, "--data", options.data, {"mixture", "normal"},
             "Tokens around centres of Zipf popularity, or independent normal ones");
  add_choice(*verb, "--dtype", options.dtype, {"f32", "bf16", "f16", "f64"},
             "Type of queries, keys and values");
  add_integer(*verb, "--threads", options.threads, 0, 4096, "CPU threads; all cores if 0");
  add_integer(*verb, "--repeats", options.repeats, 0, 1000000,
              "Timed runs of each; 3 to 20 as time allows if 0");
  verb->add_option("--seconds", options.seconds, "Time to aim at when --repeats is 0")
      ->check(CLI::PositiveNumber.description(""))
      ->type_name("NUMBER")
      ->capture_default_str();
  verb->add_option("--seed", options.seed, "Of data and clusters")
      ->type_name("N")
      ->capture_default_str();
  verb->add_flag("--gate", options.gate,
                 "First compare all with the specification; do not time what is wrong");
  verb->add_option("--json", options.json, "Also write the results here, as JSON lines")
      ->type_name("FILE");
  verb->footer([] { return kExamples + spec_help(); });
  verb->callback([shared] { run_bench(*shared); });
}

}  // namespace coterie::cli
