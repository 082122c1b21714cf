// SPDX-License-Identifier: MIT
// Attention over lists is full attention under a mask: each test writes the mask that its lists
// stand for and lets the specification of full attention judge.
#include "coterie/attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "coterie/runtime.h"
#include "ref/ref.h"
#include "tests/support/expect.h"
#include "tests/support/magnitude.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using test::error_of;
using test::Expected;
using test::follows_rule;
using test::labels_below;

using Index = std::int64_t;

struct Sizes {
  Index B = 2, H = 4, Hkv = 2, N = 70, S = 70, Dk = 16, Dv = 24;
};

// Whether query i of head h sees key j, in batch entry b.
using Admits = std::function<bool(Index b, Index h, Index i, Index j)>;

struct Problem {
  Sizes n;
  HostTensor q, k, v, grad_out;
  AttentionInputs inputs;
  std::vector<HostTensor> keep;

  explicit Problem(const Sizes& sizes, DType dtype = DType::f32, std::uint64_t seed = 1)
      : n(sizes),
        q(test::normals(dtype, {n.B, n.H, n.N, n.Dk}, seed)),
        k(test::normals(dtype, {n.B, n.Hkv, n.S, n.Dk}, seed + 1)),
        v(test::normals(dtype, {n.B, n.Hkv, n.S, n.Dv}, seed + 2)),
        grad_out(test::normals(dtype, {n.B, n.H, n.N, n.Dv}, seed + 3)) {
    inputs.q = q;
    inputs.k = k;
    inputs.v = v;
  }

  void set_lengths(const std::vector<double>& lengths) {
    keep.push_back(test::ints(lengths));
    inputs.q_sequences.lengths = inputs.k_sequences.lengths = keep.back();
  }

  Index length(Index b) const { return cases::used_rows(inputs.q_sequences, b, n.N); }
};

// lse of every row by the formula, in T.
template <class T>
std::vector<double> row_lse(const Problem& p, const Admits& admits) {
  const std::vector<double> q = read_values(p.q), k = read_values(p.k);
  std::vector<double> result;
  const T scale = T(1) / std::sqrt(T(p.n.Dk));
  for (Index b = 0; b < p.n.B; ++b)
    for (Index h = 0; h < p.n.H; ++h)
      for (Index i = 0; i < p.n.N; ++i) {
        std::vector<T> logits;
        for (Index j = 0; j < p.n.S; ++j) {
          if (!admits(b, h, i, j)) continue;
          const Index kv = h / (p.n.H / p.n.Hkv);
          T sum = 0;
          for (Index d = 0; d < p.n.Dk; ++d) {
            sum += T(q[((b * p.n.H + h) * p.n.N + i) * p.n.Dk + d]) *
                   T(k[((b * p.n.Hkv + kv) * p.n.S + j) * p.n.Dk + d]);
          }
          logits.push_back(sum * scale);
        }
        T largest = -std::numeric_limits<T>::infinity(), total = 0;
        for (T logit : logits) largest = std::max(largest, logit);
        for (T logit : logits) total += std::exp(logit - largest);
        result.push_back(logits.empty() ? largest : largest + std::log(total));
      }
  return result;
}

using Forward = std::function<void(const TensorView& out, const TensorView& lse)>;
using Backward = std::function<void(const AttentionResult& result, const AttentionGradients& g)>;

