// SPDX-License-Identifier: MIT
#include "coterie/mechanism.h"

#include <gtest/gtest.h>

#include <limits>

#include "coterie/error.h"
#include "coterie/spec.h"

namespace coterie {
namespace {

Mechanism parse(const char* text) { return AttentionSpec::parse(text).groups.at(0).mechanism; }

std::string error_of(const Mechanism& mechanism, bool causal) {
  try {
    resolve(mechanism, causal);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string error_of(const char* text, bool causal) { return error_of(parse(text), causal); }

TEST(Mechanism, HasTheNameOfTheSpec) {
  EXPECT_STREQ(mechanism_name(FullParams{}), "full");
  EXPECT_STREQ(mechanism_name(LocalParams{}), "local");
  EXPECT_STREQ(mechanism_name(StridedParams{}), "strided");
  EXPECT_STREQ(mechanism_name(OracleTopParams{}), "oracle-top");
  EXPECT_STREQ(mechanism_name(ClusteredParams{}), "clustered");
  EXPECT_STREQ(mechanism_name(ImprovedClusteredParams{}), "i-clustered");
  EXPECT_STREQ(mechanism_name(LshParams{}), "lsh");
  EXPECT_STREQ(mechanism_name(RoutingParams{}), "routing");
  EXPECT_STREQ(mechanism_name(CastParams{}), "cast");
}

TEST(Mechanism, IterationsFollowTheClustering) {
  const auto iterations = [](const char* text) {
    return std::get<ClusteredParams>(resolve(parse(text), false)).clustering.iterations;
  };
  EXPECT_EQ(iterations("clustered(clusters=3)"), 1);
  EXPECT_EQ(iterations("clustered(clusters=3,clustering=hamming-keys)"), 3);
  EXPECT_EQ(iterations("clustered(clusters=3,clustering=hamming)"), 10);
  EXPECT_EQ(iterations("clustered(clusters=3,clustering=hamming,iterations=0)"), 0);
}

TEST(Mechanism, PositionalMechanismsAreCausalWithoutLeaking) {
  for (const char* const text : {"full", "local(window=3)", "strided(stride=3)", "oracle-top"}) {
    EXPECT_EQ(resolve_causality(parse(text), false), Causality::none) << text;
    EXPECT_EQ(resolve_causality(parse(text), true), Causality::strict) << text;
    EXPECT_FALSE(leaks_future(parse(text), true)) << text;
    EXPECT_EQ(error_of(text, true), "no error");
  }
}

TEST(Mechanism, ClusteredAndCastHaveNoCausalForm) {
  EXPECT_EQ(error_of("clustered(clusters=3)", true),
            "[clustered] there is no causal form; got causal inputs");
  EXPECT_EQ(error_of("cast(clusters=3,size=4)", true),
            "[cast] there is no causal form; got causal inputs");
  EXPECT_EQ(error_of("clustered(clusters=3)", false), "no error");
  EXPECT_EQ(error_of("cast(clusters=3,size=4)", false), "no error");
}

TEST(Mechanism, LshLeaksWhenCausal) {
  EXPECT_TRUE(leaks_future(LshParams{}, true));
  EXPECT_FALSE(leaks_future(LshParams{}, false));
  EXPECT_EQ(resolve_causality(LshParams{}, true), Causality::leaking);
  EXPECT_EQ(resolve_causality(LshParams{}, false), Causality::none);
}

TEST(Mechanism, ImprovedClusteredHasTheReferenceFormOnly) {
  const char* const unavailable =
      "[i-clustered] causal=strict is not available yet; use causal=reference (its selection sees "
      "the future) or routing(causal=strict)";
  EXPECT_EQ(error_of("i-clustered(clusters=3)", true), unavailable);
  EXPECT_EQ(error_of("i-clustered(clusters=3,causal=strict)", false), unavailable);
  EXPECT_EQ(error_of("i-clustered(clusters=3,causal=none)", true),
            "[i-clustered] causal=none takes inputs that are not causal; got causal inputs");
  const Mechanism reference = parse("i-clustered(clusters=3,causal=reference)");
  for (const bool causal : {false, true}) {
    EXPECT_EQ(resolve_causality(reference, causal), Causality::leaking);
    EXPECT_TRUE(leaks_future(reference, causal));
  }
  const auto params =
      std::get<ImprovedClusteredParams>(resolve(parse("i-clustered(clusters=3)"), false));
  EXPECT_EQ(params.causal, Causality::none);
  EXPECT_FALSE(leaks_future(params, false));
}

RoutingParams routing(const char* text, bool causal) {
  return std::get<RoutingParams>(resolve(parse(text), causal));
}

TEST(Mechanism, RoutingIsStrictWhenCausal) {
  const RoutingParams open = routing("routing(clusters=3,window=4)", false);
  EXPECT_EQ(open.causal, Causality::none);
  EXPECT_EQ(open.membership, Membership::top);
  EXPECT_EQ(open.self, SelfAttention::keep);
  const RoutingParams strict = routing("routing(clusters=3,window=4)", true);
  EXPECT_EQ(strict.causal, Causality::strict);
  EXPECT_EQ(strict.membership, Membership::nearest);
  EXPECT_FALSE(leaks_future(strict, true));
}

TEST(Mechanism, NamedCausalFormsHoldWhateverTheInputsSay) {
  for (const bool causal : {false, true}) {
    const RoutingParams paper = routing("routing(clusters=3,window=4,causal=paper)", causal);
    EXPECT_EQ(paper.causal, Causality::leaking);
    EXPECT_EQ(paper.membership, Membership::top);
    EXPECT_TRUE(leaks_future(paper, causal));
    EXPECT_EQ(routing("routing(clusters=3,window=4,causal=strict)", causal).membership,
              Membership::nearest);
  }
}

TEST(Mechanism, SelfIsDemotedWithSharedQueriesAndKeys) {
  EXPECT_EQ(routing("routing(clusters=3,window=4,share_qk=true)", false).self,
            SelfAttention::demote);
  EXPECT_EQ(routing("routing(clusters=3,window=4,share_qk=true,self=keep)", false).self,
            SelfAttention::keep);
  EXPECT_EQ(routing("routing(clusters=3,window=4,self=demote)", true).self, SelfAttention::demote);
}

TEST(Mechanism, RoutingRefusesContradictions) {
  struct Case {
    const char* text;
    bool causal;
    const char* part;
  };
  const Case cases[] = {
      {"routing(clusters=3,window=4,causal=none)", true,
       "causal=none takes inputs that are not causal"},
      {"routing(clusters=3,window=4,membership=top)", true,
       "causal=strict needs membership=nearest"},
      {"routing(clusters=3,window=4,membership=top,causal=strict)", false,
       "causal=strict needs membership=nearest"},
      {"routing(clusters=3,window=4,membership=nearest)", false,
       "membership=nearest needs causal=strict"},
      {"routing(clusters=3,window=4,membership=nearest,causal=paper)", true, "got causal=paper"},
      {"routing(clusters=3,membership=balanced)", true, "no causal form; got causal=strict"},
      {"routing(clusters=3,membership=balanced,causal=paper)", false, "got causal=paper"},
      {"routing(clusters=3,membership=balanced,window=4)", false, "takes no window"},
      {"routing(clusters=3,window=4,queries_in=2)", false, "queries_in"},
      {"routing(clusters=3,window=4,include_self=true)", false, "include_self needs causal=strict"},
      {"routing(clusters=3,window=4,include_self=true,share_qk=true)", true,
       "include_self needs share_qk=false"},
      {"routing(clusters=3,window=4,count_eps=0)", true, "count_eps needs membership=top"},
  };
  for (const Case& c : cases) {
    const std::string error = error_of(c.text, c.causal);
    EXPECT_EQ(error.substr(0, 10), "[routing] ") << c.text;
    EXPECT_NE(error.find(c.part), std::string::npos) << c.text << ": " << error;
  }
  EXPECT_EQ(error_of("routing(clusters=3,membership=balanced)", false), "no error");
  EXPECT_EQ(error_of("routing(clusters=3,window=4,queries_in=2,include_self=true)", true),
            "no error");
}

TEST(Mechanism, ParametersWithoutEffectAreRefused) {
  EXPECT_EQ(error_of("local(window=3,flange=2)", false),
            "[local] flange needs kind=blocked; got flange=2 with kind=sliding");
  EXPECT_EQ(error_of("local(window=3,flange=2,kind=blocked)", false), "no error");
  EXPECT_EQ(error_of("clustered(clusters=3,bits=32)", false),
            "[clustered] bits needs clustering=hamming-keys or hamming; got bits=32 "
            "with clustering=keys");
  EXPECT_EQ(error_of("clustered(clusters=3,bits=32,clustering=hamming-keys)", false), "no error");
  EXPECT_NE(error_of("i-clustered(clusters=3,hash_bias=false,clustering=hamming-keys)", false),
            "no error");
}

TEST(Mechanism, ParametersBuiltByHandAreCheckedToo) {
  EXPECT_EQ(error_of(LocalParams{}, false),
            "[local] window is required for local: an integer from 1 to 2147483647; got none");
  EXPECT_EQ(error_of(LocalParams{.window = -1}, false),
            "[local] window of local must be an integer from 1 to 2147483647; got -1");
  EXPECT_NE(error_of(OracleTopParams{.topk = 0}, false), "no error");
  EXPECT_NE(error_of(LshParams{.buckets = 3}, false), "no error");
  EXPECT_NE(error_of(ClusteredParams{{.clusters = 3, .iterations = -2}}, false), "no error");
  EXPECT_NE(error_of(ClusteredParams{{.clusters = 1ll << 40}}, false), "no error");
  EXPECT_NE(error_of(RoutingParams{.clusters = 3, .window = -4, .membership = Membership::balanced},
                     false),
            "no error");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(error_of(RoutingParams{.clusters = 3, .window = 4, .decay = nan}, false), "no error");
}

TEST(Mechanism, ResolvingTwiceChangesNothing) {
  for (const char* const text :
       {"full", "local(window=3)", "lsh", "oracle-top",
        "routing(clusters=3,window=4,share_qk=true)", "i-clustered(clusters=3,causal=reference)"}) {
    for (const bool causal : {false, true}) {
      const Mechanism once = resolve(parse(text), causal);
      EXPECT_EQ(to_string(resolve(once, causal)), to_string(once)) << text;
    }
  }
}

}  // namespace
}  // namespace coterie
