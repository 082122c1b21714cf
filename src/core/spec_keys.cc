// SPDX-License-Identifier: MIT
#include "core/spec_keys.h"

#include <charconv>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/check.h"

namespace coterie {
namespace {

// Tokens and clusters are counted in int32.
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

bool always(const HeadGroup&) { return true; }
bool never(const HeadGroup&) { return false; }

// The shortest digits that read back as the same number, with exponents as "1e-4".
std::string number_text(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  const std::size_t exponent = text.find('e');
  if (exponent == std::string::npos) return text;
  std::size_t digit = exponent + 1;
  if (text[digit] == '+') text.erase(digit, 1);
  if (text[digit] == '-') ++digit;
  while (text[digit] == '0' && digit + 1 < text.size()) text.erase(digit, 1);
  return text;
}

template <class Number>
bool read_number(std::string_view text, Number& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

// In all of these `field` gives a reference to the field from a HeadGroup, const or not.

struct Whole {
  std::int64_t min = 1, max = kMaxCount, multiple = 1;
};

template <class Field>
SpecKey integer_key(const char* name, Field field, Whole range, const HeadGroup& defaults,
                    const char* help) {
  const auto inside = [range](std::int64_t value) {
    return value >= range.min && value <= range.max && value % range.multiple == 0;
  };
  const std::int64_t unset = field(defaults);
  std::string allowed = range.multiple == 2 ? "an even integer from " : "an integer from ";
  allowed += std::to_string(range.min) + " to " + std::to_string(range.max);
  const auto set = [=](std::string_view text, HeadGroup& group) {
    std::int64_t value = 0;
    if (text.empty() || text[0] < '0' || text[0] > '9') return false;
    if (!read_number(text, value) || !inside(value)) return false;
    field(group) = value;
    return true;
  };
  const auto get = [=](const HeadGroup& group) {
    const bool automatic = unset == kAutomatic && field(group) == unset;
    return automatic ? "automatic" : std::to_string(field(group));
  };
  const auto valid = [=](const HeadGroup& group) {
    return field(group) == unset || inside(field(group));
  };
  return {
      name, allowed, help, set, get, valid, inside(unset) || unset == kAutomatic ? never : always};
}

template <class Field>
SpecKey number_key(const char* name, Field field, double max, const char* help) {
  const auto inside = [max](double value) { return value >= 0 && value <= max; };
  const bool bounded = max < std::numeric_limits<double>::max();
  const std::string allowed =
      bounded ? "a number from 0 to " + number_text(max) : std::string("a number >= 0");
  const auto set = [=](std::string_view text, HeadGroup& group) {
    double value = 0;
    if (!read_number(text, value) || !inside(value)) return false;
    field(group) = value;
    return true;
  };
  const auto get = [=](const HeadGroup& group) { return number_text(field(group)); };
  const auto valid = [=](const HeadGroup& group) { return inside(field(group)); };
  return {name, allowed, help, set, get, valid, never};
}

template <class Value>
using Choices = std::vector<std::pair<const char*, Value>>;

// A value without a name among the choices is the automatic one.
template <class Value, class Field>
SpecKey choice_key(const char* name, Field field, const Choices<Value>& choices, const char* help) {
  std::string allowed;
  for (const auto& choice : choices)
    allowed += (allowed.empty() ? "" : "|") + std::string(choice.first);
  const auto set = [=](std::string_view text, HeadGroup& group) {
    for (const auto& choice : choices) {
      if (text != choice.first) continue;
      field(group) = choice.second;
      return true;
    }
    return false;
  };
  const auto get = [=](const HeadGroup& group) -> std::string {
    for (const auto& choice : choices) {
      if (field(group) == choice.second) return choice.first;
    }
    return "automatic";
  };
  return {name, allowed, help, set, get, always, never};
}

template <class Field>
SpecKey bool_key(const char* name, Field field, const char* help) {
  return choice_key<bool>(name, field, {{"true", true}, {"false", false}}, help);
}

// A field of the mechanism's parameters: by member pointer, or inside their ClusteringParams.
template <class Params, class Member>
auto field_of(Member Params::*member) {
  return [member](auto& group) -> auto& { return std::get<Params>(group.mechanism).*member; };
}
template <class Params, class Member>
auto clustering_field(Member ClusteringParams::*member) {
  return [member](auto& group) -> auto& {
    return std::get<Params>(group.mechanism).clustering.*member;
  };
}

template <class Params>
SpecEntry make_entry(const char* name, const char* help) {
  SpecEntry entry{name, help, {}, {}};
  entry.defaults.mechanism = Params{};
  return entry;
}

SpecEntry local_entry() {
  using P = LocalParams;
  SpecEntry entry = make_entry<P>("local", "attention to near positions; any mask, causal or not");
  const HeadGroup& defaults = entry.defaults;
  entry.keys = {
      integer_key("window", field_of(&P::window), {}, defaults, "keys in the window or block"),
      choice_key<LocalKind>("kind", field_of(&P::kind),
                            {{"sliding", LocalKind::sliding}, {"blocked", LocalKind::blocked}},
                            "window around each query, or fixed blocks"),
      integer_key("flange", field_of(&P::flange), {.min = 0}, defaults,
                  "blocked: neighbour blocks seen on each side")};
  return entry;
}

SpecEntry strided_entry() {
  using P = StridedParams;
  SpecEntry entry = make_entry<P>("strided", "keys at multiples of a distance; causal or not");
  entry.keys = {integer_key("stride", field_of(&P::stride), {}, entry.defaults,
                            "distance between attended keys")};
  return entry;
}

SpecEntry oracle_top_entry() {
  using P = OracleTopParams;
  SpecEntry entry = make_entry<P>("oracle-top",
                                  "the best keys by exact score: a yardstick, quadratic in time; "
                                  "any mask, causal or not");
  entry.keys = {integer_key("topk", field_of(&P::topk), {}, entry.defaults, "keys per query")};
  return entry;
}

template <class P>
void add_clustering_keys(SpecEntry& entry) {
  const HeadGroup& defaults = entry.defaults;
  entry.keys.push_back(integer_key("clusters", clustering_field<P>(&ClusteringParams::clusters), {},
                                   defaults, "clusters of queries"));
  entry.keys.push_back(choice_key<Clustering>(
      "clustering", clustering_field<P>(&ClusteringParams::method),
      {{"keys", Clustering::keys},
       {"hamming-keys", Clustering::hamming_keys},
       {"hamming", Clustering::hamming}},
      "metric of the keys; hashes of key differences; the published hashes"));
  entry.keys.push_back(integer_key("iterations", clustering_field<P>(&ClusteringParams::iterations),
                                   {.min = 0}, defaults,
                                   "centroid updates; 1, 3, 10 by clustering"));
  entry.keys.push_back(integer_key("bits", clustering_field<P>(&ClusteringParams::bits),
                                   {.max = 63}, defaults, "hash length; Hamming clusterings"));
  entry.keys.push_back(bool_key("hash_bias", clustering_field<P>(&ClusteringParams::hash_bias),
                                "random thresholds; clustering=hamming"));
}

SpecEntry clustered_entry() {
  SpecEntry entry = make_entry<ClusteredParams>(
      "clustered", "one attention row per cluster of queries; lengths only, not causal");
  add_clustering_keys<ClusteredParams>(entry);
  return entry;
}

SpecEntry improved_clustered_entry() {
  using P = ImprovedClusteredParams;
  SpecEntry entry = make_entry<P>(
      "i-clustered", "clustered, with the cluster's best keys attended exactly; lengths only");
  add_clustering_keys<P>(entry);
  entry.keys.push_back(
      integer_key("topk", field_of(&P::topk), {}, entry.defaults, "exact keys per cluster"));
  entry.keys.push_back(bool_key("mass_grad", field_of(&P::mass_grad),
                                "gradient through the mass of the exact keys"));
  entry.keys.push_back(choice_key<Causality>(
      "causal", field_of(&P::causal),
      {{"none", Causality::none}, {"reference", Causality::leaking}, {"strict", Causality::strict}},
      "reference: its selection sees the future"));
  return entry;
}

SpecEntry lsh_entry() {
  using P = LshParams;
  SpecEntry entry =
      make_entry<P>("lsh",
                    "Reformer: chunks of tokens sorted by hash, shared queries and keys; "
                    "lengths only, causal form sees the future");
  const HeadGroup& defaults = entry.defaults;
  entry.keys = {
      integer_key("rounds", field_of(&P::rounds), {}, defaults, "hash rounds"),
      integer_key("chunk", field_of(&P::chunk), {}, defaults, "tokens per chunk"),
      integer_key("buckets", field_of(&P::buckets), {.min = 2, .max = kMaxCount - 1, .multiple = 2},
                  defaults, "hash values per round"),
      choice_key<LshCombine>("combine", field_of(&P::combine),
                             {{"lse", LshCombine::lse}, {"mean", LshCombine::mean}},
                             "rounds as one softmax, or their mean")};
  return entry;
}

SpecEntry routing_entry() {
  using P = RoutingParams;
  constexpr double kUnbounded = std::numeric_limits<double>::max();
  SpecEntry entry =
      make_entry<P>("routing", "tokens meet in clusters around learned centroids; lengths only");
  const HeadGroup& defaults = entry.defaults;
  entry.keys = {
      integer_key("clusters", field_of(&P::clusters), {}, defaults, "centroids"),
      integer_key("window", field_of(&P::window), {}, defaults,
                  "tokens per cluster, or latest tokens seen; not with membership=balanced"),
      choice_key<Membership>("membership", field_of(&P::membership),
                             {{"top", Membership::top},
                              {"balanced", Membership::balanced},
                              {"nearest", Membership::nearest}},
                             "nearest when strict, else top"),
      bool_key("share_qk", field_of(&P::share_qk), "the queries are the keys"),
      choice_key<Causality>(
          "causal", field_of(&P::causal),
          {{"none", Causality::none}, {"paper", Causality::leaking}, {"strict", Causality::strict}},
          "paper: its selection sees the future"),
      integer_key("queries_in", field_of(&P::queries_in), {}, defaults,
                  "strict: clusters a query looks into"),
      choice_key<SelfAttention>("self", field_of(&P::self),
                                {{"demote", SelfAttention::demote}, {"keep", SelfAttention::keep}},
                                "demote: own key only when there is no other; so with share_qk"),
      bool_key("include_self", field_of(&P::include_self),
               "strict, not share_qk: a query also sees its own key"),
      number_key("count_eps", field_of(&P::count_eps), kUnbounded,
                 "top: outputs are divided by clusters of the token + this"),
      number_key("decay", field_of(&P::decay), 1.0, "of the centroids' moving average"),
      number_key("commitment", field_of(&P::commitment), kUnbounded,
                 "weight of the commitment loss")};
  entry.keys[1].needed = [](const HeadGroup& group) {
    return std::get<P>(group.mechanism).membership != Membership::balanced;
  };
  return entry;
}

SpecEntry cast_entry() {
  using P = CastParams;
  SpecEntry entry = make_entry<P>(
      "cast", "clusters around surrogate tokens, summaries between them; lengths only, not causal");
  const HeadGroup& defaults = entry.defaults;
  entry.keys = {
      integer_key("clusters", field_of(&P::clusters), {}, defaults, "surrogate tokens"),
      integer_key("size", field_of(&P::size), {}, defaults, "tokens per cluster"),
      choice_key<CastMode>("mode", field_of(&P::mode),
                           {{"topk", CastMode::topk}, {"single", CastMode::single}},
                           "a token may be in several clusters, or in one"),
      choice_key<CastActivation>(
          "activation", field_of(&P::activation),
          {{"softmax", CastActivation::softmax}, {"laplace", CastActivation::laplace}},
          "attention function"),
      choice_key<bool>("heads", field_of(&P::share_heads), {{"shared", true}, {"separate", false}},
                       "one clustering for all heads, or one each"),
      bool_key("gate_scale", field_of(&P::gate_scale), "scale affinities by the gate")};
  return entry;
}

// Relative positions add a term to the logits of q and k as they are, and widen their rows: nothing
// for mechanisms that normalise rows, take keys from queries or learn vectors of the rows' width.
SpecKey positions_key(const HeadGroup& defaults) {
  const Mechanism& mechanism = defaults.mechanism;
  Choices<Positions> choices = {{"rotary", Positions::rotary}, {"none", Positions::none}};
  if (!std::holds_alternative<LshParams>(mechanism) &&
      !std::holds_alternative<RoutingParams>(mechanism) &&
      !std::holds_alternative<CastParams>(mechanism)) {
    choices.push_back({"relative", Positions::relative});
  }
  return choice_key<Positions>(
      "positions", [](auto& group) -> auto& { return group.positions; }, choices,
      defaults.rotary() ? "rotary unless told" : "none unless told");
}

std::vector<SpecEntry> make_table() {
  std::vector<SpecEntry> table = {
      make_entry<FullParams>("full", "softmax over all keys; any mask, causal or not"),
      local_entry(),
      strided_entry(),
      oracle_top_entry(),
      clustered_entry(),
      improved_clustered_entry(),
      lsh_entry(),
      routing_entry(),
      cast_entry()};
  for (SpecEntry& entry : table) entry.keys.push_back(positions_key(entry.defaults));
  return table;
}

}  // namespace

const std::vector<SpecEntry>& spec_table() {
  // Never destroyed: other threads may be inside a call while the process exits.
  static const std::vector<SpecEntry>& table = *new std::vector<SpecEntry>(make_table());
  return table;
}

const SpecEntry& spec_entry(const Mechanism& mechanism) {
  for (const SpecEntry& entry : spec_table()) {
    if (entry.defaults.mechanism.index() == mechanism.index()) return entry;
  }
  fail("spec", "expected a mechanism of the table; got number ", mechanism.index());
}

void check_values(const std::string& op, const HeadGroup& group) {
  const SpecEntry& entry = spec_entry(group.mechanism);
  for (const SpecKey& key : entry.keys) {
    const bool unset = key.get(group) == key.get(entry.defaults);
    COTERIE_CHECK(!unset || !key.needed(group), op, "expected ", key.name, " of ", entry.name, ", ",
                  key.allowed, "; got none");
    COTERIE_CHECK(key.valid(group), op, "expected ", key.name, " of ", entry.name, " to be ",
                  key.allowed, "; got ", key.get(group));
  }
}

}  // namespace coterie