// Runs both passes and compares with full attention under the mask.
void expect_masked_attention(Problem& p, const Admits& given, const Forward& forward,
                             const Backward& backward) {
  const Admits admits = [&](Index b, Index h, Index i, Index j) {
    const Index keys = cases::used_rows(p.inputs.k_sequences, b, p.n.S);
    return i < p.length(b) && j < keys && given(b, h, i, j);
  };
  const DType dtype = p.q.view().dtype, accumulator = accumulator_dtype(dtype);
  std::vector<HostTensor> storage;
  AttentionResult result;
  result.out = cases::new_tensor(storage, dtype, {p.n.B, p.n.H, p.n.N, p.n.Dv});
  result.saved = {cases::new_tensor(storage, accumulator, {p.n.B, p.n.H, p.n.N})};
  forward(result.out, result.saved[0]);

  HostTensor mask(DType::u8, {p.n.B, p.n.H, p.n.N, p.n.S});
  fill(mask, [&](Index at) {
    const Index j = at % p.n.S, i = at / p.n.S % p.n.N, h = at / p.n.S / p.n.N % p.n.H;
    return admits(at / p.n.S / p.n.N / p.n.H, h, i, j) ? 1.0 : 0.0;
  });
  cases::Problem masked;
  masked.mechanism = FullParams{};
  masked.inputs = p.inputs;
  masked.inputs.causal = false;  // the mask says it
  masked.inputs.mask = mask;
  masked.grad_out = p.grad_out;
  EXPECT_TRUE(follows_rule("out", result.out, test::expected_out(masked, {})));
  const std::vector<double> exact = row_lse<double>(p, admits);
  double magnitude = 0;
  for (double value : exact) {
    if (std::isfinite(value)) magnitude = std::max(magnitude, std::abs(value));
  }
  EXPECT_TRUE(
      follows_rule("lse", result.saved[0],
                   {.exact = exact, .naive = row_lse<float>(p, admits), .magnitude = magnitude}));

  cases::Pass run;
  run.gradients.dq = cases::new_tensor(storage, dtype, {p.n.B, p.n.H, p.n.N, p.n.Dk});
  run.gradients.dk = cases::new_tensor(storage, dtype, {p.n.B, p.n.Hkv, p.n.S, p.n.Dk});
  run.gradients.dv = cases::new_tensor(storage, dtype, {p.n.B, p.n.Hkv, p.n.S, p.n.Dv});
  backward(result, run.gradients);
  test::expect_gradients(masked, run, test::expected_gradients(masked, {}));
}

// A workspace of the size asked for.
struct Memory {
  HostTensor tensor;
  explicit Memory(Index bytes) : tensor(DType::u8, {bytes}) {
    fill(tensor, [](Index) { return 255.0; });
  }
  operator Workspace() const {  // NOLINT: a piece of memory is usable as a workspace
    return {.data = tensor.view().data, .bytes = tensor.view().count()};
  }
};

// Clusters of random labels.
struct Clusters {
  HostTensor labels, order, offsets;
  Groups groups;
  std::vector<double> of;  // row-major labels

  Clusters(Index clusters, Index heads, Index rows, const Sizes& n, const Sequences& sequences,
           std::uint64_t seed)
      : labels(labels_below(clusters, {n.B, heads, rows}, seed)),
        order(DType::i32, {n.B, heads, rows}),
        offsets(DType::i32, {n.B, heads, clusters + 1}),
        of(read_values(labels)) {
    groups.order = order;
    groups.offsets = offsets;
    group_by_cluster(labels, sequences, groups);
  }
};

class AttendTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override { force_cpu_isa(GetParam()); }
  void TearDown() override { force_cpu_isa(supported_cpu_isas().back()); }
};

INSTANTIATE_TEST_SUITE_P(Isas, AttendTest, ::testing::ValuesIn(supported_cpu_isas()),
                         [](const auto& isa) { return cpu_isa_name(isa.param); });

void check_banded(Problem& p, Index clusters, Index window) {
  p.inputs.causal = true;
  const Clusters q(clusters, p.n.H, p.n.N, p.n, p.inputs.q_sequences, 5);
  const Clusters k(clusters, p.n.Hkv, p.n.S, p.n, p.inputs.k_sequences, 6);
  const BandedLists lists{.queries = q.groups, .keys = k.groups, .window = window};
  const Memory memory(attend_banded_workspace_bytes(p.inputs, lists));
  const auto key_label = [&](Index b, Index h, Index j) {
    return k.of[(b * p.n.Hkv + h / (p.n.H / p.n.Hkv)) * p.n.S + j];
  };
  const Admits admits = [&](Index b, Index h, Index i, Index j) {
    const double cluster = q.of[(b * p.n.H + h) * p.n.N + i];
    if (j > i || key_label(b, h, j) != cluster) return false;
    Index later = 0;
    for (Index t = j + 1; t <= i; ++t) later += key_label(b, h, t) == cluster ? 1 : 0;
    return later < window;
  };
  expect_masked_attention(
      p, admits,
      [&](const TensorView& out, const TensorView& lse) {
        attend_banded(p.inputs, lists, out, lse, memory);
      },
      [&](const AttentionResult& result, const AttentionGradients& gradients) {
        attend_banded_backward(p.inputs, lists, result, p.grad_out, gradients, memory);
      });
}

