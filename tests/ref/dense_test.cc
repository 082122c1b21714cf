// SPDX-License-Identifier: MIT
// The specification in code against dense formulas written from its text alone (dense.h): weights,
// outputs and gradients of every mechanism, including selections, on problems of a few tokens.
// "Equal" means within 1e-12: a few thousand roundings of values of size 1.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/ref/dense.h"
#include "tests/ref/support.h"

namespace coterie::ref {
namespace {

using cases::Case;
using dense::Head;
using dense::Matrix;
using dense::Number;
using dense::Row;

// The inputs that have gradients, as numbers in tensor order.
struct Tensors {
  Row q, k, v, centroids, gate, logit_scale;
};

Row numbers_of(const TensorView& tensor) {
  if (!tensor.present()) return {};
  const std::vector<double> values = read_values(tensor);
  return {values.begin(), values.end()};
}

Tensors tensors_of(const AttentionInputs& inputs) {
  return {numbers_of(inputs.q),         numbers_of(inputs.k),    numbers_of(inputs.v),
          numbers_of(inputs.centroids), numbers_of(inputs.gate), numbers_of(inputs.logit_scale)};
}

// Rows [begin, begin + count) of a batch entry.
struct Rows {
  std::int64_t batch, begin, count;
};

std::vector<Rows> items_of(const Sequences& sequences, std::int64_t B, std::int64_t rows) {
  std::vector<Rows> items;
  if (sequences.cu_seqlens.present()) {
    const std::vector<int> ends = indices_of(sequences.cu_seqlens);
    for (std::size_t t = 0; t + 1 < ends.size(); ++t)
      items.push_back({0, ends[t], ends[t + 1] - ends[t]});
    return items;
  }
  for (std::int64_t b = 0; b < B; ++b) items.push_back({b, 0, rows});
  if (sequences.lengths.present())
    for (Rows& item : items) item.count = indices_of(sequences.lengths)[item.batch];
  return items;
}

// Applies the dense definition to every item and head of a call.
class Definition {
 public:
  explicit Definition(const cases::Problem& problem)
      : mechanism_(resolve(problem.mechanism, problem.inputs.causal)),
        inputs_(problem.inputs),
        B_(inputs_.q.size(0)),
        H_(inputs_.q.size(1)),
        N_(inputs_.q.size(2)),
        S_(inputs_.v.size(2)),
        kv_heads_(inputs_.v.size(1)),
        q_items_(items_of(inputs_.q_sequences, B_, N_)),
        k_items_(items_of(inputs_.k_sequences, B_, S_)) {
    if (inputs_.mask.present()) mask_ = read_values(inputs_.mask);
  }

  // (B, H, N, S) and (B, H, N, Dv).
  struct Result {
    std::vector<double> weights;
    Row out;
  };
  Result run(const Tensors& tensors) const {
    const std::int64_t Dv = inputs_.v.size(3);
    Result result{std::vector<double>(static_cast<std::size_t>(B_ * H_ * N_ * S_), 0.0),
                  Row(static_cast<std::size_t>(B_ * H_ * N_ * Dv))};
    for (std::size_t item = 0; item < q_items_.size(); ++item) {
      std::vector<Head> heads;
      for (std::int64_t h = 0; h < H_; ++h) heads.push_back(head(tensors, item, h));
      for (std::int64_t h = 0; h < H_; ++h) {
        const Matrix w = dense::weights(mechanism_, heads, static_cast<std::size_t>(h));
        for (std::size_t i = 0; i < w.size(); ++i) {
          const std::int64_t row = (q_items_[item].batch * H_ + h) * N_ + q_items_[item].begin + i;
          for (std::size_t j = 0; j < w[i].size(); ++j) {
            result.weights[row * S_ + k_items_[item].begin + j] = w[i][j].value;
            for (std::int64_t d = 0; d < Dv; ++d)
              result.out[row * Dv + d] += w[i][j] * heads[h].v[j][d];
          }
        }
      }
    }
    return result;
  }

 private:
  // Rows of a (B, heads, rows, dim) tensor; consecutive query heads share a head if there are
  // fewer.
  Matrix rows_of(const Row& values, const TensorView& tensor, const Rows& rows,
                 std::int64_t h) const {
    const std::int64_t own = h / (H_ / tensor.size(1)), dim = tensor.size(3);
    Matrix matrix;
    for (std::int64_t r = 0; r < rows.count; ++r) {
      const auto at = values.begin() +
                      ((rows.batch * tensor.size(1) + own) * tensor.size(2) + rows.begin + r) * dim;
      matrix.emplace_back(at, at + dim);
    }
    return matrix;
  }

