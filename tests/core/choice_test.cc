// SPDX-License-Identifier: MIT
// The choice of specs: against all assignments of small random problems, ties, targets that cannot
// be met, verification, and measurements that make no sense.
#include "coterie/choice.h"

#include <gtest/gtest.h>

#include <cmath>

#include "coterie/error.h"
#include "coterie/random.h"

namespace coterie {
namespace {

const std::vector<std::string> kLadder = {"full", "local(window=64)", "clustered(clusters=16)",
                                          "i-clustered(clusters=16)"};
constexpr std::size_t kFull = 0;

using Rungs = std::vector<std::vector<std::size_t>>;

struct Random {
  RandomStream stream;
  std::uint64_t drawn = 0;

  explicit Random(std::uint64_t seed) : stream{seed, RandomUse::data, 0} {}
  std::int64_t below(std::int64_t end) {
    return random_below(stream, drawn++, static_cast<std::uint32_t>(end));
  }
  double number() { return static_cast<double>(below(1000)) / 1000; }
};

// Times are multiples of 1/1000 and errors of all sizes.
LayerMeasurements random_layer(Random& random, bool groups_cost) {
  LayerMeasurements layer;
  layer.units = 1 + random.below(3);
  layer.heads = layer.units * (1 + random.below(2));
  if (random.below(2) == 0)
    for (std::int64_t u = 0; u < layer.units; ++u)
      layer.positions.push_back(random.below(2) == 0 ? Positions::rotary : Positions::none);
  for (std::int64_t u = 0; u < layer.units; ++u)
    for (std::size_t r = 0; r < kLadder.size(); ++r) {
      layer.unit_error.push_back(r == kFull ? 0 : random.number());
      layer.unit_time.push_back(r == kFull ? 1 : 1.2 * random.number());
    }
  for (std::size_t r = 0; r < kLadder.size(); ++r) {
    layer.output_error.push_back(random.below(4) == 0 && r > 1 ? NAN : random.number());
    layer.group_time.push_back(groups_cost ? random.number() : 0);
  }
  if (random.below(2) == 0)
    layer.own_time = (0.5 + random.number()) * static_cast<double>(layer.units);
  return layer;
}

// The model of choice.h, written out.
struct Estimate {
  double error = 0, time = 0;
};

Estimate estimate(const std::vector<LayerMeasurements>& layers, const Rungs& rungs) {
  double squares = 0, time = 0;
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const LayerMeasurements& layer = layers[l];
    const auto units = static_cast<std::size_t>(layer.units);
    const std::size_t R = kLadder.size();
    const auto change = [&](std::size_t r) {
      double sum = 0;
      for (std::size_t u = 0; u < units; ++u) sum += std::pow(layer.unit_error[u * R + r], 2);
      return sum;
    };
    double ratio = 0;
    for (std::size_t r = 1; r < R; ++r)
      if (!std::isnan(layer.output_error[r]) && change(r) > 0)
        ratio = std::max(ratio, std::pow(layer.output_error[r], 2) / change(r));
    double grouped = 0;
    bool own = true;
    for (std::size_t u = 0; u < units; ++u) {
      const std::size_t r = rungs[l][u];
      own = own && r == kFull;
      const bool begins =
          u == 0 || r != rungs[l][u - 1] ||
          (!layer.positions.empty() && layer.positions[u] != layer.positions[u - 1]);
      grouped += layer.unit_time[u * R + r] + (begins ? layer.group_time[r] : 0);
      if (r == kFull) continue;
      const double whole = std::isnan(layer.output_error[r]) ? ratio * change(r)
                                                             : std::pow(layer.output_error[r], 2);
      squares += change(r) > 0 ? whole * std::pow(layer.unit_error[u * R + r], 2) / change(r)
                               : whole / static_cast<double>(units);
    }
    time += own && !std::isnan(layer.own_time) ? layer.own_time : grouped;
  }
  return {std::sqrt(squares), time};
}

// The least time of all assignments with an error of at most `target`.
double least_time(const std::vector<LayerMeasurements>& layers, double target) {
  Rungs rungs;
  std::size_t units = 0;
  for (const LayerMeasurements& layer : layers) {
    rungs.emplace_back(static_cast<std::size_t>(layer.units), 0);
    units += rungs.back().size();
  }
  double least = INFINITY;
  const auto all = static_cast<std::uint64_t>(std::pow(kLadder.size(), units));
  for (std::uint64_t number = 0; number < all; ++number) {
    std::uint64_t rest = number;
    for (auto& layer : rungs)
      for (std::size_t& rung : layer) {
        rung = rest % kLadder.size();
        rest /= kLadder.size();
      }
    const Estimate found = estimate(layers, rungs);
    if (found.error <= target) least = std::min(least, found.time);
  }
  return least;
}

std::vector<LayerMeasurements> random_layers(Random& random, bool groups_cost) {
  std::vector<LayerMeasurements> layers;
  for (std::int64_t l = 0, count = 1 + random.below(2); l < count; ++l)
    layers.push_back(random_layer(random, groups_cost));
  return layers;
}

TEST(Choice, IsTheCheapestOfAllAssignments) {
  int better_than_uniform = 0, with_room = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const auto layers = random_layers(random, seed % 2 == 0);
    const double target = random.number() + 0.01;
    const Choice choice = choose_specs(kLadder, layers, target);
    const Estimate own = estimate(layers, choice.rungs);
    EXPECT_NEAR(choice.error, own.error, 1e-12);
    EXPECT_NEAR(choice.time, own.time, 1e-12);
    EXPECT_LE(choice.error, target * (1 + 1e-12));
    EXPECT_GE(choice.time, least_time(layers, target * (1 + 1e-12)) - 1e-12);
    EXPECT_LE(choice.time, least_time(layers, std::sqrt(31.0 / 32) * target) + 1e-12);
    EXPECT_LE(choice.time, choice.uniform_time);
    EXPECT_LE(choice.uniform_time, choice.full_time);
    EXPECT_LE(choice.uniform_error, target);
    better_than_uniform += choice.time < choice.uniform_time;
    with_room += choice.time > least_time(layers, target) + 1e-12;
  }
  EXPECT_GT(better_than_uniform, 100);
  EXPECT_LT(with_room, 10);  // rounding rarely matters
}