TEST_P(AttendTest, BandedListsSeeTheLatestKeysOfTheirCluster) {
  for (Index window : {1, 5, 200}) {
    for (Index clusters : {1, 3, 40}) {
      SCOPED_TRACE(std::to_string(window) + " of " + std::to_string(clusters));
      Problem p({});
      check_banded(p, clusters, window);
    }
  }
}

TEST_P(AttendTest, BandedListsInOtherTypesWithLengths) {
  for (DType dtype : {DType::f64, DType::bf16, DType::f16}) {
    SCOPED_TRACE(dtype_name(dtype));
    Problem p({.B = 3, .N = 65, .S = 65, .Dk = 8}, dtype);
    p.set_lengths({65, 0, 31});
    check_banded(p, 4, 7);
  }
}

void check_shared(Problem& p, Index clusters, Index count, bool causal) {
  p.inputs.causal = causal;
  const Clusters q(clusters, p.n.H, p.n.N, p.n, p.inputs.q_sequences, 7);
  // Keys of a cluster: a random ascending list, shorter for some.
  HostTensor keys(DType::i32, {p.n.B, p.n.H, clusters, count});
  std::vector<std::set<Index>> chosen;
  const RandomStream stream{8, RandomUse::data, 1};
  for (Index row = 0; row < p.n.B * p.n.H * clusters; ++row) {
    std::set<Index> list;
    const Index length = p.length(row / clusters / p.n.H);
    for (Index t = 0; t < count && length > 0; ++t) {
      const auto at = static_cast<std::uint64_t>(row * count + t);
      list.insert(random_below(stream, at, static_cast<std::uint32_t>(length)));
    }
    chosen.push_back(list);
    std::vector<double> padded(list.begin(), list.end());
    padded.resize(static_cast<std::size_t>(count), -1.0);
    std::copy(padded.begin(), padded.end(), keys.data<std::int32_t>() + row * count);
  }
  const SharedLists lists{.queries = q.groups, .keys = keys};
  const Memory memory(attend_shared_workspace_bytes(p.inputs, lists));
  const Admits admits = [&](Index b, Index h, Index i, Index j) {
    const auto cluster = static_cast<Index>(q.of[(b * p.n.H + h) * p.n.N + i]);
    return (!causal || j <= i) && chosen[(b * p.n.H + h) * clusters + cluster].contains(j);
  };
  expect_masked_attention(
      p, admits,
      [&](const TensorView& out, const TensorView& lse) {
        attend_shared(p.inputs, lists, out, lse, memory);
      },
      [&](const AttentionResult& result, const AttentionGradients& gradients) {
        attend_shared_backward(p.inputs, lists, result, p.grad_out, gradients, memory);
      });
}

TEST_P(AttendTest, SharedListsServeAllQueriesOfACluster) {
  for (bool causal : {false, true}) {
    for (Index count : {1, 9, 64}) {
      SCOPED_TRACE(std::to_string(count) + (causal ? " causal" : ""));
      Problem p({});
      check_shared(p, 6, count, causal);
    }
  }
}

TEST_P(AttendTest, SharedListsInOtherTypesWithLengths) {
  for (DType dtype : {DType::f64, DType::bf16, DType::f16}) {
    SCOPED_TRACE(dtype_name(dtype));
    Problem p({.B = 3, .H = 2, .Hkv = 1, .N = 65, .S = 65, .Dk = 8}, dtype);
    p.set_lengths({65, 0, 31});
    check_shared(p, 4, 12, true);
  }
}