  Head head(const Tensors& tensors, std::size_t item, std::int64_t h) const {
    const Rows &q = q_items_[item], &k = k_items_[item];
    Head head;
    head.q = rows_of(tensors.q, inputs_.q, q, h);
    head.k = keys_are_queries(mechanism_) ? head.q : rows_of(tensors.k, inputs_.k, k, h);
    head.v = rows_of(tensors.v, inputs_.v, k, h);
    if (inputs_.centroids.present()) {  // (heads, C, dim)
      const std::int64_t C = inputs_.centroids.size(1), dim = inputs_.centroids.size(2);
      const auto own = tensors.centroids.begin() + h / (H_ / inputs_.centroids.size(0)) * C * dim;
      for (std::int64_t c = 0; c < C; ++c)
        head.centroids.emplace_back(own + c * dim, own + (c + 1) * dim);
    }
    for (std::int64_t i = 0; i < q.count && inputs_.gate.present(); ++i)
      head.gate.push_back(tensors.gate[q.batch * N_ + q.begin + i]);
    if (inputs_.logit_scale.present()) head.logit_scale = tensors.logit_scale[h];
    for (std::int64_t i = 0; i < q.count && !mask_.empty(); ++i) {
      const auto row = mask_.begin() + ((q.batch * H_ + h) * N_ + q.begin + i) * S_ + k.begin;
      head.mask.emplace_back(row, row + k.count);
    }
    head.scale = inputs_.scale;
    head.causal = resolve_causality(mechanism_, inputs_.causal) != Causality::none;
    head.seed = inputs_.seed;
    head.problem = static_cast<std::uint32_t>(item * H_ + h);
    head.kv_problem = static_cast<std::uint32_t>(item * kv_heads_ + h / (H_ / kv_heads_));
    return head;
  }

