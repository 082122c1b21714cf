// SPDX-License-Identifier: MIT
// Everything about a mechanism except its kernels: name, keys, causal forms, what it takes and
// refuses, what it saves, how it decodes. The spec parser, checks, layouts of saved tensors, torch,
// Python, bench and docs read it.
//
// A mechanism is a struct in core/mechanisms/ with the members that make_descriptor uses. A missing
// member is a compile error, a missing struct a link error. Shapes are written once for two kinds
// of numbers: integers, and formulas for callers whose sizes are symbols.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/spec_key.h"
#include "coterie/mechanism.h"
#include "coterie/spec.h"

namespace coterie {

// An expression of sizes in postfix notation: "32 S min".
class Formula {
 public:
  Formula(std::int64_t number) : text_(std::to_string(number)) {}  // NOLINT: as an integer
  explicit Formula(const char* name) : text_(name) {}

  const std::string& text() const { return text_; }
  friend Formula operator+(const Formula& a, const Formula& b) { return joined(a, b, "+"); }
  friend Formula operator*(const Formula& a, const Formula& b) { return joined(a, b, "*"); }
  friend Formula operator/(const Formula& a, const Formula& b) { return joined(a, b, "/"); }
  friend Formula least(const Formula& a, const Formula& b) { return joined(a, b, "min"); }
  friend Formula most(const Formula& a, const Formula& b) { return joined(a, b, "max"); }

 private:
  static Formula joined(const Formula& a, const Formula& b, const char* operation) {
    Formula both(a.text_.c_str());
    both.text_ += " " + b.text_ + " " + operation;
    return both;
  }
  std::string text_;
};
inline std::int64_t least(std::int64_t a, std::int64_t b) { return std::min(a, b); }
inline std::int64_t most(std::int64_t a, std::int64_t b) { return std::max(a, b); }

// Sizes of a checked call (core/call.h has their meaning).
template <class Number>
struct CallSizes {
  Number B, H, N, S, Dk, Dv, key_heads, value_heads, items;
  bool on_gpu = false;
};

// Indices of a selection, other integers (both int32), or values of the accumulator type.
enum class SavedKind : std::uint8_t { selection, count, value };

template <class Number>
struct SavedTensor {
  const char* name;
  SavedKind kind;
  std::vector<Number> sizes;
};
// Selections come first.
template <class Number>
using SavedTensors = std::vector<SavedTensor<Number>>;

// A tensor that a mechanism takes besides q, k and v, of the accumulator type.
enum class StateField : std::uint8_t { centroids, gate, logit_scale };
template <class Number>
struct StateTensor {
  StateField field;
  const char* name;  // for messages
  bool required, differentiable;
  std::vector<Number> sizes;
};
template <class Number>
using StateTensors = std::vector<StateTensor<Number>>;

struct Descriptor {
  const char* name;
  const char* summary;  // a line of help
  const char* attends;  // a cell of the table in docs/mechanisms.md
  HeadGroup defaults;
  std::vector<SpecKey> keys;
  bool takes_mask;  // each query has its own keys
  RowForm rows;
  Positions positions;  // the default: rotary or none

