// SPDX-License-Identifier: MIT
// coterie approximate: what other attentions cost a pretrained encoder, and the choice among them.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "apps/coterie/approximate_options.h"
#include "apps/coterie/loaded_model.h"
#include "apps/coterie/progress.h"
#include "coterie/error.h"
#include "coterie/runtime.h"
#include "formats/files.h"
#include "formats/spec_file.h"
#include "report/report.h"
#include "train/option_values.h"
#include "train/options.h"
#include "train/pretrained/data.h"
#include "train/trainer.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

using Json = nlohmann::ordered_json;

// One spec for all layers, or a file of specs per layer.
train::NamedAttention parse_attention(const std::string& text, std::int64_t layers) {
  if (!train::is_spec_file(text)) return {text, {AttentionSpec::parse(text)}};
  train::NamedAttention attention{std::filesystem::path(text).filename().string(), {}};
  for (const std::string& spec : train::read_spec_file(text)) {
    attention.specs.push_back(AttentionSpec::parse(spec));
  }
  if (attention.specs.size() != static_cast<std::size_t>(layers)) {
    throw Error(fmt::format("[approximate] {}: expected specs of {} layers; got {}", text, layers,
                            attention.specs.size()));
  }
  return attention;
}

train::PretrainedEncoder load_encoder(const ApproximateVerb& verb) {
  train::use_threads(verb.threads);
  train::PretrainedEncoder encoder = train::load_pretrained(verb.model);
  train::Config config;
  config.device = verb.device;
  const c10::Device device = train::config_device(config);
  encoder.model->to(device);
  const std::int64_t longest = encoder.model->options().max_length;
  const std::int64_t speed =
      verb.lengths.empty() ? 0 : *std::max_element(verb.lengths.begin(), verb.lengths.end());
  if (std::max(verb.task.length, speed) > longest) {
    encoder.model->stretch_positions(true);
    fmt::print(stderr,
               "coterie: warning: the model has {} learned positions; for longer sequences they "
               "are stretched by linear interpolation, without training\n",
               longest);
  }
  return encoder;
}

class Records {
 public:
  explicit Records(std::string path) : path_(std::move(path)) {}
  void add(const Json& line) {
    if (path_.empty()) return;
    text_ += line.dump() + "\n";
    train::write_file(path_, text_);  // complete after every line
  }
  const std::string& text() const { return text_; }

 private:
  std::string path_, text_;
};

std::string record_file(const ApproximateVerb& verb) {
  return verb.json.empty() && !verb.report.empty() ? verb.report + ".jsonl" : verb.json;
}

std::int64_t batch_tokens(const ApproximateVerb& verb) {
  return verb.batch_tokens > 0 ? verb.batch_tokens : (verb.device == "cpu" ? 4096 : 65536);
}

train::ApproximateOptions run_options(const ApproximateVerb& verb, Progress& progress) {
  train::ApproximateOptions options;
  options.run.batch_tokens = batch_tokens(verb);
  options.run.seed = verb.seed;
  options.draws = verb.draws;
  options.speed_lengths = verb.lengths;
  options.speed_seconds = verb.seconds;
  options.progress = [&progress](const std::string& work, std::int64_t done, std::int64_t all) {
    progress.show_parts(work, done, all, "parts");
  };
  return options;
}

void to_type(train::PretrainedEncoder& encoder, const std::string& dtype) {
  if (dtype == "bf16") encoder.model->to(at::kBFloat16);
}

// A model in 16 bit learns in f32.
bool learns(const ApproximateVerb& verb) {
  return verb.task.name == "squad" || verb.task.tune.encoder;
}