TEST(Choice, UniformIsTheCheapestSingleRung) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Random random(seed);
    const auto layers = random_layers(random, true);
    const Choice choice = choose_specs(kLadder, layers, 0.8);
    double least = INFINITY;
    for (std::size_t r = 0; r < kLadder.size(); ++r) {
      Rungs same;
      for (const auto& layer : layers) same.emplace_back(layer.units, r);
      const Estimate found = estimate(layers, same);
      if (found.error <= 0.8) least = std::min(least, found.time);
    }
    EXPECT_NEAR(choice.uniform_time, least, 1e-12);
  }
}

// One layer of four heads: local is wrong in heads 0 and 3, clustered in head 2.
LayerMeasurements four_heads() {
  LayerMeasurements layer;
  layer.heads = layer.units = 4;
  layer.unit_error = {0, 3, 1, 1, 0, 0, 1, 1, 0, 0, 9, 9, 0, 3, 1, 1};
  layer.output_error = {0, NAN, NAN, NAN};
  layer.output_error[1] =
      std::sqrt(18) / 100;  // 1 of the attention's output is 0.01 of the model's
  for (int u = 0; u < 4; ++u)
    for (const double time : {4.0, 1.0, 2.0, 3.0}) layer.unit_time.push_back(time);
  layer.group_time = {0, 0, 0, 0};
  return layer;
}

TEST(Choice, SpecsAreRunsOfEqualHeads) {
  const Choice choice = choose_specs(kLadder, {four_heads()}, 0.015);
  ASSERT_EQ(choice.layers.size(), 1u);
  EXPECT_EQ(choice.layers[0].to_string(),
            "1*clustered(clusters=16)+2*local(window=64)+1*clustered(clusters=16)");
  EXPECT_NEAR(choice.error, std::sqrt(2.0) / 100, 1e-12);
  EXPECT_EQ(choice.time, 6);
  EXPECT_EQ(choice.full_time, 16);
  EXPECT_EQ(kLadder[choice.uniform], "full");
  AttentionSpec::parse(choice.layers[0].to_string()).head_counts(4);
}

TEST(Choice, GroupsThatCostAreFewer) {
  LayerMeasurements layer = four_heads();
  layer.group_time = {0, 2, 2, 2};
  const Choice choice = choose_specs(kLadder, {layer}, 0.02);
  EXPECT_EQ(choice.layers[0].to_string(), "1*full+2*local(window=64)+1*full");
  layer.group_time = {0, 20, 20, 20};
  const Choice none = choose_specs(kLadder, {layer}, 0.02);
  EXPECT_EQ(none.layers[0].to_string(), "full");
  EXPECT_NE(none.reasons[0][1].find("in a separate group"), std::string::npos)
      << none.reasons[0][1];
}

