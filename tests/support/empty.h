// SPDX-License-Identifier: MIT
// Problems without queries, without keys, without both and without batch entries, for every
// mechanism that accepts them. Tensors without elements have a null pointer.
#pragma once

#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/problem.h"

namespace coterie::test {

enum class Missing : std::uint8_t { queries, keys, rows, batches };

struct EmptyCase {
  cases::Case problem;
  Missing missing;
};

inline std::vector<EmptyCase> empty_cases() {
  struct Line {
    const char *name, *spec, *shape;
    bool cross = true;  // may have more keys than queries
  };
  const Line lines[] = {
      {"full", "full", ""},
      {"full_causal", "full", "causal"},
      {"local", "local(window=6)", ""},
      {"local_long", "local(window=160)", "causal"},
      {"strided", "strided(stride=3)", ""},
      {"oracle_top", "oracle-top(topk=4)", ""},
      {"clustered", "clustered(clusters=3)", ""},
      {"clustered_hamming", "clustered(clusters=3,clustering=hamming)", ""},
      {"improved", "i-clustered(clusters=3,topk=4)", ""},
      {"improved_hamming_keys", "i-clustered(clusters=3,topk=4,clustering=hamming-keys)", ""},
      {"improved_causal", "i-clustered(clusters=3,topk=4,causal=reference)", "causal"},
      {"routing", "routing(clusters=3,window=4)", ""},
      {"routing_paper", "routing(clusters=3,window=4,causal=paper)", "causal"},
      {"routing_balanced", "routing(clusters=3,membership=balanced)", ""},
      {"routing_strict", "routing(clusters=3,window=4)", "causal logit_scale", false},
      {"routing_several", "routing(clusters=3,window=4,queries_in=2)", "causal", false},
      {"routing_shared", "routing(clusters=3,window=4,share_qk=true)", "", false},
      {"lsh", "lsh(rounds=2,chunk=4,buckets=4)", "", false},
      {"lsh_mean", "lsh(rounds=2,chunk=4,buckets=4,combine=mean)", "causal", false},
      {"cast", "cast(clusters=3,size=4)", "", false},
      {"cast_single", "cast(clusters=3,size=4,mode=single)", "", false},
      {"cast_laplace", "cast(clusters=3,size=4,activation=laplace)", "", false},
  };
  const std::pair<const char*, Missing> all[] = {{"without_queries", Missing::queries},
                                                 {"without_keys", Missing::keys},
                                                 {"without_rows", Missing::rows},
                                                 {"without_batches", Missing::batches}};
  std::vector<EmptyCase> found;
  for (const Line& line : lines)
    for (const char* dtype : {"f32", "bf16"})
      for (const auto& [name, missing] : all) {
        if (!line.cross && (missing == Missing::queries || missing == Missing::keys)) continue;
        const std::string full_name = std::string(line.name) + "_" + dtype + "_" + name;
        const std::string type = std::string(dtype) == "f32" ? "" : dtype;
        found.push_back({cases::make_case(full_name, line.spec,
                                          std::string("B2 H4:2 N9 D16 ") + line.shape + " " + type),
                         missing});
      }
  return found;
}

inline cases::Problem empty_problem(const EmptyCase& c) {
  cases::Problem problem = cases::make_problem(c.problem, 1);
  const auto cut = [](TensorView& view, int dim) {
    if (!view.present()) return;
    view = view.narrowed(dim, 0, 0);
    view.data = nullptr;
  };
  AttentionInputs& inputs = problem.inputs;
  const bool batches = c.missing == Missing::batches, rows = batches || c.missing == Missing::rows;
  if (rows || c.missing == Missing::queries) {
    cut(inputs.q, batches ? 0 : 2);
    cut(problem.grad_out, batches ? 0 : 2);
    cut(inputs.gate, batches ? 0 : 1);
  }
  if (rows || c.missing == Missing::keys) {
    cut(inputs.k, batches ? 0 : 2);
    cut(inputs.v, batches ? 0 : 2);
  }
  return problem;
}

}  // namespace coterie::test
