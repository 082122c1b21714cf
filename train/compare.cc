// SPDX-License-Identifier: MIT
#include "train/compare.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "formats/files.h"
#include "train/checkpoint.h"
#include "train/options.h"

namespace coterie::train {
namespace {

// A folder name: "i-clustered(clusters=8,topk=16)" -> "i-clustered-clusters-8-topk-16".
std::string slug(const std::string& text) {
  std::string name;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (plain) {
      name += c;
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name;
}

class Plan {
 public:
  explicit Plan(std::string out) : out_(std::move(out)) {}

  void add(const std::string& section, Config config, const std::string& attention) {
    config.attention = attention;
    config.out =
        out_ + "/" + slug(section) + "/" + std::to_string(config.length) + "-" + slug(attention);
    runs.push_back({section, std::move(config)});
  }

  std::vector<PlannedRun> runs;

 private:
  std::string out_;
};

// Trains in seconds on two cores; large enough for full attention to solve the task.
Config small_config(const std::string& task) {
  Config config;
  config.task = task;
  config.model.layers = 1;
  config.model.heads = 4;
  config.train.batch = 16;
  config.train.eval_every = 100;
  config.train.log_every = 10;
  config.checkpoint.every = 0;
  config.checkpoint.keep = 1;
  return config;
}

// Positions are in the embeddings, the same for every attention.
Config copy_config(std::int64_t length) {
  Config config = small_config("copy");
  config.length = length;
  config.model.dim = 128;
  config.model.ffn = 256;
  config.model.embedding_std = 0.5;
  config.optimizer.lr = 5e-3;
  config.train.steps = 200;
  config.train.final_batches = 16;  // 256 rows
  return config;
}

Config recall_config(bool causal) {
  Config config = small_config("recall");
  config.length = 128;
  config.recall.causal = causal;
  config.model.dim = 64;
  config.model.ffn = 128;
  config.model.embedding_std = 0.05;
  config.optimizer.lr = 1e-2;
  config.train.batch = 32;
  config.train.steps = 200;
  config.train.final_batches = 16;  // 512 rows
  return config;
}

// Long enough for attention to be most of the cost; no positions, so that only content helps. From
// random parameters a query would hardly find its pair among 4,096 tokens, so the model starts from
// one that was trained on short sequences.
Config long_config(const std::string& init_from) {
  Config config = recall_config(false);
  config.length = 4096;
  config.recall.queries = 1024;
  config.init_from = init_from;
  config.optimizer.lr = 1e-3;
  config.train.batch = 1;
  config.train.steps = 50;
  config.train.eval_every = 25;
  config.train.eval_batches = 4;
  config.train.final_batches = 16;
  return config;
}

Config bytes_config() {
  Config config = small_config("bytes");
  config.length = 256;
  config.model.layers = 2;
  config.model.dim = 64;
  config.model.ffn = 128;
  config.model.embedding_std = 0.1;
  config.optimizer.lr = 6e-3;
  config.train.batch = 8;
  config.train.steps = 200;
  return config;
}

void add_copy(Plan& plan) {
  const Config config = copy_config(130);
  for (const char* attention :
       {"full(positions=none)", "local(window=32,positions=none)", "lsh(chunk=16,buckets=16)",
        "routing(clusters=8,window=16)", "cast(clusters=8,size=16)"}) {
    plan.add("copy", config, attention);
  }
  plan.add("copy", copy_config(66), "full(positions=none)");
  for (const std::int64_t length : {66, 130}) {
    for (const char* clusters : {"16", "32"}) {
      for (const char* name : {"clustered", "i-clustered"}) {
        plan.add("copy", copy_config(length), std::string(name) + "(clusters=" + clusters + ")");
      }
    }
  }
}

void add_recall(Plan& plan) {
  for (const char* attention :
       {"full(positions=none)", "local(window=32,positions=none)", "clustered(clusters=16)",
        "i-clustered(clusters=16)", "lsh(chunk=16,buckets=16)", "routing(clusters=4,window=32)",
        "cast(clusters=8,size=16)"}) {
    plan.add("recall", recall_config(false), attention);
  }
  for (const char* attention : {"full(positions=none)", "local(window=16,positions=none)",
                                "2*local(window=16,positions=none)+"
                                "2*routing(clusters=4,window=32)"}) {
    plan.add("recall, causal", recall_config(true), attention);
  }
}

void add_long(Plan& plan, const std::string& init_from) {
  for (const char* attention :
       {"full(positions=none)", "local(window=256,positions=none)", "i-clustered(clusters=256)"}) {
    plan.add("recall, long", long_config(init_from), attention);
  }
}

void add_bytes(Plan& plan) {
  for (const char* attention :
       {"full", "local(window=64)", "2*local(window=64)+2*routing(clusters=8,window=64)"}) {
    plan.add("bytes", bytes_config(), attention);
  }
}

// Whether the folder contains a run of the same config, and whether that run finished.
struct Found {
  bool same = false, finished = false;
};

Found find_run(const Config& config) {
  const std::string stored = config.out + "/config.toml";
  if (!std::filesystem::exists(stored) || read_file(stored, kConfigFile) != config_text(config))
    return {};
  const std::optional<RunLog> log = read_run(config.out);
  return {.same = log.has_value(),
          .finished = log && log->end && log->end->reason != "interrupted"};
}

// Removes the run of an earlier comparison with other settings; anything else stays.
void make_room(const Config& config, const Found& found) {
  const bool run = std::filesystem::exists(config.out + "/log.jsonl");
  if (run && !found.same) std::filesystem::remove_all(config.out);
}

}  // namespace

std::vector<PlannedRun> comparison_plan(const std::string& out) {
  Plan plan(out);
  add_recall(plan);
  add_long(plan, plan.runs.front().config.out);  // full attention
  add_copy(plan);
  add_bytes(plan);
  return std::move(plan.runs);
}

std::vector<ComparedRun> compare(const std::vector<PlannedRun>& plan, const TrainHooks& hooks,
                                 const std::function<void(const ComparedRun&)>& done) {
  std::vector<ComparedRun> runs;
  for (const PlannedRun& planned : plan) {
    const Found found = find_run(planned.config);
    if (!found.finished) {
      make_room(planned.config, found);
      const std::unique_ptr<Task> task = make_task(planned.config);
      const bool resume = found.same && !Checkpoints(planned.config.out).steps().empty();
      const TrainResult result = train(planned.config, *task, resume, hooks);
      if (result.reason == "interrupted") return runs;
    }
    runs.push_back({planned, read_run(planned.config.out).value()});
    done(runs.back());
  }
  return runs;
}

}  // namespace coterie::train