void compare_attentions(const ApproximateVerb& verb, train::PretrainedEncoder& encoder,
                        Records& records) {
  if (verb.dtype == "bf16" && learns(verb)) {
    throw Error("[approximate] expected --dtype f32 for squad and --tune, which train; got bf16");
  }
  to_type(encoder, verb.dtype);
  std::vector<train::NamedAttention> attentions;  // all are checked before data is read
  for (const std::string& text : verb.attention) {
    attentions.push_back(parse_attention(text, encoder.model->options().layers));
    encoder.model->check_attention(attentions.back().specs);
  }
  const std::unique_ptr<train::EncoderTask> task = make_encoder_task(verb.task, encoder);
  records.add(approximate_line(verb, task.get()));
  for (const std::string& note : task->notes()) fmt::print("{}\n", note);
  print_results_header(*task);
  Progress progress;
  std::vector<train::ApproximateResult> shown;
  const auto show = [&](const train::ApproximateResult& result) {
    progress.clear();
    shown.push_back(result);
    print_approximation(result, shown.front());
    records.add(result_line(result));
  };
  approximate(encoder, *task, attentions, run_options(verb, progress), show);
  if (!verb.torch) return;
  train::ApproximateResult torch_row;
  torch_row.attention = "torch (scaled_dot_product_attention)";
  for (const std::int64_t length : verb.lengths) {
    const train::EncoderBatch batch =
        train::speed_batch(encoder, task->inputs(), length, verb.device == "cpu" ? 2048 : 32768);
    torch_row.speeds.push_back({length, torch_speed(encoder, batch, verb.seconds)});
  }
  progress.clear();
  print_approximation(torch_row, shown.front());
  Json line = result_line(torch_row);
  line["kind"] = "torch";
  records.add(line);
}

// Rows of tokens (1, N): those that are measured, and as many that are held out.
struct SampleRows {
  std::vector<at::Tensor> measured, held_out;

  void add(const at::Tensor& row) {
    (measured.size() == held_out.size() ? measured : held_out).push_back(row);
  }
};

void choose_attention(const ApproximateVerb& verb, const train::CalibratedModel& model,
                      const SampleRows& rows, Records& records) {
  Progress progress;
  train::CalibrateOptions options;
  options.ladder = verb.ladder.empty() ? train::default_ladder(verb.task.length) : verb.ladder;
  options.targets = verb.targets;
  options.seconds = verb.seconds;
  options.seed = verb.seed;
  options.progress = [&progress](const std::string& work, std::int64_t done, std::int64_t all) {
    progress.show_parts(work, done, all, "parts");
  };
  const std::int64_t tokens = batch_tokens(verb);
  const std::vector<at::Tensor> measured = train::equal_batches(rows.measured, tokens);
  const train::Calibration calibration =
      calibrate(model, measured, train::equal_batches(rows.held_out, tokens), options);
  progress.clear();
  fmt::print("{} texts of {} tokens measured in batches of {}, {} others verified\n",
             rows.measured.size(), verb.task.length, measured.front().size(0),
             rows.held_out.size());
  print_calibration(calibration, verb.task.length);
  Json line = calibration_line(calibration, verb);
  line["batch"] = measured.front().size(0);
  records.add(line);
  if (verb.out.empty()) return;
  const train::CalibratedTarget& first = calibration.targets.front();
  train::write_file(verb.out, spec_file_json(first, calibration, model.names, verb).dump(2) + "\n");
  fmt::print("{} has the specs for the target {}: --attention {} and coterie.hf.use read it\n",
             verb.out, first.target, verb.out);
}

void choose_for_encoder(const ApproximateVerb& verb, train::PretrainedEncoder& encoder,
                        Records& records) {
  to_type(encoder, verb.dtype);
  records.add(approximate_line(verb, nullptr));
  SampleRows rows;
  for (const train::EncodedText& text :
       text_inputs(verb.task, encoder, 2 * static_cast<std::size_t>(verb.samples))) {
    rows.add(train::encoder_batch({&text}, encoder.tokenizer.id("[PAD]"),
                                  encoder.model->parameters().front().device())
                 .tokens);
  }
  choose_attention(verb, train::calibrated_model(encoder), rows, records);
}

// Whether the folder is one of `coterie train`.
bool is_run(const std::string& folder) {
  return std::filesystem::is_directory(folder + "/checkpoints") ||
         std::filesystem::is_regular_file(folder + "/state.json");
}

