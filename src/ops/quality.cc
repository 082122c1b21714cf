// SPDX-License-Identifier: MIT
#include "coterie/quality.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "core/check.h"
#include "core/parallel.h"
#include "ops/call.h"
#include "ops/full_rows.h"

namespace coterie {

namespace {

using ops::FullHead;
using ops::FullRows;
using ref::Index;
using ref::Matrix;
using ref::Place;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A finished forward pass, with those of its saved tensors that tell what it attended to.
struct Pass {
  Mechanism mechanism;
  AttentionCall call;
  TensorView out;
  TensorView labels;                // of queries: cluster of each
  TensorView q_members, key_lists;  // queries and keys of each cluster
  TensorView centroids;             // of clusters of queries, whose logits replace the queries'
  TensorView kept_lse;              // log-sum-exp of the keys that are attended to exactly
  Index near = 0;                   // width of the blocks of near keys, which are exact; 0: none
  double roundoff;                  // unit roundoff of products and sums
  double stored;                    // relative error of values rounded to the type of the inputs

  Pass(const Mechanism& asked, const AttentionInputs& inputs, const AttentionResult& result,
       bool from_gpu)
      : mechanism(resolve(asked, inputs.causal)),
        call(ops::make_call(mechanism, inputs)),
        out(result.out) {
    ops::check_cpu(call.op, "q", inputs.q);
    COTERIE_CHECK(
        !call.dropout.on(), call.op,
        "the error against full attention is that of a pass without dropout; got dropout ",
        inputs.dropout);
    call.device = from_gpu ? Device::cuda : Device::cpu;
    const SavedLayout layout = ops::saved_layout(mechanism, call);
    call.device = Device::cpu;
    ops::check_saved(call, layout, result.saved, layout.tensors.size());
    ops::check_shape(call.op, "out", out, {call.B, call.H, call.N, call.Dv});
    const auto saved = [&](std::initializer_list<std::string_view> names) {
      for (const std::string_view name : names)
        for (std::size_t t = 0; t < layout.tensors.size(); ++t)
          if (layout.tensors[t].name == name) return result.saved[t];
      return TensorView{};
    };
    labels = saved({"labels"});
    q_members = saved({"q_members", "members"});
    key_lists = saved({"top_keys", "k_members", "q_members", "members"});
    centroids = saved({"centroids"});
    if (takes_mask(mechanism) || saved({"q_offsets"}).present()) kept_lse = saved({"lse"});
    if (const auto* own = std::get_if<ClusteredParams>(&mechanism)) near = own->near;
    if (const auto* own = std::get_if<ImprovedClusteredParams>(&mechanism)) near = own->near;
    const DType dtype = inputs.q.dtype;
    const bool wide = dtype == DType::f64;
    roundoff = wide ? std::ldexp(1, -53) : std::ldexp(1, from_gpu ? -20 : -24);  // parts of tf32
    const bool rounded = dtype == DType::bf16 || dtype == DType::f16;
    stored = rounded ? 4 * std::ldexp(1, dtype == DType::bf16 ? -7 : -10) : 0;
  }

  bool has_mass() const { return kept_lse.present() || key_lists.present() || near > 0; }
  bool has_bound() const { return kept_lse.present() || centroids.present(); }
};

// The value of query i of an item in a tensor (B, H, N).
double value_at(const TensorView& tensor, const Place& place, Index i) {
  return read_values(place.queries(tensor).narrowed(2, i, 1))[0];
}

// Entries of the lists (clusters, width) of an item and head in a tensor (items, H, C, width).
const std::int32_t* lists_of(const TensorView& tensor, const Place& place) {
  return static_cast<const std::int32_t*>(place.item_head(tensor).data);
}

double norm_of(const std::vector<double>& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  return std::sqrt(squares);
}

std::vector<double> distances_from_mean(const Matrix<double>& x) {
  std::vector<double> mean(x.cols, 0.0), distances;
  for (Index i = 0; i < x.rows; ++i)
    for (Index d = 0; d < x.cols; ++d) mean[d] += x(i, d) / static_cast<double>(x.rows);
  for (Index i = 0; i < x.rows; ++i) {
    double squares = 0;
    for (Index d = 0; d < x.cols; ++d) squares += std::pow(x(i, d) - mean[d], 2);
    distances.push_back(std::sqrt(squares));
  }
  return distances;
}

// An item and head of a pass, and what its bounds depend on.
struct Head {
  const Pass& pass;
  FullHead full;
  double largest;             // norm of a value
  std::vector<double> radii;  // distances of the values from their mean
  double radius;              // the largest of them
  Matrix<double> keys;        // of passes with centroids

