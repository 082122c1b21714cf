// SPDX-License-Identifier: MIT
// Equalities between mechanisms that hold for any data in exact arithmetic. "Equal" means within
// 1e-12 here: a few thousand roundings of values of size 1.
#include <gtest/gtest.h>

#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

using cases::Case;
using cases::Lengths;

constexpr double kExact = 1e-12;

Case base(const char* spec) {
  return {.name = "",
          .spec = spec,
          .B = 4,
          .H = 4,
          .Hkv = 2,
          .N = 13,
          .S = 13,
          .Dk = 5,
          .Dv = 3,
          .lengths = Lengths::padded,
          .dtype = DType::f64};
}

Case base(const char* spec, std::int64_t queries, std::int64_t keys) {
  return cross(base(spec), queries, keys);
}

// The same inputs with another mechanism.
std::vector<double> attend_as(const Case& c, const char* spec) {
  Case other = c;
  other.spec = spec;
  return make_selected(other).attend();
}

void expect_equal(const Case& a, const char* spec) {
  EXPECT_LT(largest_difference(make_selected(a).attend(), attend_as(a, spec)), kExact) << a.spec;
}

// Normalises rows to zero mean and unit variance.
void normalise(const TensorView& x) {
  std::vector<double> values = read_values(x);
  const std::int64_t dim = x.size(3);
  for (std::size_t row = 0; row < values.size(); row += dim) {
    double mean = 0.0, variance = 0.0;
    for (std::int64_t d = 0; d < dim; ++d) mean += values[row + d] / dim;
    for (std::int64_t d = 0; d < dim; ++d) variance += std::pow(values[row + d] - mean, 2) / dim;
    for (std::int64_t d = 0; d < dim; ++d)
      values[row + d] = (values[row + d] - mean) / std::sqrt(variance + 1e-6);
  }
  write_values(x, values);
}

// Checks the sum of each row of weights that is not 0.
void expect_row_sums(const Case& c, double expected) {
  const Selected selected = make_selected(c);
  const std::vector<double> weights = selected.weights();
  std::int64_t rows = 0;
  for (std::size_t row = 0; row < weights.size(); row += c.S) {
    double sum = 0.0, size = 0.0;
    for (std::int64_t j = 0; j < c.S; ++j) sum += weights[row + j], size += weights[row + j] != 0;
    if (size == 0) continue;
    EXPECT_NEAR(sum, expected, kExact) << c.spec << " row " << row / c.S;
    ++rows;
  }
  EXPECT_GT(rows, 0) << c.spec;
}

TEST(InvariantTest, RowsSumToOne) {
  for (const char* spec :
       {"full", "local(window=3)", "strided(stride=3)", "oracle-top(topk=3)",
        "clustered(clusters=3)", "i-clustered(clusters=3,topk=3)", "clustered(clusters=3,near=2)",
        "i-clustered(clusters=3,topk=3,near=2)", "lsh(rounds=3,chunk=3,buckets=4)",
        "i-clustered(clusters=3,topk=3,causal=reference)",
        "lsh(rounds=3,chunk=3,buckets=4,combine=mean)", "routing(clusters=3,membership=balanced)",
        "routing(clusters=3,window=3,causal=strict)", "cast(clusters=3,size=3)",
        "cast(clusters=9,size=9,mode=single)"})
    expect_row_sums(base(spec), 1.0);
}

TEST(InvariantTest, FullBudgetsAreFullAttention) {
  for (const char* spec :
       {"clustered(clusters=13)", "clustered(clusters=40,clustering=hamming)",
        "clustered(clusters=13,clustering=hamming-keys)", "i-clustered(clusters=3,topk=13)",
        "i-clustered(clusters=3,topk=50,clustering=hamming)",
        "i-clustered(clusters=3,topk=50,clustering=hamming-keys)", "oracle-top(topk=11)",
        "local(window=60)", "local(window=20,kind=blocked)", "strided(stride=1)"})
    expect_equal(base(spec, 13, 11), "full");
  for (const char* spec : {"oracle-top(topk=13)", "local(window=13)",
                           "local(window=20,kind=blocked)", "strided(stride=1)"})
    expect_equal(causal(base(spec)), "full");
}

