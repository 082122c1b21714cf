// SPDX-License-Identifier: MIT
// Full attention of some rows with the logits and keys of a mechanism, in double.
//
//   weights_ij = softmax over the allowed keys j of scale q_i . k_j,   out_i = sum_j weights_ij v_j
#pragma once

#include <vector>

#include "core/call.h"
#include "coterie/mechanism.h"
#include "ref/views.h"

namespace coterie::ops {

// One item and head: keys and values in the form that the logits are computed from.
struct FullHead {
  FullHead(const Mechanism& mechanism, const AttentionCall& of_call, const ref::Place& of_place);

  const AttentionCall& call;
  ref::Place place;
  RowForm form;
  bool demotes;              // leaves out a query's own key if there is another
  double scale;              // of the logits
  double longest = 0;        // largest norm of the terms that a key is computed from
  ref::Matrix<double> k, v;  // (Dk, keys) and (keys, Dv), columns padded for the kernels
};

struct FullRows {
  ref::Matrix<double> weights, out;  // (rows, keys) and (rows, Dv), columns padded
  std::vector<double> lse;           // -inf without keys
  std::vector<double> own;           // logit of the own key if it was left out, else NaN
  std::vector<double> size;          // of the terms of the largest logit
};

// Rows count from the item's first query.
FullRows full_rows(const FullHead& head, const std::vector<ref::Index>& rows);

// Number of rows for which full_rows reads the keys efficiently, and needs little memory.
constexpr ref::Index kFullTile = 16;

}  // namespace coterie::ops
