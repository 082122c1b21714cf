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

// Clusterings that start from random tokens number them by head, and a rank has other numbers.
bool draws_by_head(const std::string& spec) {
  return spec.find("clustered") != std::string::npos || spec.find("lsh") != std::string::npos;
}

TEST(Ulysses, PartsAddUpToTheWhole) {
  for (const bool causal : {false, true}) {
    for (const std::string& spec : every_spec(causal)) {
      if (draws_by_head(spec) || spec.find("cast") != std::string::npos) continue;
      expect_equal_passes(make_problem(spec, causal), 2, spec);
    }
  }
  expect_equal_passes(make_problem("full", true), 4, "four ranks");
}

TEST(Ulysses, FewerKeyHeadsAreShared) {
  Problem problem = make_problem("2*local(window=5)+2*routing(clusters=3,window=6)", true);
  problem.options.transformer.heads = 8;
  problem.options.transformer.attention = {
      AttentionSpec::parse("4*local(window=5)+4*routing(clusters=3,window=6)")};
  problem.options.transformer.kv_heads = 4;
  expect_equal_passes(problem, 2, "four key heads");
}

// The mechanisms that draw random numbers too: attention of whole sequences of the rank's heads.
TEST(Ulysses, AttentionSeesWholeSequencesOfItsHeads) {
  const std::int64_t N = 22, H = 4;
  const at::Tensor rows = at::randn({3, 2, N, H, 8});
  for (const std::string& spec : every_spec(false)) {
    if (!draws_by_head(spec) || spec.find('+') != std::string::npos) continue;
    const Mechanism mechanism = resolve(AttentionSpec::parse(spec).groups[0].mechanism, false);
    Meeting meeting(2);
    run_threads(2, [&](std::int64_t rank) {
      const SequenceRanks ranks = meeting.ranks(rank);
      const SequenceSlice own = sequence_slice(N, rank, 2);
      std::vector<at::Tensor> parts;
      for (std::int64_t i = 0; i < 3; ++i) parts.push_back(rows[i].narrow(1, own.first, own.count));
      const std::vector<at::Tensor> heads = to_heads(parts, ranks, N);
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(at::equal(heads[std::size_t(i)], rows[i].narrow(2, rank * 2, 2)));
      }
      const auto across = [](const at::Tensor& x) { return x.transpose(1, 2); };
      const at::Tensor k = keys_are_queries(mechanism) ? at::Tensor() : across(heads[1]);
      const at::Tensor out =
          across(attention(across(heads[0]), k, across(heads[2]), mechanism, {.seed = 3}));
      const at::Tensor back = to_positions({out}, ranks)[0];
      EXPECT_EQ(back.sizes(), parts[0].sizes()) << spec;
      EXPECT_TRUE(at::equal(back.narrow(2, rank * 2, 2), out.narrow(1, own.first, own.count)));
    });
  }
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

// Heads of cast choose clusters together.
TEST(Ulysses, CastIsRefused) {
  const AttentionSpec spec = AttentionSpec::parse("2*full+2*cast(clusters=3,size=8)");
  EXPECT_NO_THROW(check_sequence_ranks(spec, 4, 4, 1));
  EXPECT_THROW(check_sequence_ranks(spec, 4, 4, 2), Error);
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
