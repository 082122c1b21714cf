// SPDX-License-Identifier: MIT
#include "ops/full_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kernels/kernels.h"
#include "ref/normalise.h"

namespace coterie::ops {

namespace {

using ref::Index;
using ref::Matrix;

bool demotes_own_key(const Mechanism& mechanism) {
  if (const auto* routing = std::get_if<RoutingParams>(&mechanism))
    return routing->self == SelfAttention::demote;
  const auto* lsh = std::get_if<LshParams>(&mechanism);
  return lsh && lsh->combine == LshCombine::lse;
}

// Rows whose products are the logits, and the norms of the terms that they are computed from.
struct LogitRows {
  Matrix<double> x;
  std::vector<double> sizes;
};

LogitRows logit_rows(RowForm form, const Matrix<double>& x, bool keys) {
  LogitRows rows{form == RowForm::normalised ? ref::normalised_rows(x) : x, {}};
  for (Index i = 0; i < x.rows; ++i) {
    double squares = 0;
    for (Index d = 0; d < x.cols; ++d) squares += x(i, d) * x(i, d);
    double size = std::sqrt(squares);
    if (form == RowForm::normalised) size /= ref::moments_of_row(x, i).sigma;
    if (form == RowForm::unit_keys && keys && size > 0) {  // rows of zeros stay
      for (Index d = 0; d < x.cols; ++d) rows.x(i, d) /= size;
      size = 1;
    }
    rows.sizes.push_back(size);
  }
  return rows;
}

// c = a b; the columns of b are padded.
void multiply(const Matrix<double>& a, const Matrix<double>& b, Index terms, Matrix<double>& c) {
  cpu::kernels<double>().multiply({a.rows, b.cols, terms, a.values.data(), a.cols, 1,
                                   b.values.data(), b.cols, c.values.data(), c.cols, false});
}

// The keys that query i may attend to, [0, end), without `left_out` and those that are masked.
struct Allowed {
  Index end = 0, left_out = -1;
  std::vector<double> mask;  // empty: all

  Allowed(const FullHead& head, Index i) {
    const Index keys = head.place.k.length, own = i + keys - head.place.q.length;
    end = head.call.causal ? std::clamp<Index>(own + 1, 0, keys) : keys;
    if (head.demotes && own >= 0 && own < end && end > 1) left_out = own;
    if (!head.call.inputs.mask.present()) return;
    mask = read_values(head.place.queries(head.call.inputs.mask)
                           .narrowed(2, i, 1)
                           .narrowed(3, head.place.k.begin, keys));
  }
  bool operator()(Index j) const { return j != left_out && (mask.empty() || mask[j] != 0); }
};

// Logits become weights; returns their log-sum-exp.
double softmax(const Allowed& allowed, Index columns, double* row) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  double top = kNone, sum = 0;
  for (Index j = 0; j < allowed.end; ++j)
    if (allowed(j)) top = std::max(top, row[j]);
  for (Index j = 0; j < allowed.end; ++j) {
    row[j] = allowed(j) ? std::exp(row[j] - top) : 0;
    sum += row[j];
  }
  std::fill(row + allowed.end, row + columns, 0.0);
  if (sum == 0) return kNone;
  for (Index j = 0; j < allowed.end; ++j) row[j] /= sum;
  return top + std::log(sum);
}

}  // namespace

FullHead::FullHead(const Mechanism& mechanism, const AttentionCall& of_call,
                   const ref::Place& of_place)
    : call(of_call),
      place(of_place),
      form(row_form(mechanism)),
      demotes(demotes_own_key(mechanism)),
      scale(of_call.scale),
      k(of_call.Dk, cpu::padded(of_place.k.length)),
      v(of_place.k.length, cpu::padded(of_call.Dv)) {
  if (call.inputs.logit_scale.present()) scale *= read_values(call.inputs.logit_scale)[place.head];
  const LogitRows keys = logit_rows(form, ref::read_matrix<double>(place.keys(call.k)), true);
  const Matrix<double> values = ref::read_matrix<double>(place.keys(call.inputs.v));
  for (Index j = 0; j < place.k.length; ++j) {
    longest = std::max(longest, keys.sizes[j]);
    for (Index d = 0; d < call.Dk; ++d) k(d, j) = keys.x(j, d);
    for (Index d = 0; d < call.Dv; ++d) v(j, d) = values(j, d);
  }
}

FullRows full_rows(const FullHead& head, const std::vector<Index>& rows) {
  const auto count = static_cast<Index>(rows.size());
  FullRows full{Matrix<double>(count, head.k.cols), Matrix<double>(count, head.v.cols), {}, {}, {}};
  Matrix<double> queries(count, head.call.Dk);
  for (Index r = 0; r < count; ++r) {
    const TensorView own = head.place.queries(head.call.inputs.q).narrowed(2, rows[r], 1);
    const LogitRows q = logit_rows(head.form, ref::read_matrix<double>(own), false);
    for (Index d = 0; d < queries.cols; ++d) queries(r, d) = head.scale * q.x(0, d);
    full.size.push_back(std::abs(head.scale) * q.sizes[0] * head.longest);
  }
  multiply(queries, head.k, head.call.Dk, full.weights);
  for (Index r = 0; r < count; ++r) {
    const Allowed allowed(head, rows[r]);
    full.own.push_back(allowed.left_out < 0 ? std::numeric_limits<double>::quiet_NaN()
                                            : full.weights(r, allowed.left_out));
    full.lse.push_back(softmax(allowed, full.weights.cols, &full.weights(r, 0)));
  }
  multiply(full.weights, head.v, head.place.k.length, full.out);
  return full;
}

}  // namespace coterie::ops
