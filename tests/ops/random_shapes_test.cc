// SPDX-License-Identifier: MIT
// Random problems of every mechanism against the specification. Each run takes the same seeds;
// COTERIE_TEST_SEED=n runs the one problem n, COTERIE_TEST_PROBLEMS=n that many.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "cases/problem.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "tests/support/expect.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;

constexpr std::uint64_t kFirstSeed = 1000;
constexpr std::uint64_t kProblems = 360;

// Draws of one problem.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : stream_{seed, RandomUse::data, 555} {}
  std::int64_t below(std::int64_t bound) {
    return random_below(stream_, index_++, static_cast<std::uint32_t>(bound));
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T among(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<std::int64_t>(values.size()))];
  }

 private:
  RandomStream stream_;
  std::uint64_t index_ = 0;
};

// A spec's text, key by key.
class SpecText {
 public:
  explicit SpecText(const char* name) : text_(name) {}
  template <class Value>
  SpecText& add(const char* key, const Value& value) {
    text_ += (first_ ? "(" : ",");
    std::ostringstream number;
    number << std::boolalpha << value;
    text_ += std::string(key) + "=" + number.str();
    first_ = false;
    return *this;
  }
  std::string str() const { return first_ ? text_ : text_ + ")"; }

 private:
  std::string text_;
  bool first_ = true;
};

void draw_clustering(Draw& draw, SpecText& spec) {
  const auto* method = draw.among({"keys", "hamming-keys", "hamming"});
  spec.add("clusters", draw.chance(10) ? draw.between(130, 200) : draw.between(1, 40));
  spec.add("clustering", method);
  if (draw.chance(50)) spec.add("iterations", draw.between(0, 4));
  if (std::string(method) != "keys" && draw.chance(50)) spec.add("bits", draw.between(1, 63));
  if (std::string(method) == "hamming") spec.add("hash_bias", draw.chance(50));
}

void draw_routing(Draw& draw, Case& c) {
  SpecText spec("routing");
  spec.add("clusters", draw.between(1, 12));
  const bool shared = draw.chance(50);
  if (shared) spec.add("share_qk", true);
  const int form = static_cast<int>(draw.below(4));  // top, paper, balanced, strict
  c.causal = form == 1 || form == 3;
  if (form == 1) spec.add("causal", "paper");
  if (form == 2) {
    spec.add("membership", "balanced");
  } else {
    spec.add("window", draw.chance(10) ? draw.between(100, 200) : draw.between(1, 40));
  }
  if (form == 3) spec.add("queries_in", draw.between(1, 3));
  if (form == 3 && !shared) spec.add("include_self", draw.chance(50));
  if (draw.chance(50)) spec.add("self", draw.among({"keep", "demote"}));
  if (form < 2 && draw.chance(30)) spec.add("count_eps", 0);
  c.logit_scale = draw.chance(40);
  c.spec = spec.str();
  if (shared || form == 3) c.S = c.N;
}

void draw_cast(Draw& draw, Case& c) {
  const std::int64_t clusters = draw.between(1, 8);
  SpecText spec("cast");
  const bool single = draw.chance(50);
  const std::int64_t fair = (c.N + clusters - 1) / clusters;
  spec.add("clusters", clusters);
  spec.add("size", single ? fair + draw.below(5) : draw.between(1, 30));
  spec.add("mode", single ? "single" : "topk");
  if (draw.chance(40)) spec.add("activation", "laplace");
  if (draw.chance(40)) spec.add("heads", "separate");
  if (draw.chance(30)) spec.add("gate_scale", false);
  c.spec = spec.str();
  c.S = c.N;
}

void draw_mechanism(Draw& draw, std::int64_t mechanism, Case& c) {
  switch (mechanism) {
    case 0:
      c.spec = "full";
      c.causal = draw.chance(50);
      break;
    case 1: {
      SpecText spec("local");
      spec.add("window", draw.between(1, 40));
      if (draw.chance(50)) spec.add("kind", "blocked").add("flange", draw.below(3));
      c.spec = spec.str();
      c.causal = draw.chance(50);
      break;
    }
    case 2:
      c.spec = SpecText("strided").add("stride", draw.between(1, 20)).str();
      c.causal = draw.chance(50);
      break;
    case 3:
      c.spec =
          SpecText("oracle-top").add("topk", draw.chance(10) ? 150 : draw.between(1, 40)).str();
      c.causal = draw.chance(50);
      break;
    case 4: {
      SpecText spec("clustered");
      draw_clustering(draw, spec);
      c.spec = spec.str();
      break;
    }
    case 5: {
      SpecText spec("i-clustered");
      draw_clustering(draw, spec);
      spec.add("topk", draw.between(1, 40)).add("mass_grad", draw.chance(50));
      c.causal = draw.chance(30);
      if (c.causal) spec.add("causal", "reference");
      c.spec = spec.str();
      break;
    }
    case 6:
      c.spec = SpecText("lsh")
                   .add("rounds", draw.between(1, 3))
                   .add("chunk", draw.between(1, 20))
                   .add("buckets", 2 * draw.between(1, 8))
                   .add("combine", draw.among({"lse", "mean"}))
                   .str();
      c.causal = draw.chance(50);
      c.S = c.N;
      break;
    case 7:
      draw_routing(draw, c);
      break;
    default:
      draw_cast(draw, c);
  }
}

