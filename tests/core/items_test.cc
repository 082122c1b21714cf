// SPDX-License-Identifier: MIT
// The sequences of a call, also for callers that bypass the checks of the operations.
#include "core/items.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coterie/error.h"

namespace coterie {
namespace {

TEST(ItemsTest, QueriesAndKeysHaveAsManySequences) {
  std::vector<float> rows(20);
  std::vector<std::int32_t> two = {0, 12, 20}, three = {0, 5, 7, 20};
  AttentionInputs inputs;
  inputs.q = inputs.k = inputs.v = TensorView::contiguous(rows.data(), DType::f32, {1, 1, 20, 1});
  inputs.q_sequences.cu_seqlens = TensorView::contiguous(two.data(), DType::i32, {3});
  inputs.k_sequences = inputs.q_sequences;
  EXPECT_EQ(make_items("test", inputs).size(), 2u);
  inputs.k_sequences.cu_seqlens = TensorView::contiguous(three.data(), DType::i32, {4});
  try {
    make_items("test", inputs);
    FAIL() << "two query sequences and three key sequences were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "[test] expected as many key sequences as query sequences; got 3 and 2");
  }
}

}  // namespace
}  // namespace coterie
