// SPDX-License-Identifier: MIT
// The attention spec. An accepted spec prints as a text that parses to the same spec.
#include "coterie/spec.h"

#include <stdexcept>

#include "fuzz/fuzz.h"

namespace {

void consume(const std::string& input) {
  const std::string text = coterie::AttentionSpec::parse(input).to_string();
  if (coterie::AttentionSpec::parse(text).to_string() != text) {
    throw std::runtime_error("does not print as it parses: " + text);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return coterie::fuzz::check_input(consume, data, size);
}

coterie::fuzz::Target coterie::fuzz::target() {
  return {
      .examples = {"full", "i-clustered(clusters=100,topk=32,causal=strict)",
                   "4*local(window=256,kind=blocked)+4*routing(clusters=16,window=256,decay=0.99)",
                   "lsh(rounds=4,chunk=32,buckets=64,combine=mean)", "strided(stride=8)",
                   "cast(clusters=8,size=64,mode=single,activation=laplace)",
                   "oracle-top(topk=4,positions=none)",
                   "clustered(clusters=7,clustering=hamming,iterations=3,bits=63,hash_bias=false)"},
      .words = {"+", "*", "(", ")", "=", ",", " ", "clusters=", "true", "2*full", "topk",
                "window=1"}};
}
