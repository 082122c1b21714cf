// SPDX-License-Identifier: MIT
#include "coterie/spec.h"

#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "coterie/error.h"
#include "coterie/wrap.h"

namespace coterie {
namespace {

std::string refusal_of(std::string_view text) {
  try {
    AttentionSpec::parse(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

template <class Params>
Params parse_one(std::string_view text) {
  const AttentionSpec spec = AttentionSpec::parse(text);
  EXPECT_EQ(spec.groups.size(), 1u);
  return std::get<Params>(spec.groups.at(0).mechanism);
}

TEST(Spec, ReadsNamesWithDefaults) {
  EXPECT_TRUE(std::holds_alternative<FullParams>(AttentionSpec::parse("full").groups[0].mechanism));
  EXPECT_EQ(parse_one<OracleTopParams>("oracle-top").topk, 32);
  EXPECT_EQ(parse_one<LshParams>("lsh").buckets, 64);
  const auto params = parse_one<ImprovedClusteredParams>("i-clustered(clusters=100)");
  EXPECT_EQ(params.clustering.clusters, 100);
  EXPECT_EQ(params.clustering.method, Clustering::keys);
  EXPECT_EQ(params.clustering.iterations, kAutomatic);
  EXPECT_EQ(params.causal, Causality::automatic);
}

TEST(Spec, ReadsEveryKeyOfLocalStridedAndTop) {
  const auto local = parse_one<LocalParams>("local(window=7,kind=blocked,flange=0)");
  EXPECT_EQ(local.window, 7);
  EXPECT_EQ(local.kind, LocalKind::blocked);
  EXPECT_EQ(local.flange, 0);
  EXPECT_EQ(parse_one<StridedParams>("strided(stride=5)").stride, 5);
  EXPECT_EQ(parse_one<OracleTopParams>("oracle-top(topk=3)").topk, 3);
}

TEST(Spec, ReadsEveryKeyOfTheClusteredForms) {
  const auto plain = parse_one<ClusteredParams>(
      "clustered(clusters=9,clustering=hamming,iterations=4,bits=31,hash_bias=false)");
  EXPECT_EQ(plain.clustering.clusters, 9);
  EXPECT_EQ(plain.clustering.method, Clustering::hamming);
  EXPECT_EQ(plain.clustering.iterations, 4);
  EXPECT_EQ(plain.clustering.bits, 31);
  EXPECT_FALSE(plain.clustering.hash_bias);
  const auto improved = parse_one<ImprovedClusteredParams>(
      "i-clustered(clusters=9,clustering=hamming-keys,topk=5,mass_grad=false,causal=reference)");
  EXPECT_EQ(improved.clustering.method, Clustering::hamming_keys);
  EXPECT_EQ(improved.topk, 5);
  EXPECT_FALSE(improved.mass_grad);
  EXPECT_EQ(improved.causal, Causality::leaking);
}

TEST(Spec, ReadsEveryKeyOfLsh) {
  const auto lsh = parse_one<LshParams>("lsh(rounds=2,chunk=16,buckets=8,combine=mean)");
  EXPECT_EQ(lsh.rounds, 2);
  EXPECT_EQ(lsh.chunk, 16);
  EXPECT_EQ(lsh.buckets, 8);
  EXPECT_EQ(lsh.combine, LshCombine::mean);
}

TEST(Spec, ReadsEveryKeyOfRouting) {
  const auto routing = parse_one<RoutingParams>(
      "routing(clusters=16,window=256,membership=nearest,share_qk=true,causal=strict,queries_in=2,"
      "self=keep,include_self=true,count_eps=0,decay=0.5,commitment=2e-3)");
  EXPECT_EQ(routing.clusters, 16);
  EXPECT_EQ(routing.window, 256);
  EXPECT_EQ(routing.membership, Membership::nearest);
  EXPECT_TRUE(routing.shared());
  EXPECT_EQ(routing.causal, Causality::strict);
  EXPECT_EQ(routing.queries_in, 2);
  EXPECT_EQ(routing.self, SelfAttention::keep);
  EXPECT_TRUE(routing.include_self);
  EXPECT_EQ(routing.count_eps, 0.0);
  EXPECT_EQ(routing.decay, 0.5);
  EXPECT_EQ(routing.commitment, 2e-3);
  EXPECT_EQ(parse_one<RoutingParams>("routing(clusters=4,window=8,causal=paper)").causal,
            Causality::leaking);
  EXPECT_EQ(parse_one<RoutingParams>("routing(clusters=4,membership=balanced)").window, 0);
}

TEST(Spec, ReadsEveryKeyOfCast) {
  const auto cast = parse_one<CastParams>(
      "cast(clusters=8,size=32,mode=single,activation=laplace,heads=separate,gate_scale=false)");
  EXPECT_EQ(cast.clusters, 8);
  EXPECT_EQ(cast.size, 32);
  EXPECT_EQ(cast.mode, CastMode::single);
  EXPECT_EQ(cast.activation, CastActivation::laplace);
  EXPECT_FALSE(cast.share_heads);
  EXPECT_FALSE(cast.gate_scale);
}

TEST(Spec, GroupsCarryTheirHeads) {
  const auto spec =
      AttentionSpec::parse("4*local(window=256)+4*routing(clusters=16,window=256)+2*full");
  ASSERT_EQ(spec.groups.size(), 3u);
  EXPECT_EQ(spec.head_counts(10), (std::vector<std::int64_t>{4, 4, 2}));
  EXPECT_EQ(AttentionSpec::parse("full").head_counts(8), (std::vector<std::int64_t>{8}));
  EXPECT_EQ(AttentionSpec::parse("8*full").head_counts(8), (std::vector<std::int64_t>{8}));
}

TEST(Spec, HeadCountsThatDoNotAddUpAreRefused) {
  const char* const text = "4*local(window=2)+2*full";
  for (const std::int64_t heads : {0, 5, 7, 8}) {
    EXPECT_THROW(AttentionSpec::parse(text).head_counts(heads), Error) << heads;
  }
  EXPECT_THROW(AttentionSpec::parse("4*full").head_counts(8), Error);
  EXPECT_THROW(AttentionSpec::parse("2147483647*full+2147483647*full").head_counts(2), Error);
  EXPECT_THROW(AttentionSpec{}.head_counts(2), Error);
  try {
    AttentionSpec::parse(text).head_counts(8);
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "[spec] expected head counts that add up to the 8 heads of the layer; got "
                 "\"4*local(window=2)+2*full\"");
  }
}

TEST(Spec, WhitespaceIsAllowedBetweenTokens) {
  const auto spec = AttentionSpec::parse(
      "  4 * local ( window = 256 , kind = blocked )\n + 4* full( positions=none\t) ");
  EXPECT_EQ(spec.to_string(), "4*local(window=256,kind=blocked)+4*full(positions=none)");
}

TEST(Spec, PositionsAreRotaryForFullAndLocalUnlessTold) {
  const auto rotary = [](const char* text) {
    return AttentionSpec::parse(text).groups[0].rotary();
  };
  EXPECT_TRUE(rotary("full"));
  EXPECT_TRUE(rotary("local(window=4)"));
  EXPECT_FALSE(rotary("full(positions=none)"));
  EXPECT_FALSE(rotary("i-clustered(clusters=4)"));
  EXPECT_FALSE(rotary("strided(stride=4)"));
  EXPECT_TRUE(rotary("i-clustered(clusters=4,positions=rotary)"));
  EXPECT_FALSE(rotary("full(positions=relative)"));
}

TEST(Spec, DefaultsAreNotPrinted) {
  const auto text = [](const char* spec) { return AttentionSpec::parse(spec).to_string(); };
  EXPECT_EQ(text("i-clustered(topk=32,clusters=100,bits=63)"), "i-clustered(clusters=100)");
  EXPECT_EQ(text("routing(commitment=0.0001,window=2,clusters=3,decay=0.90)"),
            "routing(clusters=3,window=2)");
  EXPECT_EQ(text("routing(clusters=3,window=2,commitment=1e30,decay=1e-5)"),
            "routing(clusters=3,window=2,decay=1e-5,commitment=1e30)");
  EXPECT_EQ(to_string(Mechanism{FullParams{}}), "full");
  EXPECT_EQ(to_string(Mechanism{CastParams{.clusters = 2, .size = 3}}), "cast(clusters=2,size=3)");
}

TEST(Spec, ErrorsNameWhatIsAllowed) {
  EXPECT_EQ(refusal_of("fulll"),
            "[spec] expected one of full, local, strided, oracle-top, clustered, i-clustered, lsh, "
            "routing, cast; got \"fulll\"; did you mean \"full\"?");
  EXPECT_EQ(refusal_of("strided(size=3)"),
            "[spec] expected a key of strided: stride (required), positions=automatic; got "
            "\"size\"");
  EXPECT_EQ(refusal_of("clustered(cluster=3)"),
            "[spec] expected a key of clustered: clusters (required), clustering=keys, "
            "iterations=automatic, bits=63, hash_bias=true, near=0, positions=automatic; got "
            "\"cluster\"; "
            "did you mean \"clusters\"?");
  EXPECT_EQ(refusal_of("local(window=4,kind=round)"),
            "[spec] expected kind of local to be sliding|blocked; got \"round\"");
  EXPECT_EQ(refusal_of("local"),
            "[spec] window is required for local: an integer from 1 to 2147483647; got none");
  EXPECT_EQ(refusal_of("clustered(clusters=3,bits=64)"),
            "[spec] expected bits of clustered to be an integer from 1 to 63; got \"64\"");
  EXPECT_EQ(refusal_of("full+2*full"),
            "[spec] expected a number of heads for every group if there are several, as in "
            "\"4*full\"; got "
            "none");
  EXPECT_EQ(refusal_of("local(window=3,window=3)"),
            "[spec] expected window of local once; got it twice");
}

TEST(Spec, SyntaxErrorsAreRefused) {
  for (const char* const text : {"",
                                 " ",
                                 "+",
                                 "full+",
                                 "+full",
                                 "2*",
                                 "*full",
                                 "0*full",
                                 "-1*full",
                                 "2.5*full",
                                 "x*full",
                                 "99999999999999999999*full",
                                 "2*2*full",
                                 "full(",
                                 "full)",
                                 "full()",
                                 "full(()",
                                 "()",
                                 "local(window)",
                                 "local(=3)",
                                 "local(window=)",
                                 "local(window=3",
                                 "local window=3)",
                                 "local(window=3,)",
                                 "local(,window=3)",
                                 "local(window=3))",
                                 "local((window=3)",
                                 "local(window=3)x",
                                 "local(window=3)(kind=sliding)",
                                 "local(window==3)",
                                 "local(window=3;)",
                                 "full full",
                                 "FULL",
                                 "local(Window=3)",
                                 "2*full 2*full"}) {
    EXPECT_EQ(refusal_of(text).substr(0, 16), "[spec] expected ") << text;
  }
}

TEST(Spec, MissingKeysAreRefused) {
  for (const char* const text :
       {"local", "local(kind=blocked)", "strided", "clustered", "i-clustered(topk=3)", "routing",
        "routing(clusters=3)", "routing(window=3)", "routing(clusters=3,membership=top)",
        "routing(clusters=3,causal=strict)", "cast(clusters=3)", "cast(size=3)"}) {
    const std::string error = refusal_of(text);
    EXPECT_NE(error.find("; got none"), std::string::npos) << text << ": " << error;
  }
}

TEST(Spec, ValuesOutOfRangeAreRefused) {
  for (const char* const text : {"local(window=0)",
                                 "local(window=-3)",
                                 "local(window=+3)",
                                 "local(window=3.0)",
                                 "local(window=0x3)",
                                 "local(window=3k)",
                                 "local(window=2147483648)",
                                 "local(window=99999999999999999999)",
                                 "local(window=three)",
                                 "local(window=3,flange=-1)",
                                 "strided(stride=0)",
                                 "oracle-top(topk=0)",
                                 "clustered(clusters=0)",
                                 "clustered(clusters=3,bits=0)",
                                 "clustered(clusters=3,bits=64)",
                                 "clustered(clusters=3,iterations=-1)",
                                 "clustered(clusters=3,iterations=automatic)",
                                 "clustered(clusters=3,hash_bias=1)",
                                 "i-clustered(clusters=3,causal=paper)",
                                 "lsh(buckets=7)",
                                 "lsh(buckets=0)",
                                 "lsh(rounds=0)",
                                 "lsh(chunk=0)",
                                 "lsh(combine=sum)",
                                 "routing(clusters=3,window=0)",
                                 "routing(clusters=3,window=2,causal=reference)",
                                 "routing(clusters=3,window=2,decay=1.1)",
                                 "routing(clusters=3,window=2,decay=-0.1)",
                                 "routing(clusters=3,window=2,decay=nan)",
                                 "routing(clusters=3,window=2,commitment=inf)",
                                 "routing(clusters=3,window=2,commitment=-1)",
                                 "routing(clusters=3,window=2,count_eps=1e999)",
                                 "routing(clusters=3,window=2,queries_in=0)",
                                 "routing(clusters=3,window=2,membership=auto)",
                                 "cast(clusters=3,size=0)",
                                 "cast(clusters=3,size=3,heads=2)",
                                 "full(positions=sinus)",
                                 "lsh(positions=relative)",
                                 "routing(clusters=3,window=2,positions=relative)",
                                 "cast(clusters=3,size=3,positions=relative)"}) {
    const std::string error = refusal_of(text);
    EXPECT_NE(error.find(" to be "), std::string::npos) << text << ": " << error;
  }
}

TEST(Spec, MessagesStayOnOneShortLine) {
  const std::string error = refusal_of("full\n\x01" + std::string(1000, 'x'));
  EXPECT_EQ(error.find('\n'), std::string::npos);
  EXPECT_LT(error.size(), 250u);
}

TEST(Spec, HelpHas80Columns) {
  std::istringstream lines(spec_help());
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  std::string text = "  name";
  append_wrapped(text, "of an option", 8);
  append_wrapped(text, std::string(79, 'a') + " b", 0);
  append_wrapped(text += "long name", "c", 4);
  EXPECT_EQ(text, "  name  of an option\n" + std::string(79, 'a') + "\nb\nlong name\n    c\n");
}

TEST(Spec, HelpListsEveryNameAndKey) {
  const std::string help = spec_help();
  for (const char* const word :
       {"full", "local", "strided", "oracle-top", "clustered", "i-clustered", "lsh", "routing",
        "cast", "window (required)", "keys|hamming-keys|hamming", "none|paper|strict",
        "commitment=1e-4", "buckets=64", "positions=automatic", "rotary|none|relative",
        "heads=shared"}) {
    EXPECT_NE(help.find(word), std::string::npos) << word;
  }
}

// A key with values other than its default, in the order of the table.
struct KeyValues {
  const char* key;
  std::vector<const char*> values;
  bool required = false;
};
struct NamedKeys {
  const char* name;
  std::vector<KeyValues> keys;
  bool relative = true;  // whether positions=relative is allowed
};

std::vector<NamedKeys> grammar() {
  const std::vector<KeyValues> clustering = {{"clusters", {"1", "25", "2147483647"}, true},
                                             {"clustering", {"hamming-keys", "hamming"}},
                                             {"iterations", {"0", "7"}},
                                             {"bits", {"1", "62"}},
                                             {"hash_bias", {"false"}}};
  const KeyValues near = {"near", {"1", "128"}};
  std::vector<KeyValues> plain = clustering, improved = clustering;
  plain.push_back(near);
  improved.insert(improved.end(), {{"topk", {"1", "64"}},
                                   {"mass_grad", {"false"}},
                                   {"causal", {"none", "reference", "strict"}},
                                   near});
  return {
      {"full", {}},
      {"local", {{"window", {"1", "256"}, true}, {"kind", {"blocked"}}, {"flange", {"0", "2"}}}},
      {"strided", {{"stride", {"1", "128"}, true}}},
      {"oracle-top", {{"topk", {"1", "33"}}}},
      {"clustered", plain},
      {"i-clustered", improved},
      {"lsh",
       {{"rounds", {"1", "8"}}, {"chunk", {"1"}}, {"buckets", {"2", "128"}}, {"combine", {"mean"}}},
       false},
      {"routing",
       {{"clusters", {"1", "16"}, true},
        {"window", {"1", "256"}, true},
        {"membership", {"top", "balanced", "nearest"}},
        {"share_qk", {"true"}},
        {"causal", {"none", "paper", "strict"}},
        {"queries_in", {"2"}},
        {"self", {"demote", "keep"}},
        {"include_self", {"true"}},
        {"count_eps", {"0", "1e-5"}},
        {"decay", {"0", "1", "0.99"}},
        {"commitment", {"0", "0.25", "1e22"}}},
       false},
      {"cast",
       {{"clusters", {"1", "8"}, true},
        {"size", {"1", "64"}, true},
        {"mode", {"single"}},
        {"activation", {"laplace"}},
        {"heads", {"separate"}},
        {"gate_scale", {"false"}}},
       false}};
}

std::string random_group(std::mt19937& random) {
  static const std::vector<NamedKeys> names = grammar();
  const NamedKeys& mechanism = names[random() % names.size()];
  std::vector<KeyValues> keys = mechanism.keys;
  keys.push_back({"positions", {"rotary", "none"}});
  if (mechanism.relative) keys.back().values.push_back("relative");
  std::string inside;
  for (const KeyValues& key : keys) {
    if (!key.required && random() % 2 == 0) continue;
    const char* const value = key.values[random() % key.values.size()];
    inside += (inside.empty() ? "" : ",") + std::string(key.key) + "=" + value;
  }
  return mechanism.name + (inside.empty() ? "" : "(" + inside + ")");
}

TEST(Spec, RandomSpecsPrintAsTheyWereRead) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const int groups = 1 + static_cast<int>(random() % 3);
    std::string text;
    for (int group = 0; group < groups; ++group) {
      if (groups > 1) text += (group ? "+" : "") + std::to_string(1 + random() % 16) + "*";
      text += random_group(random);
    }
    ASSERT_EQ(refusal_of(text), "no error") << text;
    EXPECT_EQ(AttentionSpec::parse(text).to_string(), text);
  }
}

// For any text the parser returns or throws Error; an accepted spec can be printed and read back.
void expect_no_surprise(const std::string& text) {
  try {
    const std::string printed = AttentionSpec::parse(text).to_string();
    EXPECT_EQ(AttentionSpec::parse(printed).to_string(), printed);
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

TEST(Spec, RandomBytesGiveErrorsOnly) {
  std::mt19937 random(2);
  for (int round = 0; round < 3000; ++round) {
    std::string text(random() % 40, ' ');
    for (char& c : text) c = static_cast<char>(random() % 256);
    expect_no_surprise(text);
  }
}

TEST(Spec, RandomChangesOfGoodSpecsGiveErrorsOrSpecs) {
  const std::string pool = "()*+=,.-_ 0123456789abcdefghijklmnopqrstuvwxyz\n";
  std::mt19937 random(3);
  for (int round = 0; round < 5000; ++round) {
    std::string text = "2*" + random_group(random) + "+3*" + random_group(random);
    for (int change = static_cast<int>(random() % 4); change >= 0; --change) {
      const std::size_t at = random() % text.size();
      const char c = pool[random() % pool.size()];
      switch (random() % 3) {
        case 0:
          text[at] = c;
          break;
        case 1:
          text.insert(at, 1, c);
          break;
        default:
          text.erase(at, 1 + random() % 5);
          break;
      }
      if (text.empty()) text = "+";
    }
    expect_no_surprise(text);
  }
}

}  // namespace
}  // namespace coterie
