// SPDX-License-Identifier: MIT
// Invalid arguments are refused with an Error that names the operation, the expected value and the
// actual value.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cases/problem.h"
#include "coterie/attention.h"
#include "coterie/spec.h"
#include "tests/support/tensors.h"

namespace coterie {
namespace {

using cases::Case;
using cases::Pass;
using cases::Problem;
using test::error_of;

// Changes a valid problem into one that must be refused.
using Spoil = std::function<void(Problem& problem)>;

// Every entry point that takes the inputs refuses them, with a message that contains `parts`.
void expect_refused(const Case& c, const std::vector<std::string>& parts, const Spoil& spoil) {
  Problem problem = cases::make_problem(c, 1);
  Pass run = cases::run_forward(problem);  // the valid problem is accepted
  spoil(problem);
  const Mechanism& m = problem.mechanism;
  const AttentionInputs& in = problem.inputs;
  const std::vector<std::function<void()>> calls = {
      [&] { attention_saved(m, in); },
      [&] { attention_workspace_bytes(m, in); },
      [&] { attention_select(m, in, run.result.saved, run.workspace); },
      [&] { attention_attend(m, in, run.result, run.workspace); },
      [&] { attention_forward(m, in, run.result, run.workspace); },
      [&] {
        attention_backward(m, in, run.result, problem.grad_out, run.gradients, run.workspace);
      },
  };
  for (std::size_t call = 0; call < calls.size(); ++call) {
    const std::string message = error_of(calls[call]);
    EXPECT_TRUE(message.starts_with("[" + std::string(mechanism_name(m)) + "] "))
        << "call " << call << ": " << message;
    EXPECT_NE(message.find("got"), std::string::npos) << message;
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in: " << message;
    }
  }
}

Case full_case() { return {.spec = "full", .H = 4, .Hkv = 2, .N = 8, .S = 12, .Dk = 8, .Dv = 6}; }

Case of(const char* spec, bool causal = false) {
  Case c{.spec = spec, .H = 4, .Hkv = 2, .N = 12, .Dk = 8};
  c.causal = causal;
  return c;
}

TensorView other(Problem& problem, DType dtype, const test::Shape& sizes) {
  problem.storage.emplace_back(dtype, sizes);
  return problem.storage.back();
}

TEST(RefusalTest, ShapesThatDoNotFit) {
  expect_refused(full_case(), {"k", "(2, 2, 12, 8)"}, [](Problem& p) {
    p.inputs.k = other(p, DType::f32, {2, 2, 12, 7});
  });
  expect_refused(full_case(), {"k", "(2, 2, 11, 8)"}, [](Problem& p) {
    p.inputs.k = other(p, DType::f32, {2, 2, 11, 8});
  });
  expect_refused(full_case(), {"(3, 2, 12, 6)"}, [](Problem& p) {
    p.inputs.v = other(p, DType::f32, {3, 2, 12, 6});
  });
  expect_refused(full_case(), {"q", "(2, 4, 8)"}, [](Problem& p) {
    p.inputs.q = other(p, DType::f32, {2, 4, 8});
  });
  expect_refused(full_case(), {"q", "nothing"}, [](Problem& p) { p.inputs.q = {}; });
  expect_refused(full_case(), {"k", "nothing"}, [](Problem& p) { p.inputs.k = {}; });
  expect_refused(full_case(), {"v", "nothing"}, [](Problem& p) { p.inputs.v = {}; });
  expect_refused(full_case(), {"heads", "4", "3"}, [](Problem& p) {
    p.inputs.k = other(p, DType::f32, {2, 3, 12, 8});
    p.inputs.v = other(p, DType::f32, {2, 3, 12, 6});
  });
}

TEST(RefusalTest, MixedAndUnknownTypes) {
  expect_refused(full_case(), {"k", "f32", "f64"}, [](Problem& p) {
    p.inputs.k = other(p, DType::f64, {2, 2, 12, 8});
  });
  expect_refused(full_case(), {"v", "f32", "bf16"}, [](Problem& p) {
    p.inputs.v = other(p, DType::bf16, {2, 2, 12, 6});
  });
  expect_refused(full_case(), {"q", "i32"}, [](Problem& p) {
    p.inputs.q = other(p, DType::i32, {2, 4, 8, 8});
    p.inputs.k = other(p, DType::i32, {2, 2, 12, 8});
    p.inputs.v = other(p, DType::i32, {2, 2, 12, 6});
  });
}

TEST(RefusalTest, RowsThatAreNotContiguous) {
  for (ConstTensorView AttentionInputs::*member :
       {&AttentionInputs::q, &AttentionInputs::k, &AttentionInputs::v}) {
    expect_refused(full_case(), {"contiguous", "stride"}, [member](Problem& p) {
      const TensorView& view = p.inputs.*member;
      p.inputs.*member =
          other(p, DType::f32, {view.size(0), view.size(1), view.size(3), view.size(2)})
              .transposed(2, 3);
    });
  }
}

TEST(RefusalTest, NullPointers) {
  expect_refused(full_case(), {"q", "null"}, [](Problem& p) { p.inputs.q.data = nullptr; });
  expect_refused(full_case(), {"v", "null"}, [](Problem& p) { p.inputs.v.data = nullptr; });
}

TEST(RefusalTest, TensorsOfTheGpu) {
  for (ConstTensorView AttentionInputs::*member :
       {&AttentionInputs::q, &AttentionInputs::k, &AttentionInputs::v}) {
    expect_refused(full_case(), {"cpu", "cuda"},
                   [member](Problem& p) { (p.inputs.*member).device = Device::cuda; });
  }
}

// The checks read devices and shapes only, so the tensors need no memory.
TEST(RefusalTest, TensorsOfTwoGpus) {
  alignas(64) unsigned char none[64] = {};
  const auto rows = [&](int index) {
    return TensorView::contiguous(none, DType::bf16, {2, 4, 16, 8}, Device(Device::cuda, index));
  };
  const auto make = [&](DType dtype, std::initializer_list<std::int64_t> sizes) {
    return TensorView::contiguous(none, dtype, sizes, Device(Device::cuda, 3));
  };
  AttentionInputs inputs;
  inputs.q = inputs.k = inputs.v = rows(3);
  inputs.centroids = make(DType::f32, {4, 3, 8});
  inputs.logit_scale = make(DType::f32, {4});
  inputs.q_sequences.lengths = inputs.k_sequences.lengths = make(DType::i32, {2});
  const Mechanism mechanism =
      AttentionSpec::parse("routing(clusters=3,window=4)").groups[0].mechanism;
  const auto expect = [](const std::string& message, const char* name) {
    EXPECT_TRUE(message.starts_with("[routing] expected ")) << message;
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_NE(message.find("on cuda:3; got it on cuda:1"), std::string::npos) << message;
  };
  const std::pair<const char*, ConstTensorView AttentionInputs::*> members[] = {
      {"k", &AttentionInputs::k},
      {"v", &AttentionInputs::v},
      {"centroids", &AttentionInputs::centroids},
      {"logit_scale", &AttentionInputs::logit_scale}};
  for (const auto& [name, member] : members) {
    AttentionInputs mixed = inputs;
    (mixed.*member).device.index = 1;
    expect(error_of([&] { attention_saved(mechanism, mixed); }), name);
  }
  AttentionInputs mixed = inputs;
  mixed.k_sequences.lengths.device.index = 1;
  expect(error_of([&] { attention_saved(mechanism, mixed); }), "lengths");
}

TEST(RefusalTest, GpusThatDoNotExist) {
  alignas(64) unsigned char none[64] = {};
  for (const int index : {-1, 99}) {
    AttentionInputs inputs;
    inputs.q = inputs.k = inputs.v =
        TensorView::contiguous(none, DType::f32, {2, 4, 16, 8}, Device(Device::cuda, index));
    const std::string message = error_of([&] { attention_workspace_bytes(FullParams{}, inputs); });
    EXPECT_TRUE(message.starts_with("[full] expected tensors on ")) << message;
    EXPECT_NE(message.find("on cuda:" + std::to_string(index)), std::string::npos) << message;
  }
}

TEST(RefusalTest, ScalesThatAreNotNumbers) {
  for (double scale : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    expect_refused(full_case(), {"scale"}, [scale](Problem& p) { p.inputs.scale = scale; });
  }
}

TEST(RefusalTest, MasksWhereQueriesShareKeys) {
  for (const char* spec : {"clustered(clusters=3)", "i-clustered(clusters=3,topk=4)",
                           "lsh(rounds=1,chunk=4,buckets=4)", "routing(clusters=3,window=4)",
                           "cast(clusters=3,size=4)"}) {
    expect_refused(of(spec), {"mask"}, [](Problem& p) {
      p.inputs.mask = other(p, DType::u8, {2, 4, 12, 12});
    });
  }
}

TEST(RefusalTest, MasksOfAnotherShapeOrType) {
  expect_refused(full_case(), {"mask", "(2, 4, 8, 12)", "(2, 4, 12, 8)"}, [](Problem& p) {
    p.inputs.mask = other(p, DType::u8, {2, 4, 12, 8});
  });
  expect_refused(full_case(), {"mask", "u8", "f32"}, [](Problem& p) {
    p.inputs.mask = other(p, DType::f32, {2, 4, 8, 12});
  });
}

TEST(RefusalTest, LengthsOutOfRange) {
  const auto with = [](DType dtype, const std::vector<double>& values) {
    return [=](Problem& p) {
      p.inputs.q_sequences.lengths = other(p, dtype, {static_cast<std::int64_t>(values.size())});
      write_values(p.inputs.q_sequences.lengths, values);
    };
  };
  expect_refused(full_case(), {"length", "9"}, with(DType::i32, {3, 9}));
  expect_refused(full_case(), {"length", "-1"}, with(DType::i32, {-1, 3}));
  expect_refused(full_case(), {"length", "3"}, with(DType::i32, {1, 2, 3}));
  expect_refused(full_case(), {"length", "i32", "i64"}, with(DType::i64, {1, 2}));
  expect_refused(full_case(), {"13"}, [](Problem& p) {
    p.inputs.k_sequences.lengths = other(p, DType::i32, {2});
    write_values(p.inputs.k_sequences.lengths, {13, 2});
  });
}

Case packed_case() { return {.spec = "full", .B = 1, .N = 20, .Dk = 8}; }

Spoil with_offsets(const std::vector<double>& q, const std::vector<double>& k) {
  return [=](Problem& p) {
    p.inputs.q_sequences.cu_seqlens = other(p, DType::i32, {static_cast<std::int64_t>(q.size())});
    write_values(p.inputs.q_sequences.cu_seqlens, q);
    p.inputs.k_sequences.cu_seqlens = other(p, DType::i32, {static_cast<std::int64_t>(k.size())});
    write_values(p.inputs.k_sequences.cu_seqlens, k);
  };
}

TEST(RefusalTest, OffsetsThatDoNotAscend) {
  expect_refused(packed_case(), {"cu_seqlens", "12", "7"},
                 with_offsets({0, 12, 7, 20}, {0, 5, 7, 20}));
  expect_refused(packed_case(), {"cu_seqlens", "21"}, with_offsets({0, 12, 21}, {0, 5, 20}));
  expect_refused(packed_case(), {"cu_seqlens", "start", "0"},
                 with_offsets({1, 12, 20}, {0, 5, 20}));
  expect_refused(packed_case(), {"sequences", "2", "3"}, with_offsets({0, 12, 20}, {0, 5, 7, 20}));
  expect_refused(packed_case(), {"cu_seqlens", "at least 2 entries"}, with_offsets({0}, {0}));
}

// For tensors that are not in host memory only shapes and types are checked.
TEST(RefusalTest, SequencesOnAGpu) {
  const auto with = [](DType dtype, std::int64_t count, std::int64_t stride) {
    return [=](Problem& p) {
      TensorView& lengths = p.inputs.q_sequences.lengths;
      lengths = other(p, dtype, {count * stride});
      lengths.sizes[0] = count;
      lengths.strides[0] = stride;
      for (TensorView* view :
           std::initializer_list<TensorView*>{&p.inputs.q, &p.inputs.k, &p.inputs.v, &lengths})
        view->device = Device::cuda;
    };
  };
  expect_refused(full_case(), {"lengths", "i32", "i64"}, with(DType::i64, 2, 1));
  expect_refused(full_case(), {"2 lengths", "3"}, with(DType::i32, 3, 1));
  expect_refused(full_case(), {"contiguous lengths", "2"}, with(DType::i32, 2, 2));
}

TEST(RefusalTest, OffsetsOfMoreThanOneBatchEntryAndBesideLengths) {
  expect_refused(full_case(), {"cu_seqlens", "batch"}, with_offsets({0, 4, 8}, {0, 5, 12}));
  expect_refused(packed_case(), {"lengths", "cu_seqlens"}, [](Problem& p) {
    with_offsets({0, 20}, {0, 20})(p);
    p.inputs.q_sequences.lengths = other(p, DType::i32, {1});
  });
}

TEST(RefusalTest, QueryAndKeyLengthsThatDifferWhereATokenIsBoth) {
  for (const auto& [spec, causal] : std::vector<std::pair<const char*, bool>>{
           {"lsh(rounds=1,chunk=4,buckets=4)", false},
           {"routing(clusters=3,window=4)", true},
           {"routing(clusters=3,window=4,share_qk=true)", false},
           {"cast(clusters=3,size=4)", false}}) {
    expect_refused(of(spec, causal), {"as many keys as queries", "5", "12"}, [](Problem& p) {
      p.inputs.k_sequences.lengths = other(p, DType::i32, {2});
      write_values(p.inputs.k_sequences.lengths, {12, 5});
    });
  }
}

TEST(RefusalTest, KeysBesideSharedQueries) {
  for (const char* spec :
       {"lsh(rounds=1,chunk=4,buckets=4)", "routing(clusters=3,window=4,share_qk=true)"}) {
    expect_refused(of(spec), {"k"}, [](Problem& p) {
      p.inputs.k = other(p, DType::f32, {2, 4, 12, 8});
    });
    // A transposed view of q's memory is a different k.
    Case square = of(spec);
    square.H = square.Hkv = 12;
    expect_refused(square, {"k"}, [](Problem& p) { p.inputs.k = p.inputs.q.transposed(1, 2); });
  }
}

TEST(RefusalTest, MissingOrWrongParameters) {
  const char* routing = "routing(clusters=3,window=4)";
  expect_refused(of(routing), {"centroids", "nothing"},
                 [](Problem& p) { p.inputs.centroids = {}; });
  expect_refused(of(routing), {"centroids", "(2, 3, 8)", "(4, 3, 8)"}, [](Problem& p) {
    p.inputs.centroids = other(p, DType::f32, {4, 3, 8});
  });
  expect_refused(of(routing), {"centroids", "(2, 5, 8)"}, [](Problem& p) {
    p.inputs.centroids = other(p, DType::f32, {2, 5, 8});
  });
  expect_refused(of(routing), {"centroids", "f32", "f64"}, [](Problem& p) {
    p.inputs.centroids = other(p, DType::f64, {2, 3, 8});
  });
  expect_refused(of(routing), {"logit_scale", "(4)", "(2)"},
                 [](Problem& p) { p.inputs.logit_scale = other(p, DType::f32, {2}); });
  expect_refused(of(routing), {"gate"}, [](Problem& p) {
    p.inputs.gate = other(p, DType::f32, {2, 12});
  });

  const char* cast = "cast(clusters=3,size=4)";
  expect_refused(of(cast), {"centroids", "nothing"}, [](Problem& p) { p.inputs.centroids = {}; });
  expect_refused(of(cast), {"gate", "nothing"}, [](Problem& p) { p.inputs.gate = {}; });
  expect_refused(of(cast), {"gate", "(2, 12)", "(2, 4)"}, [](Problem& p) {
    p.inputs.gate = other(p, DType::f32, {2, 4});
  });
  expect_refused(of(cast), {"logit_scale"},
                 [](Problem& p) { p.inputs.logit_scale = other(p, DType::f32, {4}); });

  for (const char* spec : {"full", "local(window=3)", "strided(stride=2)", "oracle-top(topk=2)",
                           "clustered(clusters=3)", "i-clustered(clusters=3,topk=2)"}) {
    expect_refused(of(spec), {"centroids"}, [](Problem& p) {
      p.inputs.centroids = other(p, DType::f32, {2, 3, 8});
    });
    expect_refused(of(spec), {"gate"}, [](Problem& p) {
      p.inputs.gate = other(p, DType::f32, {2, 12});
    });
    expect_refused(of(spec), {"logit_scale"},
                   [](Problem& p) { p.inputs.logit_scale = other(p, DType::f32, {4}); });
  }
}

TEST(RefusalTest, CausalInputsForMechanismsWithoutACausalForm) {
  for (const char* spec :
       {"clustered(clusters=3)", "cast(clusters=3,size=4)",
        "i-clustered(clusters=3,topk=2,causal=none)", "routing(clusters=3,membership=balanced)",
        "routing(clusters=3,window=4,causal=none)"}) {
    expect_refused(of(spec), {"causal"}, [](Problem& p) { p.inputs.causal = true; });
  }
  const Problem problem = cases::make_problem(of("i-clustered(clusters=3,topk=2)"), 1);
  AttentionInputs inputs = problem.inputs;
  inputs.causal = true;  // the strict form is not implemented
  EXPECT_TRUE(
      error_of([&] { attention_saved(problem.mechanism, inputs); }).starts_with("[i-clustered] "));
}

TEST(RefusalTest, NearKeysOfOtherSequences) {
  for (const char* spec :
       {"clustered(clusters=3,near=4)", "i-clustered(clusters=3,topk=2,near=4)"}) {
    expect_refused(of(spec), {"as many keys as queries", "12", "9"}, [](Problem& p) {
      p.inputs.k = other(p, DType::f32, {2, 2, 9, 8});
      p.inputs.v = other(p, DType::f32, {2, 2, 9, 8});
    });
  }
  expect_refused(of("clustered(clusters=3,near=4)"), {"causal"},
                 [](Problem& p) { p.inputs.causal = true; });
}

TEST(RefusalTest, ParametersThatContradictEachOther) {
  const auto refused = [](const char* op, const Mechanism& mechanism) {
    Problem problem = cases::make_problem(of("full"), 1);
    const std::string message = error_of([&] { attention_saved(mechanism, problem.inputs); });
    EXPECT_TRUE(message.starts_with(std::string("[") + op + "] ")) << message;
  };
  refused("local", LocalParams{.window = 0});
  refused("strided", StridedParams{.stride = -1});
  refused("oracle-top", OracleTopParams{.topk = 0});
  refused("clustered", ClusteredParams{});
  ClusteredParams bits{};
  bits.clustering.clusters = 4;
  bits.clustering.method = Clustering::hamming;
  bits.clustering.bits = 64;
  refused("clustered", bits);
  ImprovedClusteredParams near{};
  near.clustering.clusters = 4;
  near.near = 4;
  near.mass_grad = false;  // there is no mass
  refused("i-clustered", near);
  near.mass_grad = true;
  near.causal = Causality::leaking;
  refused("i-clustered", near);
  near.causal = Causality::none;
  near.near = -1;
  refused("i-clustered", near);
  refused("lsh", LshParams{.buckets = 5});
  refused("routing", RoutingParams{.clusters = 4});
  RoutingParams balanced{};
  balanced.clusters = 4;
  balanced.window = 8;
  balanced.membership = Membership::balanced;
  refused("routing", balanced);
  refused("cast", CastParams{.clusters = 0, .size = 4});
}

// All outputs of a pass must have the documented shape and type.
TEST(RefusalTest, OutputsOfAnotherShapeOrType) {
  const Problem problem = cases::make_problem(of("i-clustered(clusters=3,topk=4)"), 1);
  const Pass sound = cases::run_forward(problem);
  std::vector<HostTensor> storage;
  storage.reserve(64);
  const auto forward = [&](const AttentionResult& result) {
    return error_of(
        [&] { attention_forward(problem.mechanism, problem.inputs, result, sound.workspace); });
  };
  const auto expect_message = [](const std::string& message, const std::string& part) {
    EXPECT_TRUE(message.starts_with("[i-clustered] ")) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  AttentionResult result = sound.result;
  result.out = {};
  expect_message(forward(result), "out");
  result.out = storage.emplace_back(DType::f32, test::Shape{2, 4, 12, 7});
  expect_message(forward(result), "out");
  result.out = storage.emplace_back(DType::f64, test::Shape{2, 4, 12, 8});
  expect_message(forward(result), "f64");
  for (std::size_t s = 0; s < sound.result.saved.size(); ++s) {
    result = sound.result;
    test::Shape sizes(result.saved[s].sizes, result.saved[s].sizes + result.saved[s].rank);
    ++sizes.back();
    result.saved[s] = storage.emplace_back(result.saved[s].dtype, sizes);
    expect_message(forward(result), "saved");
    --sizes.back();
    result.saved[s] = storage.emplace_back(DType::f64, sizes);
    expect_message(forward(result), "f64");
  }
  result = sound.result;
  result.saved.pop_back();
  expect_message(forward(result), "saved");
  result.saved.clear();
  expect_message(forward(result), "saved");
}

TEST(RefusalTest, GradientsThatDoNotFit) {
  const auto backward = [](const Case& c, const Spoil& spoil,
                           const std::function<void(Pass&, std::vector<HostTensor>&)>& change) {
    Problem problem = cases::make_problem(c, 1);
    Pass run = cases::run_forward(problem);
    std::vector<HostTensor> storage;
    storage.reserve(4);
    spoil(problem);
    change(run, storage);
    return error_of([&] { cases::run_backward(problem, run); });
  };
  const Spoil sound = [](Problem&) {};
  const auto wrong = [](TensorView AttentionGradients::*member, DType dtype, test::Shape sizes) {
    return [=](Pass& run, std::vector<HostTensor>& storage) {
      run.gradients.*member = storage.emplace_back(dtype, sizes);
    };
  };
  const auto none = [](Pass&, std::vector<HostTensor>&) {};
  const auto expect_message = [](const std::string& message, const std::string& op,
                                 const std::string& part) {
    EXPECT_TRUE(message.starts_with("[" + op + "] ")) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  using G = AttentionGradients;
  expect_message(backward(
                     full_case(), [](Problem& p) { p.grad_out = {}; }, none),
                 "full", "grad_out");
  expect_message(backward(
                     full_case(),
                     [](Problem& p) {
                       p.grad_out = other(p, DType::f32, {2, 4, 8, 5});
                     },
                     none),
                 "full", "grad_out");
  expect_message(backward(full_case(), sound, wrong(&G::dq, DType::f32, {2, 4, 8, 7})), "full",
                 "dq");
  expect_message(backward(full_case(), sound, wrong(&G::dq, DType::f64, {2, 4, 8, 8})), "full",
                 "f64");
  expect_message(backward(full_case(), sound, wrong(&G::dk, DType::f32, {2, 4, 12, 8})), "full",
                 "dk");
  expect_message(backward(full_case(), sound, wrong(&G::dv, DType::f32, {2, 2, 12, 8})), "full",
                 "dv");
  expect_message(backward(full_case(), sound, wrong(&G::dgate, DType::f32, {2, 8})), "full",
                 "dgate");
  expect_message(backward(full_case(), sound, wrong(&G::dcentroids, DType::f32, {2, 3, 8})), "full",
                 "dcentroids");
  expect_message(backward(full_case(), sound, wrong(&G::dlogit_scale, DType::f32, {4})), "full",
                 "dlogit_scale");
  for (const char* spec :
       {"lsh(rounds=1,chunk=4,buckets=4)", "routing(clusters=3,window=4,share_qk=true)"}) {
    const std::string op = std::string(spec).substr(0, std::string(spec).find('('));
    expect_message(backward(of(spec), sound, wrong(&G::dk, DType::f32, {2, 4, 12, 8})), op, "dk");
  }
  expect_message(backward(of("routing(clusters=3,window=4)"), sound,
                          wrong(&G::dcentroids, DType::f32, {2, 3, 8})),
                 "routing", "dcentroids");
  expect_message(
      backward(of("routing(clusters=3,window=4)"), sound, wrong(&G::dlogit_scale, DType::f32, {4})),
      "routing", "dlogit_scale");
  expect_message(
      backward(of("cast(clusters=3,size=4)"), sound, wrong(&G::dcentroids, DType::f32, {4, 3, 7})),
      "cast", "dcentroids");
}

TEST(RefusalTest, WorkspacesThatAreTooSmallOrUnaligned) {
  for (const Case& c : {full_case(), of("oracle-top(topk=3)"), of("clustered(clusters=3)"),
                        of("i-clustered(clusters=3,topk=4)"), of("lsh(rounds=1,chunk=4,buckets=4)"),
                        of("routing(clusters=3,window=4)"), of("cast(clusters=3,size=4)")}) {
    SCOPED_TRACE(c.spec);
    const Problem problem = cases::make_problem(c, 1);
    Pass run = cases::run_forward(problem);
    const std::string op = mechanism_name(problem.mechanism);
    const std::int64_t bytes = run.workspace.bytes;
    ASSERT_GT(bytes, 0);
    run.workspace.bytes = 0;
    const auto forward = [&] {
      attention_forward(problem.mechanism, problem.inputs, run.result, run.workspace);
    };
    std::string message = error_of(forward);
    EXPECT_TRUE(message.starts_with("[" + op + "] ")) << message;
    EXPECT_NE(message.find("workspace"), std::string::npos) << message;
    message = error_of([&] { cases::run_backward(problem, run); });
    EXPECT_TRUE(message.starts_with("[" + op + "] ")) << message;
    EXPECT_NE(message.find("workspace"), std::string::npos) << message;
    run.workspace.bytes = bytes;
    run.workspace.data = static_cast<char*>(run.workspace.data) + 8;
    message = error_of(forward);
    EXPECT_NE(message.find("align"), std::string::npos) << message;
    run.workspace.data = nullptr;
    EXPECT_NE(error_of(forward), "");
  }
}

}  // namespace
}  // namespace coterie