Case draw_case(std::uint64_t seed) {
  Draw draw(seed);
  Case c;
  c.name = "seed_" + std::to_string(seed);
  c.lengths = draw.among({cases::Lengths::none, cases::Lengths::padded, cases::Lengths::packed});
  c.layout = draw.among({cases::Layout::bhnd, cases::Layout::bnhd, cases::Layout::gaps});
  c.dtype = draw.among({DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
  c.data = draw.among({cases::Data::normal, cases::Data::normal, cases::Data::mixture,
                       cases::Data::integers, cases::Data::equal});
  c.B = c.lengths == cases::Lengths::packed ? 1 : draw.between(1, 4);
  c.Hkv = draw.between(1, 2);
  c.H = c.Hkv * draw.between(1, 3);
  const std::int64_t least = c.lengths == cases::Lengths::packed ? 24 : 1;
  c.N = draw.between(least, draw.chance(20) ? 150 : 70);
  c.S = draw.chance(60) ? c.N : draw.between(least, 90);
  if (draw.chance(8)) {  // beyond the tiles of the kernels
    c.B = c.H = c.Hkv = 1;
    c.N = draw.between(130, 300);
    c.S = draw.chance(60) ? c.N : draw.between(130, 300);
  }
  c.Dk = draw.chance(10) ? 129 : draw.between(2, 40);
  if (seed % 9 >= 7) c.Dk = std::max<std::int64_t>(c.Dk, 4);  // two normalised elements are +-1
  c.Dv = draw.chance(50) ? c.Dk : draw.between(1, 40);
  draw_mechanism(draw, static_cast<std::int64_t>(seed % 9), c);
  c.mask = seed % 9 < 4 && draw.chance(30);
  if (draw.chance(30)) c.scale = draw.among({0.05, 0.5, 1.0});
  if (seed % 9 == 7 && c.scale == 0.0) c.scale = 0.3;  // tamer than routing's own
  return c;
}

// Ties that rounding decides, and whose outcomes are too many to try: covariances of tied keys,
// Laplace affinities that round to 1, and normalised integers.
bool has_rounded_ties(const Case& c) {
  const bool tied = c.data == cases::Data::equal || c.data == cases::Data::integers;
  return c.spec.find("laplace") != std::string::npos ||
         (tied && c.spec.find("clustering=keys") != std::string::npos) ||
         (tied && (c.spec.starts_with("routing") || c.spec.starts_with("cast")));
}

std::string describe(const Case& c) {
  std::ostringstream text;
  text << c.spec << " B" << c.B << " H" << c.H << ":" << c.Hkv << " N" << c.N << " S" << c.S << " D"
       << c.Dk << ":" << c.Dv << " " << dtype_name(c.dtype) << (c.causal ? " causal" : "")
       << (c.mask ? " masked" : "") << " lengths " << static_cast<int>(c.lengths) << " layout "
       << static_cast<int>(c.layout) << " data " << static_cast<int>(c.data) << " scale "
       << c.scale;
  return text.str();
}

void check_problem(std::uint64_t seed) {
  const Case c = cases::completed(draw_case(seed));
  SCOPED_TRACE("COTERIE_TEST_SEED=" + std::to_string(seed) +
               " repeats this problem: " + describe(c));
  try {
    const Problem problem = cases::make_problem(c, seed);
    Pass run = cases::run_forward(problem);
    test::expect_written(run, false);
    if (!has_rounded_ties(c)) test::expect_selection(problem, run);
    test::expect_forward(problem, run);
    cases::run_backward(problem, run);
    test::expect_written(run, true);
    test::expect_backward(problem, run);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(RandomShapesTest, FollowTheSpecification) {
  set_threads(2);
  if (std::getenv("COTERIE_TEST_SEED") != nullptr) {
    const std::uint64_t seed = number_from("COTERIE_TEST_SEED", 0);
    std::cout << "problem " << seed << ": " << describe(cases::completed(draw_case(seed))) << "\n";
    check_problem(seed);
    return;
  }
  const std::uint64_t count = number_from("COTERIE_TEST_PROBLEMS", kProblems);
  std::cout << "problems " << kFirstSeed << " to " << kFirstSeed + count - 1 << "\n";
  for (std::uint64_t seed = kFirstSeed; seed < kFirstSeed + count; ++seed) check_problem(seed);
}

}  // namespace
}  // namespace coterie
