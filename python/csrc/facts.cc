// SPDX-License-Identifier: MIT
// Facts that Python needs besides operators, as C functions of text and numbers. They take no
// tensors, so they bypass torch's dispatcher and also work while it traces.
//
// Results are lines of key=value (with a blank line between groups), or "!" and an error message.
// They are valid until the thread's next call.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "coterie/choice.h"
#include "coterie/layer.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "platform.h"

#define COTERIE_TEXT_OF(name) #name
#define COTERIE_TEXT(name) COTERIE_TEXT_OF(name)

namespace coterie::stable_api {
namespace {

struct Lines {
  std::string text;

  void add(const char* key, const std::string& value) {
    text += std::string(key) + "=" + value + "\n";
  }
  void add(const char* key, std::int64_t value) { add(key, std::to_string(value)); }
  void add(const char* key, double value) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    add(key, std::string(digits));
  }
};

const char* positions_name(const HeadGroup& group) {
  if (group.positions == Positions::relative) return "relative";
  return group.rotary() ? "rotary" : "none";
}

std::string describe_group(const HeadGroup& group, const HeadSlice& slice, bool causal) {
  Lines lines{mechanism_facts(group.mechanism, causal)};
  lines.add("text", to_string(group.mechanism));
  lines.add("first", slice.first);
  lines.add("heads", slice.count);
  lines.add("first_kv", slice.first_kv);
  lines.add("kv_heads", slice.kv_count);
  lines.add("first_key", slice.first_key);
  lines.add("key_heads", slice.key_count);
  lines.add("positions", positions_name(group));
  lines.add("positions_named", static_cast<std::int64_t>(group.positions != Positions::automatic));
  return lines.text;
}

std::string describe(const char* text, std::int64_t heads, std::int64_t kv_heads, bool causal) {
  const AttentionSpec spec = AttentionSpec::parse(text);
  const std::vector<HeadSlice> slices = head_slices(spec, heads, kv_heads);
  std::string groups;
  for (std::size_t g = 0; g < slices.size(); ++g) {
    groups += (g ? "\n" : "") + describe_group(spec.groups[g], slices[g], causal);
  }
  return groups;
}

std::string build_facts() {
  const BuildInfo info = build_info();
  Lines lines;
  lines.add("version", info.version);
  lines.add("operators", COTERIE_TEXT(COTERIE_OPERATORS));
  lines.add("compiler", info.compiler);
  lines.add("build_type", info.build_type);
  lines.add("cuda_toolkit", info.cuda_toolkit);
  lines.add("cpu", cpu_model());
  lines.add("instruction_set", cpu_isa_name(cpu_isa()));
  lines.add("threads", std::to_string(threads()));
  return lines.text;
}

std::vector<std::string> lines_of(const char* text) {
  std::vector<std::string> lines(1);
  for (; *text != 0; ++text)
    if (*text == '\n')
      lines.emplace_back();
    else
      lines.back() += *text;
  return lines;
}

// Numbers of layers in the order of the members of LayerMeasurements, one layer after the other.
std::vector<LayerMeasurements> measurements(std::int64_t layers, const std::int64_t* heads,
                                            const std::int64_t* units, const double* numbers,
                                            std::size_t rungs) {
  std::vector<LayerMeasurements> found(static_cast<std::size_t>(layers));
  for (std::size_t l = 0; l < found.size(); ++l) {
    LayerMeasurements& layer = found[l];
    layer.heads = heads[l];
    layer.units = units[l];
    const auto take = [&](std::vector<double>& into, std::size_t count) {
      into.assign(numbers, numbers + count);
      numbers += count;
    };
    const std::size_t all = static_cast<std::size_t>(layer.units) * rungs;
    take(layer.unit_error, all);
    take(layer.output_error, rungs);
    take(layer.unit_time, all);
    take(layer.group_time, rungs);
    layer.own_time = *numbers++;
  }
  return found;
}

std::string specs_text(const Choice& choice) {
  std::string text;
  for (const AttentionSpec& spec : choice.layers)
    text += (text.empty() ? "" : "\n") + spec.to_string();
  return text;
}

std::string choice_text(const Choice& choice, const std::vector<std::string>& ladder) {
  Lines lines;
  lines.add("error", choice.error);
  lines.add("time", choice.time);
  lines.add("full_time", choice.full_time);
  lines.add("verified", choice.verified);
  lines.add("seconds", choice.seconds);
  lines.add("full_seconds", choice.full_seconds);
  lines.add("uniform", ladder[choice.uniform]);
  lines.add("uniform_error", choice.uniform_error);
  lines.add("uniform_time", choice.uniform_time);
  for (std::size_t l = 0; l < choice.layers.size(); ++l) {
    const std::string layer = std::to_string(l);
    lines.add(("spec." + layer).c_str(), choice.layers[l].to_string());
    for (std::size_t u = 0; u < choice.rungs[l].size(); ++u) {
      const std::string unit = layer + "." + std::to_string(u);
      lines.add(("rung." + unit).c_str(), ladder[choice.rungs[l][u]]);
      lines.add(("reason." + unit).c_str(), choice.reasons[l][u]);
    }
  }
  return lines.text;
}

// The text that `make` returns, or its error.
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

const char* coterie_describe(const char* spec, std::int64_t heads, std::int64_t kv_heads,
                             bool causal) {
  return keep([&] { return describe(spec, heads, kv_heads, causal); });
}

const char* coterie_layer_spec(const char* spec, bool causal) {
  return keep([&] { return layer_spec(AttentionSpec::parse(spec), causal).to_string(); });
}

// Signed, as operators take seeds.
std::int64_t coterie_group_seed(std::uint64_t seed, std::int64_t layer, std::int64_t group) {
  return static_cast<std::int64_t>(group_seed(seed, layer, group));
}

// choose_verified (include/coterie/choice.h). `ladder` has one spec per line; `verify` and
// `seconds` get the specs of all layers, one per line.
const char* coterie_choose(const char* ladder, std::int64_t layers, const std::int64_t* heads,
                           const std::int64_t* units, const double* numbers, double target,
                           int rounds, double (*verify)(const char*),
                           double (*seconds)(const char*)) {
  return keep([&] {
    const std::vector<std::string> rungs = lines_of(ladder);
    const Choice choice = choose_verified(
        rungs, measurements(layers, heads, units, numbers, rungs.size()), target,
        [&](const Choice& found) { return verify(specs_text(found).c_str()); },
        [&](const Choice& found) { return seconds(specs_text(found).c_str()); }, rounds);
    return choice_text(choice, rungs);
  });
}

const char* coterie_build_facts() { return keep(build_facts); }

const char* coterie_spec_help() { return keep(spec_help); }

const char* coterie_set_threads(int count) {
  return keep([&] {
    set_threads(count);
    return std::string();
  });
}

void coterie_set_fast(bool allowed) { set_fast(allowed); }

}  // extern "C"
#pragma GCC visibility pop

}  // namespace coterie::stable_api
