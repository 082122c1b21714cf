// SPDX-License-Identifier: MIT
// The cheapest attention of a model's layers and heads whose error stays under a target.
//
// Every head takes a rung of a ladder of specs, one of which is full. With e the error of the
// model's output if one head alone leaves full attention, errors of heads are taken to be
// independent, and times to add up:
//
//   error = sqrt(sum of e^2 over heads),   time = sum over heads + sum over groups
//
// A group is a run of consecutive heads with equal rungs, because that is what a spec can say.
// Heads that share a key/value head are one unit. Times of a group besides those of its heads
// (launches, threads that wait) make many groups as expensive as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "coterie/spec.h"

namespace coterie {

// What was measured in one layer, for U units (key/value heads) and R rungs. Times are in seconds.
struct LayerMeasurements {
  std::int64_t heads = 0;  // of queries, a multiple of units
  std::int64_t units = 0;
  std::vector<Positions> positions;  // (U), written into specs; empty: the model applies its own
  std::vector<double> unit_error;    // (U, R): norm of the change of the unit's attention output
  // (R): error of the model's output if all heads of this layer, and no others, have the rung; NaN
  // where it was not measured: then the largest ratio to the change of the attention output that
  // was measured in this layer counts. It is shared out to units by the squares of unit_error.
  std::vector<double> output_error;
  std::vector<double> unit_time;   // (U, R): of one more unit in a group
  std::vector<double> group_time;  // (R): of a group besides its units
  // Of the layer as it is, with all of its heads full: the full rung in one group if NaN.
  double own_time = std::numeric_limits<double>::quiet_NaN();
};

struct Choice {
  std::vector<AttentionSpec> layers;              // one spec per layer
  std::vector<std::vector<std::size_t>> rungs;    // by layer and unit: place in the ladder
  std::vector<std::vector<std::string>> reasons;  // why a unit stays full, empty for others
  double error = 0, time = 0;                     // estimated
  double full_time = 0;                           // of all layers as they are
  // The cheapest rung that all heads of all layers can have under the target, full if no other.
  std::size_t uniform = 0;
  double uniform_error = 0, uniform_time = 0;
  // Of the whole model, see choose_verified: error, seconds, and seconds with all heads full.
  double verified = std::numeric_limits<double>::quiet_NaN();
  double seconds = std::numeric_limits<double>::quiet_NaN();
  double full_seconds = std::numeric_limits<double>::quiet_NaN();
};

// The choice with the least estimated time among those with an estimated error of at most `target`;
// errors are rounded up to at most 1/32 of the target's square in total, so it is at least as cheap
// as every assignment with an error of sqrt(31/32) target, and as `uniform`. Of equal times less
// error wins, then the earlier rung. `ladder` has specs of one group without a number of heads, and
// "full" once. Throws Error on measurements that are negative or not finite.
Choice choose_specs(const std::vector<std::string>& ladder,
                    const std::vector<LayerMeasurements>& layers, double target);

// The cheapest choice for which `verify` returned at most `target`: the error of the model's output
// on samples that were not measured. Estimates assume small independent errors, so their target is
// tightened where the verified error is too large, and loosened where it leaves room, `rounds`
// times at most. Times of heads do not always add up to that of the model either: with `seconds`,
// the time of a pass of the whole model, the choice is the one with the least of those that passed,
// and of the rungs that pass in all heads, as far as they are estimated to be faster than full. All
// heads full, which needs no verification, is the answer if nothing else passes, or nothing that
// passes is faster as a whole.
Choice choose_verified(const std::vector<std::string>& ladder,
                       const std::vector<LayerMeasurements>& layers, double target,
                       const std::function<double(const Choice&)>& verify,
                       const std::function<double(const Choice&)>& seconds = {}, int rounds = 8);

}  // namespace coterie
