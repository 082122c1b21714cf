// SPDX-License-Identifier: MIT
// Everything a training run can be told, with defaults. options.cc binds every field to a
// command-line option and a key of config files; the sentences there are the documentation.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace coterie::train {

constexpr std::uint64_t kDataLimit = std::uint64_t{1} << 30;

struct CopyConfig {
  std::int64_t symbols = 10;
  double mask = 0.5;  // share of the positions of a word that are masked in one of its copies
};

struct RecallConfig {
  std::int64_t keys = 16, values = 8;
  std::int64_t pairs = 16, queries = 48;  // in a row
  bool causal = false;
};

struct TextConfig {                  // bytes and words
  double valid = 0.05, test = 0.05;  // shares of the text, from its end
  std::int64_t vocabulary = 0;       // words: the most frequent ones kept; 0: all
};

struct ModelConfig {
  std::int64_t dim = 128, layers = 2, heads = 4;
  std::int64_t kv_heads = 0;  // 0: as heads
  std::int64_t ffn = 0;       // 0: 4 dim
  double dropout = 0.0;
  std::string positions = "automatic";  // none, sinusoidal, learned; automatic: what the task asks
  double embedding_std = 0.1;           // of token vectors at the start
  double position_base = 100.0;         // sinusoidal: wavelengths grow from 2 pi to this times 2 pi
  bool bias = true;
  bool tied = false;
  bool recompute = false;
};

struct OptimizerConfig {
  std::string name = "adamw";  // adamw, adafactor
  double lr = 5e-3;
  double beta1 = 0.9, beta2 = 0.99;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double clip = 1.0;      // largest norm of the gradient; 0: no limit
  bool relative = false;  // adafactor: steps are lr times the size of the parameter
};

struct ScheduleConfig {
  std::int64_t warmup = 30;      // steps of linear rise
  std::string decay = "cosine";  // constant, rsqrt, cosine
  double floor = 0.1;            // cosine: last rate as a share of lr
};

struct TrainConfig {
  std::int64_t steps = 400;
  std::int64_t batch = 16;       // rows of an optimiser step
  std::int64_t micro_batch = 0;  // rows of one pass, whose gradients add up; 0: batch
  std::int64_t log_every = 10;
  std::int64_t eval_every = 50;
  std::int64_t eval_batches = 8;
  std::int64_t patience = 0;       // evaluations without improvement before stopping; 0: never
  double truncate = 0.0;           // chance that a step's rows are cut to a random length (routing)
  std::string centroids = "data";  // of routing: start from the first batch, or random
  std::string dtype = "f32";       // f32, bf16 (autocast)
};

struct CheckpointConfig {
  std::int64_t every = 100;  // steps; 0: only best and last
  std::int64_t keep = 2;     // last ones kept, beside the best
};

struct Config {
  std::string task = "copy";
  std::string data;  // bytes, words: file, folder or archive; empty: the built-in text (bytes)
  std::uint64_t data_limit = kDataLimit;  // bytes of text, decompressed
  std::int64_t length = 128;              // tokens of a row
  std::string attention = "full";
  std::vector<std::pair<std::string, std::string>> attention_at;  // ("0-3", spec), later ones win
  std::string out;                                                // folder of the run
  std::string device = "cpu";
  int threads = 0;  // 0: the library's choice
  std::uint64_t seed = 1;
  CopyConfig copy;
  RecallConfig recall;
  TextConfig text;
  ModelConfig model;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  TrainConfig train;
  CheckpointConfig checkpoint;
};

}  // namespace coterie::train
