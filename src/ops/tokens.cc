// SPDX-License-Identifier: MIT
#include "ops/tokens.h"

#include <string>

#include "core/check.h"
#include "cuda/api/entry.h"
#include "ops/call.h"

namespace coterie::ops {

namespace {

void check_rows_of_tokens(const char* op, const TensorView& x, const Sequences& sequences) {
  check_rows(op, "x", x, 4, x.device);
  COTERIE_CHECK(is_floating(x.dtype), op, "expected x of type f32, f64, bf16 or f16; got ",
                describe(x));
  COTERIE_CHECK(x.size(1) >= 1 && x.size(3) >= 1, op,
                "expected at least one head and one element per row; got x ", describe(x));
  for (const TensorView* ints : {&sequences.lengths, &sequences.cu_seqlens})
    COTERIE_CHECK(!ints->present() || ints->device == x.device, op,
                  "expected lengths and cu_seqlens on ", describe(x.device), "; got them on ",
                  describe(ints->device));
}

}  // namespace

std::vector<Span> check_tokens(const char* op, const TensorView& x, const Sequences& sequences) {
  check_cpu(op, "x", x);
  check_rows_of_tokens(op, x, sequences);
  return make_spans(op, sequences, x.size(0), x.size(2));
}

std::vector<Span> check_tokens_anywhere(const char* op, const TensorView& x,
                                        const Sequences& sequences) {
  if (x.device == Device::cpu) return check_tokens(op, x, sequences);
  check_rows_of_tokens(op, x, sequences);
  check_sequences(op, sequences, x.size(0));
  const std::string refusal = cuda::refuse_tokens(x);
  COTERIE_CHECK(refusal.empty(), op, "expected tensors on the cpu; got tensors on cuda, and ",
                refusal);
  return {};
}

void check_labels(const char* op, const TensorView& x, const TensorView& labels) {
  check_dense(op, "labels", labels, DType::i32, {x.size(0), x.size(1), x.size(2)}, x.device);
}

void check_head_count(const char* op, const TensorView& x, std::int64_t centroid_heads) {
  COTERIE_CHECK(centroid_heads >= 1 && x.size(1) % centroid_heads == 0, op,
                "expected a number of centroid heads that divides the ", x.size(1),
                " heads of x; got ", centroid_heads);
}

}  // namespace coterie::ops
