// SPDX-License-Identifier: MIT
#include "core/items.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "coterie/tensor.h"

namespace coterie {

ItemList::ItemList(const Item* items, std::int64_t count)
    : data_(new Item[static_cast<std::size_t>(count)]), count_(count) {
  std::copy_n(items, count, data_);
}

void ItemList::swap(ItemList& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(count_, other.count_);
}

std::int64_t item_count(const Sequences& sequences, std::int64_t batches) {
  return sequences.cu_seqlens.present() ? sequences.cu_seqlens.size(0) - 1 : batches;
}

namespace {

std::int64_t int_at(const TensorView& ints, std::int64_t index) {
  return static_cast<const std::int32_t*>(ints.data)[index * ints.stride(0)];
}

void check_ints(const char* op, const char* name, const TensorView& ints) {
  COTERIE_CHECK(ints.dtype == DType::i32 && ints.rank == 1, op, "expected ", name,
                " to be i32 with one dimension; got ", describe(ints));
  COTERIE_CHECK(ints.device == Device::cpu || ints.size(0) <= 1 || ints.stride(0) == 1, op,
                "expected contiguous ", name, " on cuda; got a stride of ", ints.stride(0));
}

// Reads sequences that check_sequences accepted, and checks the numbers in them.
std::vector<Span> read_spans(const char* op, const Sequences& sequences, std::int64_t batches,
                             std::int64_t rows) {
  const TensorView &lengths = sequences.lengths, &cu_seqlens = sequences.cu_seqlens;
  std::vector<Span> spans;
  if (cu_seqlens.present()) {
    COTERIE_CHECK(int_at(cu_seqlens, 0) == 0, op, "expected cu_seqlens to start with 0; got ",
                  int_at(cu_seqlens, 0));
    for (std::int64_t t = 0; t + 1 < cu_seqlens.size(0); ++t) {
      const std::int64_t begin = int_at(cu_seqlens, t), end = int_at(cu_seqlens, t + 1);
      COTERIE_CHECK(begin <= end && end <= rows, op, "expected cu_seqlens to ascend to at most ",
                    rows, "; got ", begin, " then ", end);
      spans.push_back({0, begin, end - begin});
    }
    return spans;
  }
  for (std::int64_t b = 0; b < batches; ++b) {
    const std::int64_t length = lengths.present() ? int_at(lengths, b) : rows;
    COTERIE_CHECK(0 <= length && length <= rows, op, "expected lengths between 0 and ", rows,
                  "; got ", length, " for item ", b);
    spans.push_back({b, 0, length});
  }
  return spans;
}

}  // namespace

void check_sequences(const char* op, const Sequences& sequences, std::int64_t batches) {
  const TensorView &lengths = sequences.lengths, &cu_seqlens = sequences.cu_seqlens;
  COTERIE_CHECK(!lengths.present() || !cu_seqlens.present(), op,
                "expected lengths or cu_seqlens; got both");
  if (cu_seqlens.present()) {
    check_ints(op, "cu_seqlens", cu_seqlens);
    COTERIE_CHECK(batches == 1, op, "expected a batch of 1 with cu_seqlens; got ", batches);
    COTERIE_CHECK(
        cu_seqlens.size(0) >= 2, op,
        "expected cu_seqlens with at least 2 entries, the start and end of a sequence; got ",
        describe(cu_seqlens));
  }
  if (lengths.present()) {
    check_ints(op, "lengths", lengths);
    COTERIE_CHECK(lengths.size(0) == batches, op, "expected ", batches, " lengths; got ",
                  lengths.size(0));
  }
}

void check_items(const char* op, const AttentionInputs& inputs) {
  check_sequences(op, inputs.q_sequences, inputs.q.size(0));
  check_sequences(op, inputs.k_sequences, inputs.v.size(0));
  const std::int64_t q = item_count(inputs.q_sequences, inputs.q.size(0));
  const std::int64_t k = item_count(inputs.k_sequences, inputs.v.size(0));
  COTERIE_CHECK(q == k, op, "expected as many key sequences as query sequences; got ", k, " and ",
                q);
}

std::vector<Span> make_spans(const char* op, const Sequences& sequences, std::int64_t batches,
                             std::int64_t rows) {
  check_sequences(op, sequences, batches);
  return read_spans(op, sequences, batches, rows);
}

std::vector<Item> make_items(const char* op, const AttentionInputs& inputs) {
  const TensorView& v = inputs.v;
  check_items(op, inputs);
  const std::vector<Span> q =
      read_spans(op, inputs.q_sequences, inputs.q.size(0), inputs.q.size(2));
  const std::vector<Span> k = read_spans(op, inputs.k_sequences, v.size(0), v.size(2));
  std::vector<Item> items;
  for (std::size_t t = 0; t < q.size(); ++t) items.push_back({q[t], k[t]});
  return items;
}

}  // namespace coterie