// A model of `coterie train` on the validation data of its task.
void choose_for_run(ApproximateVerb verb) {
  if (verb.targets.empty()) {
    throw Error("[approximate] expected --target for a run of coterie train; coterie eval " +
                verb.model + " --attention SPEC scores other attentions");
  }
  if (verb.task.data.size() != 1) {
    throw Error(
        fmt::format("[approximate] expected one --data for a run; got {}", verb.task.data.size()));
  }
  LoadedModel loaded = load_model({.checkpoint = verb.model,
                                   .data = verb.task.data[0],
                                   .device = verb.device,
                                   .threads = verb.threads,
                                   .length = verb.task.length},
                                  UsesData::yes);
  const train::CalibratedModel model = train::calibrated_model(loaded.model, verb.dtype == "bf16");
  verb.task.name = loaded.task->name();
  Records records(record_file(verb));
  records.add(approximate_line(verb, nullptr));
  const c10::Device device = loaded.model->parameters().front().device();
  const auto count = static_cast<std::size_t>(loaded.task->batches(train::Split::valid, 1));
  SampleRows rows;
  for (const std::size_t index : train::spaced(count, 2 * static_cast<std::size_t>(verb.samples))) {
    const train::Batch batch =
        loaded.task->batch(train::Split::valid, static_cast<std::int64_t>(index), 1);
    if (batch.lengths.defined() || batch.tokens.size(1) != verb.task.length) continue;  // the last
    rows.add(batch.tokens.to(device));
  }
  choose_attention(verb, model, rows, records);
}

void run_approximate(const ApproximateVerb& verb) {
  const bool chooses = !verb.targets.empty();
  if (chooses && verb.task.name != "text") {
    throw Error("[approximate] expected --task text with --target, which needs no labels; got " +
                verb.task.name);
  }
  if (!chooses && (!verb.out.empty() || !verb.ladder.empty())) {
    throw Error("[approximate] --out and --ladder are only used with --target");
  }
  if (chooses && !verb.attention.empty()) {
    throw Error("[approximate] --attention is not used with --target; --ladder names the specs");
  }
  if (verb.torch && verb.lengths.empty()) {
    throw Error("[approximate] --torch is only used with --lengths");
  }
  if (is_run(verb.model)) {
    choose_for_run(verb);
  } else {
    train::PretrainedEncoder encoder = load_encoder(verb);
    Records records(record_file(verb));
    chooses ? choose_for_encoder(verb, encoder, records)
            : compare_attentions(verb, encoder, records);
  }
  if (verb.report.empty()) return;
  train::ReportInputs inputs;
  inputs.approximations = {record_file(verb)};
  inputs.title = "Approximation of " + std::filesystem::path(verb.model).filename().string();
  train::write_file(verb.report, train::make_report(inputs));
  fmt::print("{}\n", verb.report);
}

const char* const kApproximateExamples =
    R"help(MODEL is a folder of Hugging Face with a BERT encoder: config.json,
model.safetensors, tokenizer.json or vocab.txt. Its weights stay as they are;
probes, heads and readers of tasks learn with full attention, and every
attention is then scored with them.

Scores have 95 % bootstrap intervals, also of their difference from full
attention over the same samples. cosine: of embeddings with those of full
attention, mean. head error: of attention outputs on the rows of full
attention, relative, the mean and the largest of all layers and heads. exact:
share of inputs that the budget of keys covers, which are computed exactly.
faster from: tokens from which the whole model is faster (--lengths).

With --target the program measures errors and times of every layer and head for
a ladder of specs, chooses the cheapest assignment whose error of the model's
output is below the target, verifies it on texts that were not measured, and
says which heads stay full and why. --out FILE.json writes it. MODEL may then
also be a run of coterie train with full attention that is not causal, such as
one of --task masked; its output is the logits.

Tasks and their data:
  text             agreement and speed only; any text
  sts-b            STS-B/stsb-en-test.csv
  squad-retrieval  dev-v1.1.json of SQuAD 1.1
  imdb-probe       *.train.jsonl and *.test.jsonl with text and label
  glue             --glue SST-2, CoLA, RTE, MRPC, WNLI, as GLUE distributes them
  squad            dev-v1.1.json: a reader trained on articles 0 to 37

Examples:
  coterie approximate minilm --task sts-b --data glue.tar.xz --attention \
    "i-clustered(clusters=25)" "i-clustered(clusters=25,near=16)"
  coterie approximate minilm --task glue --glue RTE --tune --data glue.tar.xz \
    --attention "clustered(clusters=25)" --json rte.jsonl --report rte.html
  coterie approximate minilm --data book.txt --length 4096 --target 0.02 \
    --out minilm-4k.json
  coterie approximate runs/masked-full-1 --data corpus --length 16384 \
    --target 0.05 --out masked-16k.json
)help";

}  // namespace

