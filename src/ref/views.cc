// SPDX-License-Identifier: MIT
#include "ref/views.h"

#include "core/check.h"

namespace coterie::ref {

namespace {

TensorView one_head(const Place& place, const TensorView& tensor) {
  return tensor.narrowed(1, place.head / (place.num_heads / tensor.size(1)), 1);
}

}  // namespace

TensorView Place::queries(const TensorView& tensor) const {
  return one_head(*this, tensor).narrowed(0, q.batch, 1).narrowed(2, q.begin, q.length);
}

TensorView Place::keys(const TensorView& tensor) const {
  return one_head(*this, tensor).narrowed(0, k.batch, 1).narrowed(2, k.begin, k.length);
}

TensorView Place::item_head(const TensorView& tensor) const {
  return one_head(*this, tensor).narrowed(0, tensor.size(0) == 1 ? 0 : item, 1);
}

std::vector<Place> make_places(const char* op, const AttentionInputs& inputs) {
  const std::vector<Item> items = make_items(op, inputs);
  std::vector<Place> places;
  for (std::size_t item = 0; item < items.size(); ++item)
    for (Index head = 0; head < inputs.q.size(1); ++head)
      places.push_back({.item = static_cast<Index>(item),
                        .head = head,
                        .num_heads = inputs.q.size(1),
                        .num_kv_heads = inputs.v.size(1),
                        .q = items[item].q,
                        .k = items[item].k,
                        .part = inputs.part});
  return places;
}

std::vector<Place> make_places(const char* op, const Sequences& sequences, const TensorView& x,
                               Index num_heads) {
  const std::vector<Span> spans = make_spans(op, sequences, x.size(0), x.size(2));
  std::vector<Place> places;
  for (std::size_t item = 0; item < spans.size(); ++item)
    for (Index head = 0; head < num_heads; ++head)
      places.push_back({.item = static_cast<Index>(item),
                        .head = head,
                        .num_heads = num_heads,
                        .num_kv_heads = x.size(1),
                        .q = spans[item],
                        .k = spans[item]});
  return places;
}

std::vector<Index> read_indices(const TensorView& tensor) {
  std::vector<Index> indices;
  for (double value : read_values(tensor)) indices.push_back(static_cast<Index>(value));
  return indices;
}

void write_indices(const TensorView& tensor, const std::vector<Index>& indices) {
  write_values(tensor, {indices.begin(), indices.end()});
}

Lists read_lists(const TensorView& tensor) {
  const Matrix<double> values = read_matrix<double>(tensor);
  Lists lists(static_cast<std::size_t>(values.rows));
  for (Index row = 0; row < values.rows; ++row)
    for (Index slot = 0; slot < values.cols; ++slot)
      if (values(row, slot) >= 0) lists[row].push_back(static_cast<Index>(values(row, slot)));
  return lists;
}

void write_lists(const TensorView& tensor, const Lists& lists) {
  Matrix<double> values(static_cast<Index>(lists.size()), tensor.size(tensor.rank - 1));
  for (Index row = 0; row < values.rows; ++row) {
    COTERIE_CHECK(static_cast<Index>(lists[row].size()) <= values.cols, "ref",
                  "expected lists of at least ", lists[row].size(), " entries; got ",
                  describe(tensor));
    for (Index slot = 0; slot < values.cols; ++slot)
      values(row, slot) = slot < static_cast<Index>(lists[row].size())
                              ? static_cast<double>(lists[row][slot])
                              : -1.0;
  }
  write_matrix(tensor, values);
}

std::vector<std::uint64_t> read_codes(const TensorView& tensor) {
  std::vector<std::uint64_t> codes(static_cast<std::size_t>(tensor.count()));
  for (std::size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<const std::uint64_t*>(
        tensor.data)[static_cast<Index>(i) * tensor.stride(tensor.rank - 1)];
  return codes;
}

void write_codes(const TensorView& tensor, const std::vector<std::uint64_t>& codes) {
  for (std::size_t i = 0; i < codes.size(); ++i)
    static_cast<std::uint64_t*>(
        tensor.data)[static_cast<Index>(i) * tensor.stride(tensor.rank - 1)] = codes[i];
}

}  // namespace coterie::ref
