// SPDX-License-Identifier: MIT
// What Python asks for beside operators, as C functions of text and numbers: facts without tensors
// are no business of torch's dispatcher, and must be had while it traces.
//
// Texts are lines of key=value (groups with a blank line between them), or "!" and an error
// message; they last until the thread's next call.
#include <charconv>
#include <cstdint>
#include <exception>
#include <string>
#include <variant>
#include <vector>

#include "coterie/runtime.h"
#include "coterie/spec.h"

namespace coterie::stable_api {
namespace {

struct Lines {
  void add(const char* key, const std::string& value) {
    text += std::string(key) + "=" + value + "\n";
  }
  void add(const char* key, std::int64_t value) { add(key, std::to_string(value)); }
  void add(const char* key, double value) {
    char digits[32];
    add(key, std::string(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr));
  }

  std::string text;
};

void add_parameters(const FullParams&, Lines&) {}
void add_parameters(const LocalParams& params, Lines& lines) { lines.add("window", params.window); }
void add_parameters(const StridedParams&, Lines&) {}
void add_parameters(const OracleTopParams& params, Lines& lines) { lines.add("topk", params.topk); }
void add_parameters(const ClusteredParams& params, Lines& lines) {
  lines.add("clusters", params.clustering.clusters);
}
void add_parameters(const ImprovedClusteredParams& params, Lines& lines) {
  lines.add("clusters", params.clustering.clusters);
  lines.add("topk", params.topk);
}
void add_parameters(const LshParams& params, Lines& lines) {
  lines.add("rounds", params.rounds);
  lines.add("combine", params.combine == LshCombine::lse ? "lse" : "mean");
}
void add_parameters(const RoutingParams& params, Lines& lines) {
  lines.add("clusters", params.clusters);
  lines.add("window", params.window);
  lines.add("membership", params.membership == Membership::nearest    ? "nearest"
                          : params.membership == Membership::balanced ? "balanced"
                                                                      : "top");
  lines.add("queries_in", params.queries_in);
  lines.add("self", params.self == SelfAttention::demote ? "demote" : "keep");
  lines.add("decay", params.decay);
  lines.add("commitment", params.commitment);
}
void add_parameters(const CastParams& params, Lines& lines) {
  lines.add("clusters", params.clusters);
  lines.add("size", params.size);
  lines.add("mode", params.mode == CastMode::topk ? "topk" : "single");
  lines.add("activation", params.activation == CastActivation::softmax ? "softmax" : "laplace");
  lines.add("share_heads", static_cast<std::int64_t>(params.share_heads));
}

const char* causality_name(Causality form) {
  switch (form) {
    case Causality::strict:
      return "strict";
    case Causality::leaking:
      return "leaking";
    default:
      return "none";
  }
}

const char* positions_name(const HeadGroup& group) {
  switch (group.positions) {
    case Positions::rotary:
      return "rotary";
    case Positions::relative:
      return "relative";
    case Positions::none:
      return "none";
    case Positions::automatic:
      break;
  }
  return group.rotary() ? "rotary" : "none";
}

std::string describe_group(const HeadGroup& group, std::int64_t heads, bool causal) {
  const Mechanism resolved = resolve(group.mechanism, causal);
  Lines lines;
  lines.add("name", mechanism_name(resolved));
  lines.add("text", to_string(group.mechanism));
  lines.add("heads", heads);
  lines.add("positions", positions_name(group));
  lines.add("positions_named", static_cast<std::int64_t>(group.positions != Positions::automatic));
  lines.add("keys_are_queries", static_cast<std::int64_t>(keys_are_queries(resolved)));
  lines.add("causality", causality_name(resolve_causality(resolved, causal)));
  std::visit([&](const auto& params) { add_parameters(params, lines); }, resolved);
  return lines.text;
}

std::string describe(const char* text, std::int64_t heads, bool causal) {
  const AttentionSpec spec = AttentionSpec::parse(text);
  const std::vector<std::int64_t> counts = spec.head_counts(heads);
  std::string groups;
  for (std::size_t g = 0; g < counts.size(); ++g) {
    groups += (g ? "\n" : "") + describe_group(spec.groups[g], counts[g], causal);
  }
  return groups;
}

std::string build_facts() {
  const BuildInfo info = build_info();
  Lines lines;
  lines.add("version", info.version);
  lines.add("compiler", info.compiler);
  lines.add("build_type", info.build_type);
  lines.add("cuda_toolkit", info.cuda_toolkit);
  lines.add("cpu", cpu_model());
  lines.add("instruction_set", cpu_isa_name(cpu_isa()));
  lines.add("threads", std::to_string(threads()));
  return lines.text;
}

// The text that `make` gives, or its error.
template <class Make>
const char* keep(const Make& make) {
  thread_local std::string text;
  try {
    text = make();
  } catch (const std::exception& error) {
    text = std::string("!") + error.what();
  }
  return text.c_str();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* coterie_describe(const char* spec, std::int64_t heads, bool causal) {
  return keep([&] { return describe(spec, heads, causal); });
}

const char* coterie_build_facts() { return keep(build_facts); }

const char* coterie_spec_help() { return keep(spec_help); }

const char* coterie_set_threads(int count) {
  return keep([&] {
    set_threads(count);
    return std::string();
  });
}

}  // extern "C"
#pragma GCC visibility pop

}  // namespace coterie::stable_api
