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

// normal: independent standard normal numbers. mixture: tokens around 32 centres of which the r-th
// is 1/r as popular as the first (Zipf); queries, keys and values of a token share its centre.
// In both, rows of q and k then get zero mean and unit variance, so that the mechanisms which
// normalise them (routing, lsh) work on the same logits as the others. saved: rows of a model, as
// they are.
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

// The entry of a spec: causal when asked for, or when one of its groups names a causal form.
Entry make_entry(const std::string& spec, bool causal);
bool leaks_future(const Entry& entry);
bool is_full(const Entry& entry);

// Why the library does not run an entry on the problem's device, in its words; "" when it does.
std::string refusal(const Entry& entry, const Problem& problem);

struct Measurement {
  Entry entry;
  std::string name;       // the spec, or the opponent's name
  bool opponent = false;  // full attention by another library (opponent.h)
  std::int64_t N = 0;
  int threads = 0;  // of the CPU
  std::optional<Timing> forward, backward;
  // Parts of the forward pass that can run alone, timed so. cluster (with the sort by cluster)
  // includes hash, select includes cluster; forward may share work between select and attend.
  std::optional<Timing> hash, cluster, select, attend;
  std::optional<double> launch_ms;  // the host's time to start a forward pass on a GPU
  double error = 0;             // of the output against full attention: relative, Frobenius norm
  std::int64_t error_rows = 0;  // of each head, over which the error is taken
  std::int64_t workspace_bytes = 0, saved_bytes = 0;  // not known of an opponent
  std::int64_t io_bytes = 0;                          // queries, keys, values and outputs
  // What the passes measured compute and move at least (work.h).
  std::optional<double> forward_flops, backward_flops;
  double least_bytes = 0;
  double peak_gflops = 0;  // of the machine, measured in turn with the rest; 0 when not known

  double total_ms() const;  // medians of the measured passes together
  // Of the measured passes together; nothing when their arithmetic is not known.
  std::optional<double> gflops() const;
  double gigabytes_per_second() const;
};

struct MeasurePlan {
  Pass pass = Pass::both;
  TimingPlan timing{};
  std::vector<int> threads{};  // of the CPU: each count is measured; empty: the library's
  bool alone = false;          // without opponents
};

// Measures all entries and, for each causality among them, the opponents if there are any, on the
// same data: one Measurement each, for each number of threads, opponents first.
std::vector<Measurement> measure(const std::vector<Entry>& entries, const Problem& problem,
                                 const MeasurePlan& plan, const Progress& progress = {});

// The length from which on the speed against the baseline stays above 1, between measured lengths
// by interpolation of the logarithms; speeds are (length, speed) by ascending length. Nothing when
// the last speed is not above 1; the first length when all are.
std::optional<double> crossover(const std::vector<std::pair<double, double>>& speeds);

}  // namespace coterie::bench