  Mechanism mechanism_;
  AttentionInputs inputs_;
  std::int64_t B_, H_, N_, S_, kv_heads_;
  std::vector<Rows> q_items_, k_items_;
  std::vector<double> mask_;
};

std::vector<double> values_of(const Row& numbers) {
  std::vector<double> values;
  for (Number number : numbers) values.push_back(number.value);
  return values;
}

void compare_outputs(const Selected& selected) {
  const Definition definition(selected.problem);
  const Definition::Result expected = definition.run(tensors_of(selected.problem.inputs));
  EXPECT_LT(largest_difference(selected.weights(), expected.weights), kExact);
  EXPECT_LT(largest_difference(selected.attend(), values_of(expected.out)), kExact);
}

// The slope of sum(out * grad_out) with respect to each element of a tensor.
void compare_gradient(const Selected& selected, const Definition& definition, Tensors& tensors,
                      Row& x, const std::vector<double>& gradient) {
  const std::vector<double> grad_out = read_values(selected.problem.grad_out);
  ASSERT_EQ(gradient.size(), x.size());
  double largest = 1.0;
  for (double value : gradient) largest = std::max(largest, std::abs(value));
  for (std::size_t e = 0; e < x.size(); ++e) {
    double expected = 0.0;
    if (!std::isnan(x[e].value)) {  // else padding
      x[e].slope = 1.0;
      const Row out = definition.run(tensors).out;
      x[e].slope = 0.0;
      for (std::size_t o = 0; o < out.size(); ++o)
        if (!std::isnan(grad_out[o])) expected += out[o].slope * grad_out[o];
    }
    EXPECT_NEAR(gradient[e], expected, kExact * largest) << "element " << e;
  }
}

void compare_gradients(const Selected& selected) {
  const Definition definition(selected.problem);
  Tensors tensors = tensors_of(selected.problem.inputs);
  const Gradients<double> gradients = selected.backward();
  const auto compare = [&](const char* name, Row& x, const std::vector<double>& dx) {
    if (dx.empty()) return;
    SCOPED_TRACE(name);
    compare_gradient(selected, definition, tensors, x, dx);
  };
  compare("dq", tensors.q, gradients.dq);
  compare("dk", tensors.k, gradients.dk);
  compare("dv", tensors.v, gradients.dv);
  compare("dcentroids", tensors.centroids, gradients.dcentroids);
  compare("dgate", tensors.gate, gradients.dgate);
  compare("dlogit_scale", tensors.logit_scale, gradients.dlogit_scale);
}

// Four query heads and two key heads. `shape` has further words for make_case. B4 padded has an
// item without queries and, in cross-attention, one without keys.
Case small(const std::string& spec, const std::string& shape) {
  std::string name;
  for (char letter : spec + "_" + shape)
    name += std::isalnum(static_cast<unsigned char>(letter)) != 0 ? letter : '_';
  return cases::make_case(name, spec, "H4:2 D4:3 f64 " + shape);
}

std::vector<Case> of(const std::vector<std::string>& specs,
                     const std::vector<std::string>& shapes) {
  std::vector<Case> all;
  for (const std::string& spec : specs)
    for (const std::string& shape : shapes) all.push_back(small(spec, shape));
  return all;
}

std::vector<Case> join(const std::vector<std::vector<Case>>& lists) {
  std::vector<Case> all;
  for (const std::vector<Case>& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::vector<Case> positional_cases() {
  return of({"full", "local(window=1)", "local(window=4)", "local(window=5)",
             "local(window=3,kind=blocked)", "local(window=2,kind=blocked,flange=0)",
             "local(window=2,kind=blocked,flange=2)", "strided(stride=3)", "oracle-top(topk=1)",
             "oracle-top(topk=3)"},
            {"B4 N12 padded", "B4 N9 S7 padded", "B4 N6 S9 padded", "B4 N12 padded causal",
             "B4 N6 S9 padded causal", "B4 N9 S6 padded causal", "B2 N9 mask",
             "B2 N9 causal mask scale=0.8", "B1 N24 packed causal", "B1 N16 S24 packed",
             "B2 N9 equal causal", "B2 N9 integers causal"});
}

std::vector<Case> near_cases() {
  return of({"clustered(clusters=3,near=1)", "clustered(clusters=3,near=2)",
             "clustered(clusters=2,near=4,clustering=hamming)",
             "i-clustered(clusters=3,topk=2,near=1)", "i-clustered(clusters=3,topk=3,near=2)",
             "i-clustered(clusters=2,topk=2,near=99)", "i-clustered(clusters=20,topk=1,near=3)"},
            {"B4 N12 padded", "B1 N24 packed scale=0.7", "B2 N9 equal", "B2 N12 mixture"});
}

std::vector<Case> clustered_cases() {
  std::vector<std::string> specs;
  for (const char* clustering :
       {"clusters=1", "clusters=3", "clusters=20", "clusters=3,iterations=4",
        "clusters=3,clustering=hamming-keys", "clusters=3,clustering=hamming",
        "clusters=3,clustering=hamming,bits=7,hash_bias=false,iterations=2"}) {
    specs.push_back(std::string("clustered(") + clustering + ")");
    specs.push_back(std::string("i-clustered(topk=3,") + clustering + ")");
  }
  const std::vector<std::string> shapes = {
      "B4 N12 padded", "B4 N9 S7 padded",   "B4 N6 S9 padded scale=0.7",
      "B1 N24 packed", "B1 N16 S24 packed", "B2 N9 equal",
      "B2 N12 mixture"};
  return join({of(specs, shapes),
               of({"i-clustered(clusters=3,topk=1)", "i-clustered(clusters=2,topk=99)",
                   "i-clustered(clusters=3,topk=4,causal=reference)",
                   "i-clustered(clusters=2,topk=2,causal=reference,clustering=hamming)"},
                  shapes),
               near_cases()});
}

std::vector<Case> lsh_cases() {
  return of({"lsh(rounds=1,chunk=1,buckets=4)", "lsh(rounds=2,chunk=1,buckets=4)",
             "lsh(rounds=3,chunk=2,buckets=4)", "lsh(rounds=2,chunk=5,buckets=6)",
             "lsh(rounds=2,chunk=99,buckets=2)", "lsh(rounds=3,chunk=1,buckets=4,combine=mean)",
             "lsh(rounds=2,chunk=3,buckets=4,combine=mean)",
             "lsh(rounds=2,chunk=99,buckets=4,combine=mean)"},
            {"B4 N12 padded", "B4 N12 padded causal", "B2 N4 causal scale=1.3", "B2 N1",
             "B1 N24 packed", "B1 N24 packed causal", "B2 N9 equal causal", "B2 N9 D1 integers"});
}

std::vector<Case> routing_cases() {
  const std::vector<std::string> same = {"B4 N12 padded", "B4 N9 padded logit_scale scale=0.6",
                                         "B1 N24 packed", "B2 N9 equal", "B2 N1"};
  const std::vector<std::string> cross = {"B4 N9 S7 padded", "B4 N6 S9 padded logit_scale",
                                          "B1 N16 S24 packed"};
  const std::vector<std::string> separate = {
      "routing(clusters=3,window=4)",
      "routing(clusters=4,window=2,count_eps=0.5)",
      "routing(clusters=3,window=99,count_eps=0)",
      "routing(clusters=3,window=4,self=demote)",
      "routing(clusters=3,window=4,causal=paper)",
      "routing(clusters=3,window=4,causal=paper,self=demote)",
      "routing(clusters=3,membership=balanced)",
      "routing(clusters=20,membership=balanced)",
      "routing(clusters=3,membership=balanced,self=demote)"};
  const std::vector<std::string> aligned = {
      "routing(clusters=3,window=4,share_qk=true)",
      "routing(clusters=3,window=4,share_qk=true,self=keep)",
      "routing(clusters=3,window=4,share_qk=true,causal=paper)",
      "routing(clusters=4,window=3,share_qk=true,causal=paper,self=keep,count_eps=0.5)",
      "routing(clusters=3,membership=balanced,share_qk=true)",
      "routing(clusters=3,membership=balanced,share_qk=true,self=keep)",
      "routing(clusters=3,window=1,causal=strict)",
      "routing(clusters=3,window=3,causal=strict)",
      "routing(clusters=3,window=3,causal=strict,self=demote)",
      "routing(clusters=4,window=2,causal=strict,queries_in=2)",
      "routing(clusters=3,window=2,causal=strict,queries_in=9)",
      "routing(clusters=4,window=2,causal=strict,include_self=true)",
      "routing(clusters=4,window=2,causal=strict,include_self=true,self=demote)",
      "routing(clusters=4,window=2,causal=strict,queries_in=2,include_self=true,self=demote)",
      "routing(clusters=3,window=3,causal=strict,share_qk=true)",
      "routing(clusters=3,window=3,causal=strict,share_qk=true,self=keep)",
      "routing(clusters=3,window=2,causal=strict,share_qk=true,queries_in=2)"};
  return join({of(separate, same), of(separate, cross), of(aligned, same)});
}

std::vector<Case> cast_cases() {
  std::vector<std::string> specs;
  for (const char* activation : {"", ",activation=laplace"})
    for (const char* keys :
         {"clusters=1,size=99", "clusters=3,size=3", "clusters=3,size=4,heads=separate",
          "clusters=3,size=1,mode=single", "clusters=3,size=5,mode=single",
          "clusters=20,size=4,mode=single,heads=separate", "clusters=3,size=3,gate_scale=false"})
      specs.push_back(std::string("cast(") + keys + activation + ")");
  return of(specs, {"B4 N12 padded", "B4 N9 padded scale=0.3", "B1 N24 packed", "B2 N9 equal"});
}

class DenseTest : public testing::TestWithParam<Case> {};

TEST_P(DenseTest, OutputsFollowTheDefinition) {
  for (std::uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    compare_outputs(make_selected(GetParam(), seed));
  }
}

class DenseGradientTest : public testing::TestWithParam<Case> {};

TEST_P(DenseGradientTest, GradientsFollowTheDefinition) {
  compare_gradients(make_selected(GetParam()));
}

// Every spec once more, in one shape.
std::vector<Case> with_shape(const std::vector<Case>& cases, const std::string& shape) {
  std::vector<Case> all;
  for (const Case& c : cases)
    if ((shape.find(" S") == std::string::npos || c.spec.find("near") == std::string::npos) &&
        std::ranges::none_of(all, [&](const Case& known) { return known.spec == c.spec; }))
      all.push_back(small(c.spec, shape));
  return all;
}

std::vector<Case> gradient_cases() {
  return join({with_shape(positional_cases(), "B4 N6 S7 padded causal"),
               with_shape(clustered_cases(), "B4 N7 S6 padded scale=0.7"),
               of({"i-clustered(clusters=3,topk=3,mass_grad=false)",
                   "i-clustered(clusters=2,topk=1,mass_grad=false,clustering=hamming)"},
                  {"B4 N7 S6 padded", "B1 N16 packed"}),
               with_shape(near_cases(), "B4 N7 padded scale=0.7"),
               with_shape(lsh_cases(), "B4 N7 padded"), with_shape(lsh_cases(), "B2 N4 causal"),
               with_shape(routing_cases(), "B4 N7 padded logit_scale scale=0.6"),
               with_shape(cast_cases(), "B4 N7 padded")});
}

std::string name_of(const testing::TestParamInfo<Case>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Positional, DenseTest, testing::ValuesIn(positional_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Clustered, DenseTest, testing::ValuesIn(clustered_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Lsh, DenseTest, testing::ValuesIn(lsh_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Routing, DenseTest, testing::ValuesIn(routing_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Cast, DenseTest, testing::ValuesIn(cast_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, DenseGradientTest, testing::ValuesIn(gradient_cases()), name_of);

// A query of zeros has a key of zeros and no gradient through its direction.
TEST(DenseLshTest, ZeroQueriesHaveZeroKeys) {
  for (const char* spec :
       {"lsh(rounds=2,chunk=2,buckets=4)", "lsh(rounds=2,chunk=2,buckets=4,combine=mean)"}) {
    Selected selected = make_selected(small(spec, "B1 N7"));
    fill(selected.problem.inputs.q.narrowed(2, 3, 1), [](std::int64_t) { return 0.0; });
    select_again(selected);
    compare_outputs(selected);
  }
}

}  // namespace
}  // namespace coterie::ref