// Members: slots stand for queries, so the problem is spelled out slot by slot, with B = 1.
void check_members(DType dtype, bool causal) {
  const Index clusters = 5, wq = 9, wk = 13;
  Problem p({.B = 1, .N = 40, .S = 50}, dtype);
  p.inputs.causal = causal;
  HostTensor queries(DType::i32, {1, p.n.H, clusters, wq}),
      keys(DType::i32, {1, p.n.Hkv, clusters, wk});
  const auto fill_lists = [&](HostTensor& lists, Index width, Index tokens) {
    for (Index row = 0; row < lists.view().count() / width; ++row) {
      std::set<Index> list;  // every token in at most one group: clusters divides tokens
      for (Index t = 0; t < width; ++t) list.insert((row % clusters + clusters * t) % tokens);
      if (row == 1) list.clear();
      std::vector<double> padded(list.begin(), list.end());
      padded.resize(static_cast<std::size_t>(width), -1.0);
      std::copy(padded.begin(), padded.end(), lists.data<std::int32_t>() + row * width);
    }
  };
  fill_lists(queries, wq, p.n.N);
  fill_lists(keys, wk, p.n.S);
  const std::vector<double> slots = read_values(queries), members = read_values(keys);

  // The same as full attention of C * wq queries under a mask.
  Sizes flat = p.n;
  flat.N = clusters * wq;
  Problem spelled(flat, dtype);
  write_values(spelled.k, read_values(p.k));
  write_values(spelled.v, read_values(p.v));
  const std::vector<double> q = read_values(p.q);
  fill(spelled.q, [&](Index at) {
    const Index d = at % p.n.Dk, slot = at / p.n.Dk, h = slot / flat.N;
    const double token = slots[slot];
    return token < 0 ? 0.0 : q[(h * p.n.N + static_cast<Index>(token)) * p.n.Dk + d];
  });
  const Admits admits = [&](Index, Index h, Index i, Index j) {
    const double token = slots[h * flat.N + i];
    if (token < 0) return false;
    const Index row = h / (p.n.H / p.n.Hkv) * clusters + i / wq;
    for (Index t = 0; t < wk; ++t) {
      if (members[row * wk + t] != static_cast<double>(j)) continue;
      return !causal || j <= static_cast<Index>(token) + p.n.S - p.n.N;
    }
    return false;
  };

  const MemberLists lists{.queries = queries, .keys = keys};
  const Memory memory(attend_members_workspace_bytes(p.inputs, lists));
  std::vector<HostTensor> storage;
  const TensorView dq = cases::new_tensor(storage, dtype, {1, p.n.H, p.n.N, p.n.Dk});
  const auto five = [&](const TensorView& tensor) {  // (1, H, C w, ...) as (1, H, C, w, ...)
    HostTensor& copy = storage.emplace_back(
        tensor.dtype, tensor.rank == 4 ? test::Shape{1, p.n.H, clusters, wq, tensor.size(3)}
                                       : test::Shape{1, p.n.H, clusters, wq});
    write_values(copy, read_values(tensor));
    return copy.view();
  };
  expect_masked_attention(
      spelled, admits,
      [&](const TensorView& out, const TensorView& lse) {
        const TensorView slot_out = five(out), slot_lse = five(lse);
        attend_members(p.inputs, lists, slot_out, slot_lse, memory);
        write_values(out, read_values(slot_out));
        write_values(lse, read_values(slot_lse));
      },
      [&](const AttentionResult& result, const AttentionGradients& gradients) {
        const AttentionResult slot_result{.out = five(result.out),
                                          .saved = {five(result.saved[0])}};
        const TensorView grad_out = five(spelled.grad_out);
        AttentionGradients own = gradients;
        own.dq = dq;
        attend_members_backward(p.inputs, lists, slot_result, grad_out, own, memory);
        // Tokens in one group: their gradient is their slot's.
        const std::vector<double> values = read_values(dq);
        fill(gradients.dq, [&](Index at) {
          const Index d = at % p.n.Dk, slot = at / p.n.Dk, h = slot / flat.N;
          const double token = slots[slot];
          return token < 0 ? 0.0 : values[(h * p.n.N + static_cast<Index>(token)) * p.n.Dk + d];
        });
      });
}