  // These take resolved parameters, except `causality` and `settle`, which resolve them.
  std::function<bool(const Mechanism&)> keys_are_queries;
  std::function<bool(const Mechanism&)>
      self_attention;  // as many keys as queries in every sequence
  std::function<bool(const Mechanism&)> selects_together;             // one selection for all heads
  std::function<Causality(const Mechanism&, bool causal)> causality;  // throws if there is none
  std::function<void(Mechanism&, Causality)> settle;   // replaces automatic values, checks the rest
  std::function<Decoding(const Mechanism&)> decoding;  // of causal layers that do not leak
  std::function<KeyPattern(const Mechanism&, std::int64_t position)> key_pattern;
  std::function<SavedTensors<std::int64_t>(const Mechanism&, const CallSizes<std::int64_t>&)> saved;
  std::function<SavedTensors<Formula>(const Mechanism&, const CallSizes<Formula>&)> saved_formulas;
  std::function<StateTensors<std::int64_t>(const Mechanism&, const CallSizes<std::int64_t>&)> state;
  std::function<StateTensors<Formula>(const Mechanism&, const CallSizes<Formula>&)> state_formulas;
};

// The descriptors of all mechanisms, in the order of the variant.
const std::vector<Descriptor>& descriptors();
const Descriptor& descriptor_of(const Mechanism& mechanism);

// Throws Error "[op] ..." when a required key is not set or a value is out of range.
void check_values(const std::string& op, const HeadGroup& group);

// Specialised in core/mechanisms/ for the parameters of each mechanism.
template <class Params>
Descriptor describe();

// The key `positions`, which all mechanisms have.
SpecKey positions_key(Positions unless_told, bool relative);

template <class M>
Descriptor make_descriptor() {
  using Params = typename M::Params;
  const auto of = [](const Mechanism& mechanism) -> const Params& {
    return std::get<Params>(mechanism);
  };
  Descriptor all{};
  all.name = M::kName;
  all.summary = M::kSummary;
  all.attends = M::kAttends;
  all.defaults.mechanism = Params{};
  all.keys = M::keys(all.defaults);
  all.keys.push_back(positions_key(M::kPositions, M::kRelativePositions));
  all.takes_mask = M::kTakesMask;
  all.rows = M::kRows;
  all.positions = M::kPositions;
  all.keys_are_queries = [of](const Mechanism& m) { return M::keys_are_queries(of(m)); };
  all.self_attention = [of](const Mechanism& m) { return M::self_attention(of(m)); };
  all.selects_together = [of](const Mechanism& m) { return M::selects_together(of(m)); };
  all.causality = [of](const Mechanism& m, bool causal) { return M::causality(of(m), causal); };
  all.settle = [](Mechanism& m, Causality form) { M::settle(std::get<Params>(m), form); };
  all.decoding = [of](const Mechanism& m) { return M::decoding(of(m)); };
  all.key_pattern = [of](const Mechanism& m, std::int64_t position) {
    return M::key_pattern(of(m), position);
  };
  all.saved = [of](const auto& m, const auto& sizes) { return M::saved(of(m), sizes); };
  all.saved_formulas = [of](const auto& m, const auto& sizes) { return M::saved(of(m), sizes); };
  all.state = [of](const auto& m, const auto& sizes) { return M::state(of(m), sizes); };
  all.state_formulas = [of](const auto& m, const auto& sizes) { return M::state(of(m), sizes); };
  return all;
}

// Shapes shared by several mechanisms.
template <class Number>
SavedTensor<Number> row_values(const char* name, const CallSizes<Number>& s) {
  return {name, SavedKind::value, {s.B, s.H, s.N}};
}

// Heads select alone. (A static member, so inheriting it twice is not ambiguous.)
struct SeparateHeads {
  template <class Params>
  static bool selects_together(const Params&) {
    return false;
  }
};

// All keys up to the query's own position, and mechanisms that do not decode by rows.
struct AllKeys : SeparateHeads {
  template <class Params>
  static KeyPattern key_pattern(const Params&, std::int64_t) {
    return {};
  }
};

// Base of mechanisms that choose keys exactly, by position or by the query alone.
struct ExactMechanism : SeparateHeads {
  static constexpr bool kTakesMask = true, kRelativePositions = true;
  static constexpr RowForm kRows = RowForm::plain;
  template <class Params>
  static bool keys_are_queries(const Params&) {
    return false;
  }
  template <class Params>
  static bool self_attention(const Params&) {
    return false;
  }
  template <class Params>
  static Causality causality(const Params&, bool causal) {
    return causal ? Causality::strict : Causality::none;
  }
  template <class Params>
  static void settle(Params&, Causality) {}
  template <class Params, class Number>
  static SavedTensors<Number> saved(const Params&, const CallSizes<Number>& s) {
    return {row_values("lse", s)};
  }
  template <class Params, class Number>
  static StateTensors<Number> state(const Params&, const CallSizes<Number>&) {
    return {};
  }
};

}  // namespace coterie