TEST(InvariantTest, NearWithAFullBudgetIsFullAttention) {
  for (const char* spec :
       {"clustered(clusters=3,near=13)", "clustered(clusters=3,near=7)",
        "i-clustered(clusters=3,topk=2,near=50)", "clustered(clusters=13,near=2)",
        "i-clustered(clusters=3,topk=13,near=1)", "i-clustered(clusters=13,topk=2,near=1)"})
    expect_equal(base(spec), "full");
}

TEST(InvariantTest, EqualQueriesMakeNearExact) {
  Case c = base("clustered(clusters=3,near=2)");
  c.data = cases::Data::equal;
  expect_equal(c, "full");
}

// |row - exact row| <= 2 E_i / Z_i in L1, with E_i the error of the keys' exponentials and Z_i the
// exact sum.
TEST(InvariantTest, NearRowsAreBoundedByTheErrorOfFarKeys) {
  for (const char* spec :
       {"clustered(clusters=3,near=2)", "i-clustered(clusters=3,topk=3,near=1)"}) {
    Case c = base(spec), plain = c;
    c.lengths = plain.lengths = Lengths::none;
    plain.spec = "full";
    const Selected selected = make_selected(c);
    const std::vector<double> rows = selected.weights(), exact = make_selected(plain).weights();
    double largest = 0.0;
    for (std::size_t row = 0; row < exact.size(); row += c.S) {
      // Key i itself is near, so its exponential is exact and gives both sums.
      const std::size_t own = row + row / c.S % c.N;
      double error = 0.0, distance = 0.0;
      for (std::size_t j = row; j < row + c.S; ++j) {
        error += std::abs(rows[j] / rows[own] - exact[j] / exact[own]) * exact[own];
        distance += std::abs(rows[j] - exact[j]);
      }
      EXPECT_LE(distance, 2 * error + kExact) << spec << " row " << row / c.S;
      largest = std::max(largest, distance);
    }
    EXPECT_GT(largest, 0.01) << spec;
  }
}

TEST(InvariantTest, EqualQueriesMakeClusteredExact) {
  Case c = base("clustered(clusters=3)", 13, 11);
  c.data = cases::Data::equal;
  expect_equal(c, "full");
}

// In L1, a row of i-clustered is at most as far from the exact row as the row of clustered.
TEST(InvariantTest, TopKeysOnlyImproveRows) {
  const Case c = base("i-clustered(clusters=3,topk=3)", 13, 11);
  Case coarse = c, exact = c;
  coarse.spec = "clustered(clusters=3)";
  exact.spec = "full";
  const std::vector<double> improved = make_selected(c).weights();
  const std::vector<double> shared = make_selected(coarse).weights();
  const std::vector<double> full = make_selected(exact).weights();
  double gain = 0.0;
  for (std::size_t row = 0; row < full.size(); row += c.S) {
    double improved_error = 0.0, shared_error = 0.0;
    for (std::int64_t j = 0; j < c.S; ++j) {
      improved_error += std::abs(improved[row + j] - full[row + j]);
      shared_error += std::abs(shared[row + j] - full[row + j]);
    }
    EXPECT_LE(improved_error, shared_error + kExact);
    gain += shared_error - improved_error;
  }
  EXPECT_GT(gain, 0.1);
}

TEST(InvariantTest, OneRoutingClusterIsFullAttentionOnNormalisedRows) {
  Selected full = make_selected(base("full"));
  normalise(full.problem.inputs.q);
  normalise(full.problem.inputs.k);
  full.problem.inputs.scale = 1.0;
  const std::vector<double> balanced =
      attend_as(base("full"), "routing(clusters=1,membership=balanced)");
  EXPECT_LT(largest_difference(balanced, full.attend()), kExact);

  std::vector<double> top = attend_as(base("full"), "routing(clusters=1,window=13)");
  for (double& value : top) value *= 1.01;
  EXPECT_LT(largest_difference(top, full.attend()), kExact);

  full.problem.inputs.causal = true;
  for (const char* strict : {"routing(clusters=1,window=13,causal=strict)",
                             "routing(clusters=3,window=13,causal=strict,queries_in=3)"})
    EXPECT_LT(largest_difference(attend_as(base("full"), strict), full.attend()), kExact) << strict;
}

