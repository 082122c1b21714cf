// SPDX-License-Identifier: MIT
// Sequences split over ranks, which are threads here: outputs, gradients, commitments and
// statistics add up to those of one rank, for every mechanism.
#include "coterie/torch/ulysses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <barrier>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "coterie/error.h"
#include "modules.h"

namespace coterie::torch_api {
namespace {

// Where threads exchange their bytes.
class Meeting {
 public:
  explicit Meeting(std::int64_t size) : size_(size), barrier_(size), out_(std::size_t(size)) {}

  SequenceRanks ranks(std::int64_t rank) {
    return {
        rank, size_,
        [this, rank](const at::Tensor& bytes, const SequenceRanks::Sizes& to,
                     const SequenceRanks::Sizes& from) { return exchange(rank, bytes, to, from); }};
  }

 private:
  at::Tensor exchange(std::int64_t rank, const at::Tensor& bytes, const SequenceRanks::Sizes& to,
                      const SequenceRanks::Sizes& from) {
    out_[std::size_t(rank)] = bytes.split_with_sizes(to);
    barrier_.arrive_and_wait();
    std::vector<at::Tensor> got;
    for (std::size_t i = 0; i < out_.size(); ++i) {
      got.push_back(out_[i][std::size_t(rank)].clone());
      EXPECT_EQ(got.back().numel(), from[i]);
    }
    barrier_.arrive_and_wait();
    return at::cat(got);
  }

  std::int64_t size_;
  std::barrier<> barrier_;
  std::vector<std::vector<at::Tensor>> out_;
};

template <class Work>
void run_threads(std::int64_t size, const Work& work) {
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < size; ++rank) threads.emplace_back([&, rank] { work(rank); });
  for (std::thread& thread : threads) thread.join();
}

// What one pass over all positions, or over those of one rank, computes.
struct Pass {
  at::Tensor out, commitment;
  std::map<std::string, at::Tensor> gradients;
  StepStatistics statistics;
};

struct Problem {
  LanguageModelOptions options;
  at::Tensor tokens, lengths, weights;  // weights of the outputs in the loss
};

Pass run_pass(const Problem& problem, const SequenceRanks* ranks) {
  at::manual_seed(3);  // the generator is shared, but parameters are loaded below
  LanguageModel model(problem.options);
  at::Generator generator = at::detail::createCPUGenerator(5);
  for (at::Tensor& parameter : model->parameters()) {
    const at::NoGradGuard no_grad;
    parameter.copy_(at::randn(parameter.sizes(), generator) * 0.3);
  }
  model->to(at::kDouble);
  Pass pass;
  const PassContext context{
      .lengths = problem.lengths, .seed = 4, .ranks = ranks, .statistics = &pass.statistics};
  const PassOutput output = model->forward(problem.tokens, context);
  pass.out = output.out;
  pass.commitment = output.commitment;
  at::Tensor weights = problem.weights;
  if (ranks != nullptr) {
    const SequenceSlice own = sequence_slice(weights.size(1), ranks->rank, ranks->size);
    weights = weights.narrow(1, own.first, own.count);
  }
  ((output.out * weights).sum() + output.commitment).backward();
  for (const auto& item : model->named_parameters()) {
    pass.gradients[item.key()] = item.value().grad();
  }
  return pass;
}

void expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::allclose(got, wanted, 1e-8, 1e-10))
      << what << ": " << (got - wanted).abs().max().item<double>();
}

at::Tensor sum_of(const std::vector<Pass>& passes,
                  const std::function<at::Tensor(const Pass&)>& part) {
  at::Tensor sum = part(passes[0]).clone();
  for (std::size_t i = 1; i < passes.size(); ++i) sum += part(passes[i]);
  return sum;
}

void expect_equal_passes(const Problem& problem, std::int64_t size, const std::string& name) {
  const Pass whole = run_pass(problem, nullptr);
  Meeting meeting(size);
  std::vector<Pass> parts(static_cast<std::size_t>(size));
  run_threads(size, [&](std::int64_t rank) {
    const SequenceRanks ranks = meeting.ranks(rank);
    parts[std::size_t(rank)] = run_pass(problem, &ranks);
  });
  std::vector<at::Tensor> outputs;
  for (const Pass& part : parts) outputs.push_back(part.out);
  expect_close(at::cat(outputs, 1), whole.out, name + " output");
  expect_close(sum_of(parts, [](const Pass& pass) { return pass.commitment; }), whole.commitment,
               name + " commitment");
  for (const auto& [parameter, gradient] : whole.gradients) {
    expect_close(sum_of(parts, [&](const Pass& pass) { return pass.gradients.at(parameter); }),
                 gradient, name + " gradient of " + parameter);
  }
  for (const auto& [place, group] : whole.statistics) {
    for (const auto member : {&GroupStatistics::queries, &GroupStatistics::keys}) {
      if (!(group.*member).members.defined()) continue;
      const auto of = [&, place = place](const Pass& pass) { return pass.statistics.at(place); };
      expect_close(sum_of(parts, [&](const Pass& p) { return (of(p).*member).members; }),
                   (group.*member).members, name + " members");
      expect_close(sum_of(parts, [&](const Pass& p) { return (of(p).*member).sums; }),
                   (group.*member).sums, name + " sums");
    }
  }
}

