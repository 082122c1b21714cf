// SPDX-License-Identifier: MIT
// Attention specs on made-up or saved data: time, error against full attention and extra memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/driver.h"
#include "bench/tensor.h"
#include "coterie/spec.h"

namespace coterie::bench {

// normal: independent standard normal numbers. mixture: tokens around 32 centres, the r-th with
// 1/r the popularity of the first (Zipf); queries, keys and values of a token share its centre.
// In both, rows of q and k are then scaled to zero mean and unit variance, so that mechanisms that
// normalise them (routing, lsh) work on the same logits as the others. saved: rows of a model,
// unchanged.
enum class DataKind : std::uint8_t { normal, mixture, saved };

// Queries, keys and values of a model: (B, heads or kv_heads, at least N, D), in host memory.
struct SavedRows {
  HostTensor q, k, v;
};

struct Problem {
  std::int64_t B = 1, heads = 8, kv_heads = 8, N = 1024, D = 64;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  DataKind data = DataKind::mixture;
  std::shared_ptr<const SavedRows> saved{};  // for DataKind::saved
  std::uint64_t seed = 1;
};

enum class Pass : std::uint8_t { forward, backward, both };

struct AttentionData {
  Problem problem;
  Tensor q, k, v;   // (B, heads or kv_heads, N, D)
  Tensor grad_out;  // absent when only the forward pass runs
};
AttentionData make_data(const Problem& problem, Pass pass);

// A spec to measure. With `causal`, all its groups get causal inputs.
struct Entry {
  AttentionSpec spec;
  bool causal = false;
};

// The entry of a spec. It is causal if `causal` is set or if one of its groups names a causal form.
Entry make_entry(const std::string& spec, bool causal);
bool leaks_future(const Entry& entry);
bool is_full(const Entry& entry);

// The library's message if it does not run an entry on the problem's device; "" if it does.
std::string refusal(const Entry& entry, const Problem& problem);

struct Measurement {
  Entry entry;
  std::string name;       // the spec, or the opponent's name
  bool opponent = false;  // full attention by another library (opponent.h)
  std::int64_t N = 0;
  int threads = 0;  // of the CPU
  std::optional<Timing> forward, backward;
  // Parts of the forward pass, each timed alone. cluster (with the sort by cluster) includes hash,
  // select includes cluster; forward may share work between select and attend.
  std::optional<Timing> hash, cluster, select, attend;
  std::optional<double> launch_ms;  // the host's time to start a forward pass on a GPU
  double error = 0;             // of the output against full attention: relative, Frobenius norm
  std::int64_t error_rows = 0;  // rows per head over which the error is computed
  std::int64_t workspace_bytes = 0, saved_bytes = 0;  // unknown for opponents
  std::int64_t io_bytes = 0;                          // queries, keys, values and outputs
  // Least arithmetic and memory traffic of the measured passes (work.h).
  std::optional<double> forward_flops, backward_flops;
  double least_bytes = 0;
  double peak_gflops = 0;  // of the machine, interleaved with the measurements; 0 if unknown

  double total_ms() const;  // sum of the medians of the measured passes
  // Over all measured passes; nothing if their operation count is unknown.
  std::optional<double> gflops() const;
  double gigabytes_per_second() const;
};

struct MeasurePlan {
  Pass pass = Pass::both;
  TimingPlan timing{};
  std::vector<int> threads{};  // CPU thread counts to measure; empty: the library's setting
  bool alone = false;          // without opponents
};

// Measures all entries and, for each causality among them, the opponents if there are any, on the
// same data: one Measurement each, for each number of threads, opponents first.
std::vector<Measurement> measure(const std::vector<Entry>& entries, const Problem& problem,
                                 const MeasurePlan& plan, const Progress& progress = {});

// The length from which on the speed relative to the baseline stays above 1, interpolated between
// measured lengths on logarithmic scales; speeds are (length, speed) by ascending length. Nothing
// if the last speed is not above 1; the first length if all are.
std::optional<double> crossover(const std::vector<std::pair<double, double>>& speeds);

}  // namespace coterie::bench