TEST(InvariantTest, OneStrictRoutingClusterIsASlidingWindow) {
  Selected local = make_selected(causal(base("local(window=4)")));
  normalise(local.problem.inputs.q);
  normalise(local.problem.inputs.k);
  local.problem.inputs.scale = 1.0;
  EXPECT_LT(
      largest_difference(attend_as(base("full"), "routing(clusters=1,window=4,causal=strict)"),
                         local.attend()),
      kExact);
}

TEST(InvariantTest, OneCastClusterIsFullAttention) {
  expect_equal(base("cast(clusters=1,size=13)"), "full");
  expect_equal(base("cast(clusters=1,size=20,mode=single,heads=separate)"), "full");
}

TEST(InvariantTest, OneLshChunkIsFullAttentionWithUnitKeys) {
  Case c = base("lsh(rounds=1,chunk=13,buckets=4,combine=mean)");
  c.Hkv = c.H;
  const std::vector<double> lsh = make_selected(c).attend();
  c.spec = "full";
  Selected full = make_selected(c);
  std::vector<double> keys = read_values(full.problem.inputs.q);
  for (std::size_t row = 0; row < keys.size(); row += c.Dk) {
    double norm = 0.0;
    for (std::int64_t d = 0; d < c.Dk; ++d) norm += keys[row + d] * keys[row + d];
    for (std::int64_t d = 0; d < c.Dk; ++d) keys[row + d] /= std::sqrt(norm);
  }
  write_values(full.problem.inputs.k, keys);
  EXPECT_LT(largest_difference(lsh, full.attend()), kExact);
}

// A key counts once per round that sees it, so three rounds over all keys equal one.
TEST(InvariantTest, RepeatedLshRoundsChangeNothing) {
  expect_equal(base("lsh(rounds=3,chunk=13,buckets=4)"), "lsh(rounds=1,chunk=13,buckets=4)");
}

TEST(InvariantTest, LshSelfIsOnlyAttendedToAlone) {
  const Case c = base("lsh(rounds=2,chunk=3,buckets=4)");
  const std::vector<double> weights = make_selected(c).weights();
  for (std::size_t row = 0; row < weights.size(); row += c.S) {
    const double self = weights[row + row / c.S % c.N];
    EXPECT_TRUE(self == 0.0) << "row " << row / c.S;
  }
  Case alone = c;
  alone.N = alone.S = 1;
  alone.lengths = Lengths::none;
  const Selected one = make_selected(alone);  // a zero query then has a zero key, not NaN
  for (double weight : one.weights()) EXPECT_EQ(weight, 1.0);
  fill(one.problem.inputs.q, [](std::int64_t) { return 0.0; });
  for (double gradient : one.backward().dq) EXPECT_EQ(gradient, 0.0);
}

// A query sees the last `window` tokens of its cluster in sorted order, including itself.
TEST(InvariantTest, StrictRoutingFollowsItsSortedForm) {
  Case c = base("routing(clusters=3,window=3,causal=strict,share_qk=true,self=keep)");
  c.B = c.H = c.Hkv = 1;
  c.N = c.S = 31;
  c.lengths = Lengths::none;
  const Selected selected = make_selected(c);
  const std::vector<double> weights = selected.weights();
  const std::vector<int> order = indices_of(selected.saved[3]),
                         offsets = indices_of(selected.saved[4]);
  std::vector<int> seen(weights.size(), 0);
  for (int cluster = 0; cluster < 3; ++cluster)
    for (int slot = offsets[cluster]; slot < offsets[cluster + 1]; ++slot)
      for (int other = std::max(offsets[cluster], slot - 2); other <= slot; ++other)
        seen[order[slot] * c.S + order[other]] = 1;
  for (std::size_t e = 0; e < weights.size(); ++e) EXPECT_EQ(weights[e] != 0.0, seen[e] == 1) << e;
}