TEST(Choice, HeadsThatShareKeysStayTogetherAndKeepTheirPositions) {
  LayerMeasurements layer = four_heads();
  layer.heads = 8;
  layer.positions = {Positions::rotary, Positions::rotary, Positions::none, Positions::none};
  const Choice choice = choose_specs(kLadder, {layer}, 0.015);
  EXPECT_EQ(choice.layers[0].to_string(),
            "2*clustered(clusters=16,positions=rotary)+2*local(window=64,positions=rotary)+"
            "2*local(window=64,positions=none)+2*clustered(clusters=16,positions=none)");
  const Choice full = choose_specs(kLadder, {layer}, 0);
  EXPECT_EQ(full.layers[0].to_string(),
            "2*full(positions=rotary)+2*local(window=64,positions=rotary)+"
            "2*local(window=64,positions=none)+2*full(positions=none)");
}

TEST(Choice, OfEqualTimesLessErrorWinsThenTheEarlierRung) {
  LayerMeasurements layer = four_heads();
  std::fill(layer.unit_time.begin(), layer.unit_time.end(), 1.0);
  EXPECT_EQ(choose_specs(kLadder, {layer}, 1).layers[0].to_string(), "full");
  for (int u = 0; u < 4; ++u) layer.unit_time[4 * u] = 2;
  const Choice choice = choose_specs(kLadder, {layer}, 1);
  EXPECT_EQ(choice.rungs, (Rungs{{2, 1, 1, 2}}));
}

TEST(Choice, HeadsWithoutAnotherWayStayFullAndSayWhy) {
  LayerMeasurements layer = four_heads();
  const Choice none = choose_specs(kLadder, {layer}, 1e-6);
  EXPECT_EQ(none.rungs, (Rungs{{0, 1, 1, 0}}));
  EXPECT_NE(none.reasons[0][0].find("is above the target: clustered(clusters=16) alone has 0.01"),
            std::string::npos)
      << none.reasons[0][0];
  EXPECT_EQ(none.reasons[0][1], "");
  layer.own_time = 0.5;  // short sequences
  const Choice full = choose_specs(kLadder, {layer}, 1e6);
  EXPECT_EQ(full.layers[0].to_string(), "full");
  EXPECT_EQ(full.time, 0.5);
  for (const std::string& reason : full.reasons[0])
    EXPECT_EQ(reason, "no spec is faster: local(window=64) takes 1e+03 ms, full 125 ms");
  layer = four_heads();
  layer.unit_error = {0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1};
  layer.output_error = {0, 2, 2, 2};
  const Choice some = choose_specs(kLadder, {layer}, 1.5);
  EXPECT_EQ(some.rungs, (Rungs{{1, 1, 0, 0}}));
  EXPECT_NE(some.reasons[0][3].find("better spent on other heads: local(window=64) would save"),
            std::string::npos)
      << some.reasons[0][3];
}

TEST(Choice, VerificationTightensUntilTheTargetIsMet) {
  for (const double factor : {0.1, 1.0, 3.0, 30.0}) {  // the true error over the estimated one
    SCOPED_TRACE(factor);
    Random random(7);
    std::vector<LayerMeasurements> layers;
    for (int l = 0; l < 6; ++l) layers.push_back(random_layer(random, false));
    int calls = 0;
    const auto verify = [&](const Choice& choice) {
      ++calls;
      return factor * choice.error;
    };
    const Choice choice = choose_verified(kLadder, layers, 0.5, verify);
    EXPECT_LE(choice.verified, 0.5);
    EXPECT_NEAR(choice.verified, factor * choice.error, 1e-12);
    EXPECT_LE(calls, 8);
    // As cheap as with the target that the true error would have had.
    EXPECT_LE(choice.time, 1.1 * choose_specs(kLadder, layers, 0.5 / factor).time);
    EXPECT_GE(choice.time, choose_specs(kLadder, layers, 0.5 / factor * 1.04).time - 1e-12);
  }
}

TEST(Choice, WhatNeverPassesIsFull) {
  const auto never = [](const Choice&) { return 7.0; };
  const Choice choice = choose_verified(kLadder, {four_heads()}, 0.02, never);
  EXPECT_EQ(choice.layers[0].to_string(), "full");
  EXPECT_EQ(choice.verified, 0);
  const Choice exact = choose_verified(kLadder, {four_heads()}, 0, never);
  EXPECT_EQ(exact.layers[0].to_string(), "full");
  EXPECT_THROW(choose_verified(kLadder, {four_heads()}, 1, [](const Choice&) { return NAN; }),
               Error);
  EXPECT_THROW(choose_verified(kLadder, {four_heads()}, 1, never, {}, 0), Error);
}

