// SPDX-License-Identifier: MIT
// Small models of every mechanism.
#pragma once

#include <string>
#include <vector>

#include "coterie/torch/models.h"

namespace coterie::torch_api {

// Specs for four heads and sequences of about twenty tokens.
inline std::vector<std::string> every_spec(bool causal) {
  std::vector<std::string> specs = {
      "full",
      "full(positions=relative)",
      "local(window=5)",
      "local(window=4,kind=blocked)",
      "strided(stride=3)",
      "oracle-top(topk=4,positions=relative)",
      "routing(clusters=3,window=6)",
      "routing(clusters=3,window=6,share_qk=true)",
      "2*local(window=4)+2*routing(clusters=3,window=6,share_qk=true,positions=rotary)"};
  if (causal) {
    specs.insert(specs.end(), {"routing(clusters=3,window=2,queries_in=2,include_self=true)",
                               "routing(clusters=4,window=3,self=demote,queries_in=3)"});
  } else {
    specs.insert(specs.end(),
                 {"clustered(clusters=4)", "i-clustered(clusters=4,topk=6)",
                  "i-clustered(clusters=3,topk=5,clustering=hamming,positions=relative)",
                  "lsh(rounds=2,chunk=8,buckets=4)", "cast(clusters=3,size=8)",
                  "1*full+1*lsh(rounds=1,chunk=8,buckets=4)+2*cast(clusters=3,size=8)"});
  }
  return specs;
}

inline TransformerOptions transformer_options(const std::string& spec, bool causal) {
  return {.dim = 32,
          .layers = 2,
          .heads = 4,
          .ffn = 48,
          .attention = {AttentionSpec::parse(spec)},
          .causal = causal};
}

inline LanguageModelOptions language_model_options(const std::string& spec, bool causal) {
  return {.input = {.vocabulary = 11}, .transformer = transformer_options(spec, causal)};
}

}  // namespace coterie::torch_api
