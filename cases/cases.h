// SPDX-License-Identifier: MIT
// The table of attention problems that tests and benchmarks share: every mechanism with the shapes,
// types, masks and data that tend to go wrong. Each runs in milliseconds.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "coterie/tensor.h"

namespace coterie::cases {

// How the rows of a batch form sequences. padded: different lengths, one of them 0. packed: items
// of different lengths in one batch entry, one of them empty, and unused rows; needs B = 1.
// drawn: random lengths, including 0; packed for one batch entry, padded for several.
enum class Lengths : std::uint8_t { none, padded, packed, drawn };

// Memory layout of (B, H, N, D): contiguous; as (B, N, H, D); or inside a larger tensor, where no
// stride is a product of sizes and no row is aligned.
enum class Layout : std::uint8_t { bhnd, bnhd, gaps };

// normal: independent standard normal numbers. mixture: queries and keys around a few centres whose
// popularity falls as 1/rank. equal: all queries, and all keys, of a head are one row. integers:
// small integers, so that scores are exact in every type and many of them are tied.
// The rest are adversarial. Rows around centres, which are the mechanism's centroids if it has any:
// one_cluster (all around one), spread (each row around the next one), disjoint (queries around the
// first half of them, keys around the others), sparse (around every eighth one), zipf (popularity
// falls as 1/rank). repeated: seven distinct rows. zeros: a third of the rows are 0. large:
// rows times powers of two. huge: all elements of q are 6144, of k 7168. trained: embeddings fitted
// to a bigram process, with positions. nonfinite: a few rows of q, k and v have NaN or infinities.
enum class Data : std::uint8_t {
  normal,
  mixture,
  equal,
  integers,
  one_cluster,
  spread,
  disjoint,
  sparse,
  zipf,
  repeated,
  zeros,
  large,
  huge,
  trained,
  nonfinite
};
const char* data_name(Data data);

struct Case {
  std::string name = "";  // letters, digits and underscores; unique
  std::string spec = "";  // one mechanism, as AttentionSpec reads it
  std::int64_t B = 2, H = 2, Hkv = 0, N = 64, S = 0, Dk = 32, Dv = 0;  // 0: Hkv = H, S = N, Dv = Dk
  bool causal = false;
  Lengths lengths = Lengths::none;
  Layout layout = Layout::bhnd;
  DType dtype = DType::f32;
  Data data = Data::normal;
  bool mask = false;         // a (B, 1, N, S) mask broadcast over heads; some rows admit nothing
  bool logit_scale = false;  // routing: with factors per head
  double scale = 0.0;
  double dropout = 0.0;
  bool part = false;  // of a larger call, which has other random numbers
};

// For messages: the name.
std::ostream& operator<<(std::ostream& out, const Case& c);

// Every case, with all sizes filled in.
std::vector<Case> all();

// A case from words: "B3 H4:2 N113 S65 D64:32 causal mask padded|packed|drawn bnhd|gaps
// f64|bf16|f16 mixture|equal|... logit_scale part scale=0.5 dropout=0.1"; everything else has its
// default.
Case make_case(const std::string& name, const std::string& spec, const std::string& shape);

// Replaces sizes that were left 0 by their defaults.
Case completed(Case c);

}  // namespace coterie::cases
