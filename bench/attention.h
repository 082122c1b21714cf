// SPDX-License-Identifier: MIT
// Attention specs on made-up data: time, error against full attention and extra memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/driver.h"
#include "coterie/spec.h"
#include "coterie/tensor.h"

namespace coterie::bench {

// normal: independent standard normal numbers. mixture: tokens around 32 centres of which the r-th
// is 1/r as popular as the first (Zipf); queries, keys and values of a token share its centre.
// In both, rows of q and k then get zero mean and unit variance, so that the mechanisms which
// normalise them (routing, lsh) work on the same logits as the others.
enum class DataKind : std::uint8_t { normal, mixture };

struct Problem {
  std::int64_t B = 1, heads = 8, kv_heads = 8, N = 1024, D = 64;
  DType dtype = DType::f32;
  DataKind data = DataKind::mixture;
  std::uint64_t seed = 1;
};

struct AttentionData {
  Problem problem;
  HostTensor q, k, v, grad_out;  // (B, heads or kv_heads, N, D)
};
AttentionData make_data(const Problem& problem);

// A spec to measure. With `causal`, all its groups get causal inputs.
struct Entry {
  AttentionSpec spec;
  bool causal = false;
};

// The entry of a spec: causal when asked for, or when one of its groups names a causal form.
Entry make_entry(const std::string& spec, bool causal);
bool leaks_future(const Entry& entry);
bool is_full(const Entry& entry);

enum class Pass : std::uint8_t { forward, backward, both };

struct Measurement {
  Entry entry;
  std::string name;       // the spec, or the opponent's name
  bool opponent = false;  // full attention by another library (opponent.h)
  std::int64_t N = 0;
  std::optional<Timing> forward, backward;
  std::optional<Timing> select, attend;  // the parts of forward; an opponent has none
  double error = 0;  // of the output against full attention: relative, in the Frobenius norm
  std::int64_t workspace_bytes = 0, saved_bytes = 0;  // not known of an opponent
  std::int64_t io_bytes = 0;                          // queries, keys, values and outputs
  // Arithmetic of the passes measured; only full attention's is known from its shape alone.
  std::optional<double> forward_flops, backward_flops;
  double peak_gflops = 0;  // of the machine, measured in turn with the rest

  double total_ms() const;  // medians of the measured passes together
  // Of the measured passes with known arithmetic together.
  std::optional<double> gflops() const;
};

// Measures all entries and, for each causality among them, the opponent if there is one, on the
// same data: one Measurement each, an opponent's after the full attention it opposes.
std::vector<Measurement> measure(const std::vector<Entry>& entries, const Problem& problem,
                                 Pass pass, const TimingPlan& plan, const Progress& progress = {});

// Multiplications and additions of full attention.
double full_attention_flops(const Problem& problem, Pass pass, bool causal);

// The length from which on the speed against the baseline stays above 1, between measured lengths
// by interpolation of the logarithms; speeds are (length, speed) by ascending length. Nothing when
// the last speed is not above 1; the first length when all are.
std::optional<double> crossover(const std::vector<std::pair<double, double>>& speeds);

}  // namespace coterie::bench