// Changes q, k and v after position `last`; returns whether outputs up to it keep their bits.
bool ignores_the_future(const Case& c, std::int64_t last) {
  Selected selected = make_selected(c);
  const std::vector<double> before = selected.attend();
  const AttentionInputs& inputs = selected.problem.inputs;
  for (const TensorView& tensor : {inputs.q, inputs.k, inputs.v}) {
    if (!tensor.present()) continue;
    const TensorView future = tensor.narrowed(2, last + 1, tensor.size(2) - last - 1);
    fill(future, [](std::int64_t i) { return std::sin(static_cast<double>(7 * i)) * 5; });
  }
  select_again(selected);
  const std::vector<double> after = selected.attend();
  bool same = true;
  for (std::size_t e = 0; e < after.size(); ++e)
    if (static_cast<std::int64_t>(e) / c.Dv % c.N <= last) same &= before[e] == after[e];
  return same;
}

Case unpadded(Case c) {
  c.lengths = Lengths::none;
  return c;
}

TEST(InvariantTest, StrictFormsIgnoreTheFuture) {
  for (const char* spec :
       {"full", "local(window=4)", "local(window=4,kind=blocked)", "strided(stride=2)",
        "oracle-top(topk=3)", "routing(clusters=3,window=2,causal=strict)",
        "routing(clusters=3,window=2,causal=strict,share_qk=true)",
        "routing(clusters=4,window=2,causal=strict,queries_in=2)"})
    for (std::int64_t last : {0, 4, 9})
      EXPECT_TRUE(ignores_the_future(unpadded(causal(base(spec))), last)) << spec << last;
}

TEST(InvariantTest, LeakingFormsDoNot) {
  for (const char* spec : {"i-clustered(clusters=3,topk=4,causal=reference)",
                           "routing(clusters=3,window=4,causal=paper)"})
    EXPECT_FALSE(ignores_the_future(unpadded(causal(base(spec))), 9)) << spec;
}

// Items are independent: an item of a packed batch gives the same result as alone. Only mechanisms
// without random numbers, because these depend on the item's index.
TEST(InvariantTest, PackedItemsAreIndependent) {
  for (const char* spec : {"full", "routing(clusters=3,window=3)", "cast(clusters=3,size=3)",
                           "routing(clusters=2,window=3,causal=strict,queries_in=2)"}) {
    Case c = base(spec);
    c.B = 1;
    c.N = c.S = 24;
    c.lengths = Lengths::packed;
    Selected packed = make_selected(c);
    const std::vector<double> together = packed.attend();
    const std::vector<int> ends = indices_of(packed.problem.inputs.q_sequences.cu_seqlens);
    const std::int64_t begin = ends[ends.size() - 2], length = ends.back() - begin;
    ASSERT_GT(length, 3);
    c.lengths = Lengths::none;
    Selected alone = make_selected(c);
    AttentionInputs& inputs = alone.problem.inputs;
    for (TensorView* tensor : {&inputs.q, &inputs.k, &inputs.v})
      *tensor = tensor->narrowed(2, begin, length);
    HostTensor gate(DType::f64, {1, length});
    if (inputs.gate.present()) {
      write_values(gate, read_values(inputs.gate.narrowed(1, begin, length)));
      inputs.gate = gate;
    }
    allocate_saved(alone);
    select_again(alone);
    const std::vector<double> separate = alone.attend();
    for (std::int64_t h = 0; h < c.H; ++h)
      for (std::int64_t e = 0; e < length * c.Dv; ++e)
        EXPECT_EQ(together[(h * 24 + begin) * c.Dv + e], separate[h * length * c.Dv + e]) << spec;
  }
}

}  // namespace
}  // namespace coterie::ref