  Head(const Pass& of_pass, const Place& place)
      : pass(of_pass),
        full(pass.mechanism, pass.call, place),
        largest(0),
        radii(distances_from_mean(full.v)),
        radius(*std::max_element(radii.begin(), radii.end())) {
    for (Index j = 0; j < full.v.rows; ++j) {
      const double* const row = &full.v.values[j * full.v.cols];
      largest = std::max(largest, norm_of({row, row + full.v.cols}));
    }
    if (pass.centroids.present()) keys = ref::read_matrix<double>(place.keys(pass.call.k));
  }
};

// Estimated L1 distance between the exact weights of a row and the mechanism's, due to rounding.
// Errors of a sum of n terms are independent and grow as sqrt(n), in logits of this size and in
// sums over keys; both are rounded in the mechanism and in its log-sum-exp.
double rounding_of(const Head& head, const FullRows& rows, Index r) {
  const auto root = [](Index terms) { return std::sqrt(static_cast<double>(terms + 4)); };
  return 12 * head.pass.roundoff *
         (root(head.pass.call.Dk) * rows.size[r] + root(head.full.place.k.length));
}

// The clusters of query i.
std::vector<Index> clusters_of(const Pass& pass, const Place& place, Index i) {
  if (pass.labels.present()) return {static_cast<Index>(value_at(pass.labels, place, i))};
  std::vector<Index> clusters;
  const std::int32_t* const members = lists_of(pass.q_members, place);
  const Index width = pass.q_members.size(3);
  for (Index c = 0; c < pass.q_members.size(2); ++c)
    if (std::count(members + c * width, members + (c + 1) * width, i) > 0) clusters.push_back(c);
  return clusters;
}

// Which keys are near query i or listed for its cluster.
std::vector<bool> listed_keys(const Head& head, Index i) {
  const Place& place = head.full.place;
  const Index near = head.pass.near;
  std::vector<bool> listed(place.k.length, false);
  if (near > 0) {  // the own block and the two beside it
    const Index end = std::min(place.k.length, (i / near + 2) * near);
    for (Index key = std::max<Index>(0, i / near - 1) * near; key < end; ++key) listed[key] = true;
  }
  if (!head.pass.key_lists.present()) return listed;
  const std::int32_t* const keys = lists_of(head.pass.key_lists, place);
  const Index width = head.pass.key_lists.size(3);
  for (const Index c : clusters_of(head.pass, place, i))
    for (const std::int32_t* key = keys + c * width; key < keys + (c + 1) * width; ++key)
      if (*key >= 0) listed[*key] = true;
  return listed;
}

double listed_mass(const Head& head, const FullRows& rows, Index r, Index i) {
  const std::vector<bool> listed = listed_keys(head, i);
  double mass = 0;
  for (std::size_t key = 0; key < listed.size(); ++key)
    if (listed[key]) mass += rows.weights(r, key);
  return mass;
}

double mass_of(const Head& head, const FullRows& rows, Index r, Index i) {
  if (std::isinf(rows.lse[r])) return kNaN;
  if (!head.pass.kept_lse.present()) return listed_mass(head, rows, r, i);
  const double kept = value_at(head.pass.kept_lse, head.full.place, i);
  // A query without other selected keys attends to its own, which has no weight in full attention.
  if (std::abs(kept - rows.own[r]) <= rounding_of(head, rows, r)) return 0;
  return std::exp(kept - rows.lse[r]);
}

// Logits of a query or centroid with all keys, or with some of them and -inf elsewhere.
std::vector<double> logits_of(const Head& head, const TensorView& row,
                              const std::vector<bool>* some = nullptr) {
  const std::vector<double> x = read_values(row);
  std::vector<double> logits(head.keys.rows, -std::numeric_limits<double>::infinity());
  for (Index j = 0; j < head.keys.rows; ++j) {
    if (some && !(*some)[j]) continue;
    double sum = 0;
    for (std::size_t d = 0; d < x.size(); ++d) sum += x[d] * head.keys(j, d);
    logits[j] = head.full.scale * sum;
  }
  return logits;
}

void softmax(std::vector<double>& row) {
  const double top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (double& value : row) sum += value = std::exp(value - top);
  for (double& value : row) value /= sum;
}

// The weights of query i in clustered attention (docs/mechanisms.md): those of its centroid, where
// listed keys have the query's own logits.
std::vector<double> clustered_weights(const Head& head, Index i) {
  const Place& place = head.full.place;
  const auto label = std::max<Index>(0, static_cast<Index>(value_at(head.pass.labels, place, i)));
  std::vector<double> weights =
      logits_of(head, place.item_head(head.pass.centroids).narrowed(2, label, 1));
  const std::vector<bool> listed = listed_keys(head, i);
  if (std::count(listed.begin(), listed.end(), true) == 0) {
    softmax(weights);
    return weights;
  }
  std::vector<double> own =
      logits_of(head, place.queries(head.pass.call.inputs.q).narrowed(2, i, 1), &listed);
  if (head.pass.near > 0) {
    for (std::size_t j = 0; j < listed.size(); ++j)
      if (listed[j]) weights[j] = own[j];
    softmax(weights);
    return weights;
  }
  softmax(weights);
  softmax(own);
  double mass = 0;
  for (std::size_t j = 0; j < listed.size(); ++j) mass += listed[j] ? weights[j] : 0;
  for (std::size_t j = 0; j < listed.size(); ++j)
    if (listed[j]) weights[j] = mass * own[j];
  return weights;
}

// The sum of |w_j - w'_j| |v_j - mean v| over keys bounds the error of weights w', because both
// sums of weights are 1.
double bound_of(const Head& head, const FullRows& rows, Index r, Index i) {
  double bound = 0;
  if (head.pass.centroids.present()) {
    const std::vector<double> weights = clustered_weights(head, i);
    for (std::size_t j = 0; j < weights.size(); ++j)
      bound += std::abs(weights[j] - rows.weights(r, j)) * head.radii[j];
  } else if (!std::isinf(rows.lse[r])) {
    // Weights w on the kept keys become w / mass: their L1 distance from w is 2 (1 - mass). A row
    // without kept keys is 0.
    const double mass = mass_of(head, rows, r, i);
    const bool empty = std::isinf(value_at(head.pass.kept_lse, head.full.place, i));
    bound = empty ? head.largest : 2 * std::max(0.0, 1 - mass) * head.radius;
  }
  return bound + (rounding_of(head, rows, r) + head.pass.stored) * head.largest;
}

// Rows of one item that are in the sample, and their numbers there.
struct Sampled {
  std::vector<Index> rows, numbers;
};

// The sample is evenly spaced among the rows of an item or, if items are packed, among all rows.
Sampled sampled_rows(const AttentionCall& call, const Span& item, Index count) {
  const bool packed = call.inputs.q_sequences.cu_seqlens.present();
  const Index last = (packed ? call.N : item.length) - 1, steps = std::max<Index>(count - 1, 1);
  Sampled sampled;
  for (Index number = 0; number < count; ++number) {
    const Index i = (number * last + steps / 2) / steps - item.begin;
    if (i < 0 || i >= item.length) continue;
    sampled.rows.push_back(i);
    sampled.numbers.push_back(number);
  }
  return sampled;
}

// Writes the values of row r of `rows`, query i of the item, to place `at` of the results.
void measure(const Head& head, const FullRows& rows, Index r, Index i, Index at,
             AttentionQuality& quality) {
  std::vector<double> row = read_values(head.full.place.queries(head.pass.out).narrowed(2, i, 1));
  for (Index d = 0; d < head.pass.call.Dv; ++d) row[d] -= rows.out(r, d);
  quality.error[at] = norm_of(row);
  for (Index d = 0; d < head.pass.call.Dv; ++d) row[d] = rows.out(r, d);
  quality.norm[at] = norm_of(row);
  if (!quality.mass.empty()) quality.mass[at] = mass_of(head, rows, r, i);
  if (!quality.bound.empty()) quality.bound[at] = bound_of(head, rows, r, i);
}

// Calls body(full attention of a tile of `rows`, its first, its end) for all tiles, in parallel.
template <class Body>
void for_tiles(const FullHead& head, const std::vector<Index>& rows, const Body& body) {
  const auto count = static_cast<Index>(rows.size());
  parallel_for((count + ops::kFullTile - 1) / ops::kFullTile, [&](Index tile, int) {
    const Index begin = tile * ops::kFullTile, end = std::min(count, begin + ops::kFullTile);
    body(ops::full_rows(head, {rows.begin() + begin, rows.begin() + end}), begin, end);
  });
}

}  // namespace

AttentionQuality attention_quality(const Mechanism& mechanism, const AttentionInputs& inputs,
                                   const AttentionResult& result, std::int64_t rows,
                                   bool from_gpu) {
  const Pass pass(mechanism, inputs, result, from_gpu);
  const AttentionCall& call = pass.call;
  COTERIE_CHECK(rows >= 1, call.op, "expected at least 1 row; got ", rows);
  const CallThreads threads;
  const Index count = std::min(rows, call.N), total = call.B * call.H * count;
  const auto values = [](Index size, double value) { return std::vector<double>(size, value); };
  AttentionQuality quality{count, values(total, 0), values(total, 0),
                           values(pass.has_mass() ? total : 0, kNaN),
                           values(pass.has_bound() ? total : 0, 0)};
  for (const Place& place : ref::make_places(call.op, inputs)) {
    const Sampled sampled = sampled_rows(call, place.q, count);
    if (place.k.length == 0 || sampled.rows.empty()) continue;
    const Head head(pass, place);
    const Index first = (place.q.batch * call.H + place.head) * count;
    for_tiles(head.full, sampled.rows, [&](const FullRows& full, Index begin, Index end) {
      for (Index r = begin; r < end; ++r)
        measure(head, full, r - begin, sampled.rows[r], first + sampled.numbers[r], quality);
    });
  }
  return quality;
}

std::vector<double> full_attention_weights(const Mechanism& mechanism,
                                           const AttentionInputs& inputs) {
  const Mechanism resolved = resolve(mechanism, inputs.causal);
  const AttentionCall call = ops::make_call(resolved, inputs);
  ops::check_cpu(call.op, "q", inputs.q);
  const CallThreads threads;
  std::vector<double> weights(call.B * call.H * call.N * call.S);
  for (const Place& place : ref::make_places(call.op, inputs)) {
    if (place.k.length == 0) continue;
    const FullHead head(resolved, call, place);
    std::vector<Index> rows(place.q.length);
    std::iota(rows.begin(), rows.end(), 0);
    const Index first = (place.q.batch * call.H + place.head) * call.N + place.q.begin;
    for_tiles(head, rows, [&](const FullRows& full, Index begin, Index end) {
      for (Index r = begin; r < end; ++r)
        std::copy_n(&full.weights.values[(r - begin) * full.weights.cols], place.k.length,
                    &weights[(first + r) * call.S + place.k.begin]);
    });
  }
  return weights;
}

}  // namespace coterie