TEST(Choice, WhatIsNotFasterAsAWholeIsGivenUp) {
  const auto exact = [](const Choice& choice) { return choice.error; };
  const auto is_full = [](const Choice& choice) { return choice.layers[0].to_string() == "full"; };
  // Estimated times are right.
  const Choice right = choose_verified(kLadder, {four_heads()}, 0.02, exact,
                                       [](const Choice& choice) { return 2 + choice.time; });
  EXPECT_EQ(right.rungs, choose_verified(kLadder, {four_heads()}, 0.02, exact).rungs);
  EXPECT_FALSE(is_full(right));
  EXPECT_EQ(right.seconds, 2 + right.time);
  EXPECT_EQ(right.full_seconds, 2 + right.full_time);
  // Whatever is not full costs more than was estimated.
  const auto slow = [&](const Choice& choice) { return is_full(choice) ? 4.0 : 4.5; };
  const Choice none = choose_verified(kLadder, {four_heads()}, 0.02, exact, slow);
  EXPECT_TRUE(is_full(none));
  EXPECT_EQ(none.verified, 0);
  EXPECT_EQ(none.seconds, 4.0);
  for (const std::string& reason : none.reasons[0]) {
    EXPECT_EQ(reason,
              "the whole model is not faster with the chosen specs: 4.5e+03 ms, full 4e+03 ms");
  }
  // One spec in all heads is faster than was estimated.
  const auto uniform = [&](const Choice& choice) {
    return choice.layers[0].to_string() == "i-clustered(clusters=16)" ? 0.5 : 2.0;
  };
  const Choice same = choose_verified(kLadder, {four_heads()}, 0.5, exact, uniform);
  EXPECT_EQ(same.layers[0].to_string(), "i-clustered(clusters=16)");
  EXPECT_EQ(same.seconds, 0.5);
  // A spec that is estimated to be slower is not taken, whatever the time of the model says.
  LayerMeasurements slower = four_heads();
  slower.own_time = 1;
  const Choice full = choose_verified(kLadder, {slower}, 0.5, exact, uniform);
  EXPECT_TRUE(is_full(full));
  EXPECT_NE(full.reasons[0][0].find("no spec is faster"), std::string::npos);
  // Of those that passed, the cheapest by its estimate is slow as a whole.
  Random random(7);
  std::vector<LayerMeasurements> layers;
  for (int l = 0; l < 6; ++l) layers.push_back(random_layer(random, false));
  const auto larger = [](const Choice& choice) { return 3 * choice.error; };
  const double least = choose_verified(kLadder, layers, 0.5, larger).time;
  const auto seconds = [&](const Choice& choice) {
    return choice.time == least ? 1e3 : choice.time;
  };
  const Choice other = choose_verified(kLadder, layers, 0.5, larger, seconds);
  EXPECT_GT(other.time, least);
  EXPECT_LT(other.time, other.full_time);
  EXPECT_LE(other.verified, 0.5);
  EXPECT_THROW(choose_verified(kLadder, {four_heads()}, 0.02, exact,
                               [](const Choice&) { return double{NAN}; }),
               Error);
}

TEST(Choice, RefusesMeasurementsThatMakeNoSense) {
  const auto refuses = [](const std::function<void(LayerMeasurements&)>& change) {
    LayerMeasurements layer = four_heads();
    change(layer);
    EXPECT_THROW(choose_specs(kLadder, {layer}, 1), Error);
  };
  for (const double bad : {-1.0, double{NAN}, double{INFINITY}}) {
    refuses([&](LayerMeasurements& layer) { layer.unit_error[5] = bad; });
    refuses([&](LayerMeasurements& layer) { layer.unit_time[5] = bad; });
    refuses([&](LayerMeasurements& layer) { layer.group_time[1] = bad; });
    EXPECT_THROW(choose_specs(kLadder, {four_heads()}, bad), Error);
  }
  refuses([](LayerMeasurements& layer) { layer.output_error[2] = INFINITY; });
  refuses([](LayerMeasurements& layer) { layer.output_error[1] = NAN; });  // none is left
  refuses([](LayerMeasurements& layer) { layer.own_time = -1; });
  refuses([](LayerMeasurements& layer) { layer.units = 3; });
  refuses([](LayerMeasurements& layer) { layer.units = 0; });
  refuses([](LayerMeasurements& layer) { layer.unit_error.pop_back(); });
  refuses([](LayerMeasurements& layer) { layer.positions.resize(3); });
  EXPECT_THROW(choose_specs(kLadder, {}, 1), Error);
  for (const char* const wrong : {"full", "2*local(window=4)", "local(window=4)+full", "nonsense",
                                  "local(window=64,positions=none)"}) {
    std::vector<std::string> ladder = kLadder;
    ladder[1] = wrong;
    EXPECT_THROW(choose_specs(ladder, {four_heads()}, 1), Error) << wrong;
  }
}

}  // namespace
}  // namespace coterie