void add_approximate(CLI::App& program) {
  CLI::App* verb = program.add_subcommand(
      "approximate", "Measure what other attentions cost a pretrained encoder, or choose them");
  const auto shared = std::make_shared<ApproximateVerb>();  // lives as long as the callback
  ApproximateVerb& options = *shared;
  train::TuneOptions& tuning = options.task.tune;
  verb->add_option("model", options.model,
                   "Folder of a Hugging Face encoder, or of a run (--target)")
      ->required()
      ->type_name("MODEL");
  verb->add_option("--attention", options.attention,
                   "Attentions to compare with full, or files of --out; coterie help spec explains "
                   "specs")
      ->type_name("SPEC");
  train::add_choice(*verb, "--task", options.task.name, train::encoder_task_names(),
                    "Task to score");
  train::add_choice(*verb, "--glue", options.task.glue, train::glue_task_names(), "Task of GLUE");
  verb->add_option("--data", options.task.data, "Files, folders or archives with the task's data")
      ->required()
      ->type_name("PATH");
  train::add_number(*verb, "--length", options.task.length, 8, 1 << 24,
                    "Tokens of an input, at most; with text exactly");
  train::add_number(*verb, "--join", options.task.join, 0, 1 << 24,
                    "Join inputs of equal label or article to this many tokens at least; 0: no");
  train::add_number(*verb, "--limit", options.task.limit, 0, 1 << 30,
                    "Inputs to score, evenly spaced; 0: all");
  train::add_number(*verb, "--train-limit", options.task.train_limit, 0, 1 << 30,
                    "Inputs to learn heads from, evenly spaced; 0: all");
  verb->add_flag("--tune", tuning.encoder, "Train the encoder too, with full attention");
  train::add_number(*verb, "--epochs", tuning.epochs, 1, 1000, "Epochs of training");
  train::add_number(*verb, "--batch", tuning.batch, 1, 1 << 20, "Batch size of training");
  train::add_number(*verb, "--lr", tuning.rate, 0.0, 1.0, "Learning rate of the encoder");
  train::add_number(*verb, "--head-lr", tuning.head_rate, 0.0, 1.0,
                    "Learning rate of heads and readers");
  verb->add_option("--target", options.target_words,
                   "Choose specs per layer and head with this relative error of the output; "
                   "several: a choice for each")
      ->type_name("NUMBER");
  verb->add_option("--ladder", options.ladder, "Specs to choose from, with full among them")
      ->type_name("SPEC");
  train::add_number(*verb, "--samples", options.samples, 1, 1024,
                    "Texts to measure for the choice, and as many to verify it");
  verb->add_option("--lengths", options.length_words,
                   "Lengths at which the speed of the model is measured")
      ->delimiter(',')
      ->type_name("N");
  verb->add_flag("--torch", options.torch, "Measure the speed with torch's own attention too");
  train::add_number(*verb, "--batch-tokens", options.batch_tokens, 0, 1 << 30,
                    "Tokens of a batch; 0: 4k on the CPU, 64k on a GPU");
  train::add_number(*verb, "--draws", options.draws, 0, 1000000, "Bootstrap samples");
  train::add_number(*verb, "--seconds", options.seconds, 0.0, 3600.0, "Seconds of each timing");
  train::add_choice(*verb, "--device", options.device,
                    train::built_with_cuda() ? std::vector<std::string>{"cpu", "cuda"}
                                             : std::vector<std::string>{"cpu"},
                    "Device");
  train::add_choice(*verb, "--dtype", options.dtype, {"f32", "bf16"}, "Element type of the model");
  train::add_number(*verb, "--threads", options.threads, 0, 1024, "Threads; 0: all");
  train::add_number(*verb, "--seed", options.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                    "Random seed of clusters, training and the bootstrap");
  verb->add_option("--json", options.json, "Write the record as JSON lines")->type_name("FILE");
  verb->add_option("--report", options.report, "Write an HTML page")->type_name("FILE");
  verb->add_option("--out", options.out, "Write the chosen specs")->type_name("FILE");
  verb->footer(kApproximateExamples);
  verb->callback([shared] {
    for (const std::string& word : shared->target_words) {
      shared->targets.push_back(train::parse_number<double>("--target", word, 1e-6, 1.0));
    }
    for (const std::string& word : shared->length_words) {
      shared->lengths.push_back(train::parse_number<std::int64_t>("--lengths", word, 8, 1 << 24));
    }
    shared->task.tune.seed = shared->seed;
    run_approximate(*shared);
  });
}

}  // namespace coterie::cli