Problem make_problem(const std::string& spec, bool causal) {
  Problem problem;
  problem.options = language_model_options(spec, causal);
  problem.options.input.positions = EmbeddingPositions::learned;
  problem.options.transformer.recompute = causal;
  at::Generator generator = at::detail::createCPUGenerator(6);
  problem.tokens = at::randint(11, {2, 21}, generator, at::kLong);
  problem.lengths = at::tensor({21, 14}, at::kLong);
  problem.weights = at::randn({2, 21, 11}, generator, at::kDouble);
  problem.weights[1].narrow(0, 14, 7).zero_();
  return problem;
}

// The spec with heads that two ranks can share.
std::string for_two(const std::string& spec) {
  return spec.rfind("1*full+1*", 0) == 0 ? "2*full+2*" + spec.substr(spec.rfind('*') + 1) : spec;
}

TEST(Ulysses, PartsAddUpToTheWhole) {
  for (const bool causal : {false, true}) {
    for (const std::string& spec : every_spec(causal)) {
      expect_equal_passes(make_problem(for_two(spec), causal), 2, spec);
    }
  }
}

TEST(Ulysses, FourRanksAddUpToTheWhole) {
  expect_equal_passes(make_problem("full", true), 4, "four ranks");
  for (const std::string spec :
       {"i-clustered(clusters=4,topk=6)", "clustered(clusters=4,clustering=hamming)",
        "lsh(rounds=2,chunk=8,buckets=4)", "routing(clusters=3,window=6)"}) {
    expect_equal_passes(make_problem(spec, false), 4, spec + " on four ranks");
  }
}

TEST(Ulysses, HeadsOfCastChooseTogether) {
  for (const std::string keys :
       {"", ",mode=single", ",activation=laplace", ",heads=separate", ",gate_scale=false",
        ",positions=rotary", ",mode=single,activation=laplace,heads=separate"}) {
    const std::string spec = "cast(clusters=3,size=8" + keys + ")";
    for (const bool recompute : {false, true}) {
      Problem problem = make_problem(spec, false);
      problem.options.transformer.recompute = recompute;
      expect_equal_passes(problem, recompute ? 2 : 4, spec);
    }
  }
}

// Attention dropout too draws by the numbers of heads.
TEST(Ulysses, DropoutIsThatOfTheWhole) {
  for (const std::string& spec : every_spec(false)) {
    Problem problem = make_problem(for_two(spec), false);
    problem.options.transformer.attention_dropout = 0.3;
    expect_equal_passes(problem, 2, spec + " with dropout");
  }
}

TEST(Ulysses, FewerKeyHeadsAreShared) {
  Problem problem = make_problem("2*local(window=5)+2*routing(clusters=3,window=6)", true);
  problem.options.transformer.heads = 8;
  problem.options.transformer.attention = {
      AttentionSpec::parse("4*local(window=5)+4*routing(clusters=3,window=6)")};
  problem.options.transformer.kv_heads = 4;
  expect_equal_passes(problem, 2, "four key heads");
}

TEST(Ulysses, UnevenSlicesCoverTheSequence) {
  for (const std::int64_t length : {4, 5, 33, 1024}) {
    std::int64_t next = 0;
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      const SequenceSlice slice = sequence_slice(length, rank, 4);
      EXPECT_EQ(slice.first, next);
      EXPECT_LE(slice.count - length / 4, 1);
      next += slice.count;
    }
    EXPECT_EQ(next, length);
  }
}

TEST(Ulysses, HeadsThatDoNotDivideAreRefused) {
  const AttentionSpec spec = AttentionSpec::parse("1*full+3*local(window=4)");
  EXPECT_NO_THROW(check_sequence_ranks(AttentionSpec::parse("full"), 4, 2, 2));
  EXPECT_THROW(check_sequence_ranks(AttentionSpec::parse("full"), 4, 2, 4), Error);
  try {
    check_sequence_ranks(spec, 4, 4, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("group 0"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace coterie::torch_api