TEST_P(AttendTest, MembersAttendInsideTheirGroup) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (bool causal : {false, true}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + (causal ? " causal" : ""));
      check_members(dtype, causal);
    }
  }
}

// With one cluster and all tokens in it, each form is a mechanism of its own.
TEST_P(AttendTest, OneClusterOfAllTokensIsLocalOrFullAttention) {
  Problem p({});
  cases::Problem whole;
  whole.inputs = p.inputs;
  whole.grad_out = p.grad_out;
  const Clusters q(1, p.n.H, p.n.N, p.n, {}, 1), k(1, p.n.Hkv, p.n.S, p.n, {}, 1);
  const HostTensor out(DType::f32, {p.n.B, p.n.H, p.n.N, p.n.Dv}),
      lse(DType::f32, {p.n.B, p.n.H, p.n.N});

  HostTensor all_keys(DType::i32, {p.n.B, p.n.H, 1, p.n.S});
  fill(all_keys, [&](Index at) { return static_cast<double>(at % p.n.S); });
  const SharedLists shared{.queries = q.groups, .keys = all_keys};
  whole.mechanism = FullParams{};
  attend_shared(p.inputs, shared, out, lse,
                Memory(attend_shared_workspace_bytes(p.inputs, shared)));
  EXPECT_TRUE(follows_rule("shared", out, test::expected_out(whole, {})));

  whole.inputs.causal = p.inputs.causal = true;
  whole.mechanism = LocalParams{.window = 9};
  const BandedLists banded{.queries = q.groups, .keys = k.groups, .window = 9};
  attend_banded(p.inputs, banded, out, lse,
                Memory(attend_banded_workspace_bytes(p.inputs, banded)));
  EXPECT_TRUE(follows_rule("banded", out, test::expected_out(whole, {})));
}

TEST(AttendRefusalTest, ListsMustFit) {
  Problem p({});
  p.inputs.causal = true;
  const Clusters q(3, p.n.H, p.n.N, p.n, {}, 1), k(3, p.n.Hkv, p.n.S, p.n, {}, 1);
  const Clusters other(4, p.n.Hkv, p.n.S, p.n, {}, 1);
  const auto refused = [&](const BandedLists& lists) {
    const std::string message = error_of([&] { attend_banded_workspace_bytes(p.inputs, lists); });
    EXPECT_TRUE(message.starts_with("[attend_banded] ")) << message;
  };
  refused({.queries = q.groups, .keys = other.groups, .window = 3});
  refused({.queries = q.groups, .keys = k.groups, .window = 0});
  refused({.queries = k.groups, .keys = k.groups, .window = 3});
  refused({.queries = q.groups, .keys = {}, .window = 3});
  Problem cross({.S = 60});
  cross.inputs.causal = true;
  const Clusters short_keys(3, cross.n.Hkv, cross.n.S, cross.n, {}, 1);
  const BandedLists lists{.queries = q.groups, .keys = short_keys.groups, .window = 3};
  EXPECT_TRUE(error_of([&] {
                attend_banded_workspace_bytes(cross.inputs, lists);
              }).starts_with("[attend_banded] "));

  HostTensor wide(DType::i64, {p.n.B, p.n.H, 3, 5}), few(DType::i32, {p.n.B, p.n.H, 2, 5});
  for (const HostTensor* keys : {&wide, &few}) {
    const SharedLists shared{.queries = q.groups, .keys = *keys};
    EXPECT_TRUE(error_of([&] {
                  attend_shared_workspace_bytes(p.inputs, shared);
                }).starts_with("[attend_shared] "));
  }
  HostTensor queries(DType::i32, {p.n.B, p.n.H, 3, 5}), keys(DType::i32, {p.n.B, p.n.Hkv, 4, 5});
  const MemberLists members{.queries = queries, .keys = keys};
  EXPECT_TRUE(error_of([&] {
                attend_members_workspace_bytes(p.inputs, members);
              }).starts_with("[attend_members] "));
}

}  // namespace
}  // namespace coterie
