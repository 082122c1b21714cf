// SPDX-License-Identifier: MIT
// All settings of a training run, with defaults. options.cc binds every field to a command-line
// option and a config-file key; the help texts there are the documentation.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace coterie::train {

constexpr std::uint64_t kDataLimit = std::uint64_t{1} << 30;

struct CopyConfig {
  std::int64_t symbols = 10;
  double mask = 0.5;  // fraction of a word's positions that are masked in one copy
};

struct RecallConfig {
  std::int64_t keys = 16, values = 8;
  std::int64_t pairs = 16, queries = 48;  // per sequence
  bool causal = false;
};

struct MaskedConfig {
  double share = 0.15;  // of the bytes of a sequence that are masked
};

struct ListopsConfig {
  std::int64_t shortest = 0;  // every expression has more tokens; 0: a quarter of the length
  std::int64_t depth = 10;
  std::int64_t arguments = 10;  // most of an operator
};

struct PathfinderConfig {
  std::int64_t paddles = 14;  // of each of the two paths
  std::int64_t distractors = 5;
};

struct ImagesConfig {
  std::string predict = "class";  // class: of the grey image; pixels: each from those before it
};

struct SpeechConfig {
  std::string symbols = "characters";  // of the transcripts: characters, phones
  std::int64_t join = 1;               // utterances of an example
  std::int64_t subsample = 4;          // frames in one position
  std::int64_t beam = 1;               // of the decoding; 1: greedy
  std::int64_t masks = 0;              // of each kind on a recording for training
  double tempo = 0.0;                  // how much slower or faster recordings for training are
};

struct TextConfig {                  // bytes, masked, words and tokens
  double valid = 0.05, test = 0.05;  // fractions of the text, from its end
  std::int64_t vocabulary = 0;       // words: size, most frequent first; 0: all. tokens: 0: 4096
  std::string tokenizer;             // tokens: file, folder or archive; empty: learnt from the text
};

struct ModelConfig {
  std::int64_t dim = 128, layers = 2, heads = 4;
  std::int64_t kv_heads = 0;  // 0: same as heads
  std::int64_t ffn = 0;       // 0: 4 * dim
  double dropout = 0.0;
  double attention_dropout = 0.0;
  std::string positions = "automatic";  // none, sinusoidal, learned; automatic: as the task needs
  double embedding_std = 0.0;           // initial, of token embeddings; 0: as the task needs
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
  double clip = 1.0;      // gradient norm to clip to; 0: no clipping
  bool relative = false;  // adafactor: scale steps by the RMS of the parameter
  bool shard = false;     // several ranks: each keeps the state of some parameters (ZeRO-1)
};

struct ScheduleConfig {
  std::int64_t warmup = 30;      // steps
  std::string decay = "cosine";  // constant, rsqrt, cosine
  double floor = 0.1;            // cosine: final rate as a fraction of lr
};

struct TrainConfig {
  std::int64_t steps = 400;
  std::int64_t batch = 16;       // sequences per optimiser step
  std::int64_t micro_batch = 0;  // sequences per pass, gradients are summed; 0: batch
  std::int64_t context = 1;      // ranks that share each sequence (context parallel)
  std::int64_t log_every = 10;
  std::int64_t eval_every = 50;
  std::int64_t eval_batches = 8;
  std::int64_t final_batches = 0;  // of the validation at the end; 0: all
  std::int64_t patience = 0;       // evaluations without improvement before stopping; 0: never
  double truncate = 0.0;           // probability of cutting a step's rows to a random length
  std::string centroids = "data";  // of routing: initialised from the first batch, or random
  std::string dtype = "f32";       // f32, bf16 (autocast)
  bool fast = false;               // kernels whose bits differ from run to run are allowed
  bool graph = false;              // a GPU repeats the recorded work of a step
};

struct CheckpointConfig {
  std::int64_t every = 100;  // steps; 0: only best and last
  std::int64_t keep = 2;     // latest ones kept, in addition to the best
};

struct Config {
  std::string task = "copy";
  std::string data;  // file, folder or archive; empty: the built-in text, for tasks that allow it
  std::uint64_t data_limit = kDataLimit;  // bytes of text, decompressed
  std::int64_t length = 128;              // tokens per sequence; of speech: at most, in frames
  std::string attention = "full";
  std::vector<std::pair<std::string, std::string>> attention_at;  // ("0-3", spec), later ones win
  std::string out;                                                // folder of the run
  std::string init_from;  // checkpoint or run whose parameters a new run starts from
  std::string device = "cpu";
  int threads = 0;  // 0: the library's choice
  std::uint64_t seed = 1;
  CopyConfig copy;
  RecallConfig recall;
  MaskedConfig masked;
  ListopsConfig listops;
  PathfinderConfig pathfinder;
  ImagesConfig images;
  SpeechConfig speech;
  TextConfig text;
  ModelConfig model;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  TrainConfig train;
  CheckpointConfig checkpoint;
};

}  // namespace coterie::train
