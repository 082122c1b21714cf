// SPDX-License-Identifier: MIT
// Dynamic programming over units and the share of the target's square that they have used up: for
// every share and rung of the last unit the least time. Shares are whole numbers, rounded up.
#include "coterie/choice.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <sstream>

#include "core/check.h"

namespace coterie {
namespace {

constexpr const char* kOp = "choice";
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kSharesPerUnit = 32, kFewestShares = 4096;

using Rungs = std::vector<std::vector<std::size_t>>;

struct Ladder {
  std::vector<std::string> texts;
  std::vector<HeadGroup> groups;
  std::size_t full = 0;

  explicit Ladder(const std::vector<std::string>& specs) : texts(specs) {
    std::size_t found = 0;
    for (const std::string& text : specs) {
      const AttentionSpec spec = AttentionSpec::parse(text);
      const bool alone = spec.groups.size() == 1 && spec.groups[0].heads == 0 &&
                         spec.groups[0].positions == Positions::automatic;
      COTERIE_CHECK(alone, kOp,
                    "expected specs of one group without a number of heads and positions in the "
                    "ladder; got \"",
                    text, "\"");
      if (std::holds_alternative<FullParams>(spec.groups[0].mechanism)) {
        full = groups.size();
        ++found;
      }
      groups.push_back(spec.groups[0]);
    }
    COTERIE_CHECK(found == 1, kOp, "expected full once in the ladder; got it ", found, " times");
  }
  std::size_t size() const { return groups.size(); }
};

void check_numbers(std::size_t layer, const char* name, const std::vector<double>& values,
                   std::size_t count, bool may_be_nan = false) {
  COTERIE_CHECK(values.size() == count, kOp, "expected ", count, " values of ", name, " in layer ",
                layer, "; got ", values.size());
  for (const double value : values)
    COTERIE_CHECK((value >= 0 && std::isfinite(value)) || (may_be_nan && std::isnan(value)), kOp,
                  "expected finite ", name, " of 0 or more in layer ", layer, "; got ", value,
                  ". Leave out the spec that gave it");
}

// A layer's measurements, checked, with the squared output error of each unit and rung.
struct Layer {
  std::size_t units, rungs;
  std::vector<double> squares;  // (U, R)
  std::vector<double> time, group;
  std::vector<Positions> positions;
  std::int64_t heads_per_unit;
  double own_time;
  std::size_t full;

  Layer(std::size_t number, const LayerMeasurements& from, const Ladder& ladder)
      : units(static_cast<std::size_t>(std::max<std::int64_t>(from.units, 0))),
        rungs(ladder.size()),
        squares(units * rungs, 0.0),
        time(from.unit_time),
        group(from.group_time),
        positions(from.positions),
        heads_per_unit(0),
        own_time(from.own_time),
        full(ladder.full) {
    COTERIE_CHECK(from.units >= 1 && from.heads >= from.units && from.heads % from.units == 0, kOp,
                  "expected a number of heads in layer ", number,
                  " that is a multiple of its units; got ", from.heads, " and ", from.units);
    heads_per_unit = from.heads / from.units;
    COTERIE_CHECK(positions.empty() || positions.size() == units, kOp, "expected positions of ",
                  units, " units in layer ", number, "; got ", positions.size());
    if (positions.empty()) positions.assign(units, Positions::automatic);
    check_numbers(number, "unit_error", from.unit_error, units * rungs);
    check_numbers(number, "output_error", from.output_error, rungs, true);
    check_numbers(number, "unit_time", time, units * rungs);
    check_numbers(number, "group_time", group, rungs);
    check_numbers(number, "own_time", {own_time}, 1, true);
    share_out(number, from);
    if (std::isnan(own_time)) own_time = time_of(std::vector<std::size_t>(units, full));
  }

  void share_out(std::size_t number, const LayerMeasurements& from) {
    std::vector<double> changes(rungs, 0.0);  // squares
    double ratio = -1;
    for (std::size_t r = 0; r < rungs; ++r) {
      for (std::size_t u = 0; u < units; ++u) changes[r] += std::pow(at(from.unit_error, u, r), 2);
      const double error = from.output_error[r];
      if (r != full && !std::isnan(error) && changes[r] > 0)
        ratio = std::max(ratio, error * error / changes[r]);
    }
    for (std::size_t r = 0; r < rungs; ++r) {
      if (r == full) continue;
      const double error = from.output_error[r];
      const bool measured = !std::isnan(error);
      COTERIE_CHECK(measured || changes[r] == 0 || ratio >= 0, kOp, "layer ", number,
                    " changes its attention output, but no output_error of it was measured; "
                    "measure that of one spec at least");
      const double whole = measured ? error * error : ratio * changes[r];
      for (std::size_t u = 0; u < units; ++u) {
        const double change = std::pow(at(from.unit_error, u, r), 2);
        const double share =
            changes[r] > 0 ? change / changes[r] : 1.0 / static_cast<double>(units);
        squares[u * rungs + r] = changes[r] > 0 || measured ? whole * share : 0;
      }
    }
  }

  double at(const std::vector<double>& values, std::size_t u, std::size_t r) const {
    return values[u * rungs + r];
  }
  bool begins_group(const std::vector<std::size_t>& chosen, std::size_t u) const {
    return u == 0 || chosen[u] != chosen[u - 1] || positions[u] != positions[u - 1];
  }
  // Of groups, even if all are full.
  double time_of(const std::vector<std::size_t>& chosen) const {
    double sum = 0;
    for (std::size_t u = 0; u < units; ++u)
      sum += at(time, u, chosen[u]) + (begins_group(chosen, u) ? group[chosen[u]] : 0);
    return sum;
  }
  bool is_own(const std::vector<std::size_t>& chosen) const {
    return std::all_of(chosen.begin(), chosen.end(), [&](std::size_t r) { return r == full; });
  }
  double cost_of(const std::vector<std::size_t>& chosen) const {
    return is_own(chosen) ? own_time : time_of(chosen);
  }
};

struct Model {
  Ladder ladder;
  std::vector<Layer> layers;
  std::size_t units = 0;

  Model(const std::vector<std::string>& specs, const std::vector<LayerMeasurements>& measured)
      : ladder(specs) {
    COTERIE_CHECK(!measured.empty(), kOp, "expected measurements of at least one layer; got none");
    for (const LayerMeasurements& layer : measured) {
      layers.emplace_back(layers.size(), layer, ladder);
      units += layers.back().units;
    }
  }

  Rungs all(std::size_t rung) const {
    Rungs rungs;
    for (const Layer& layer : layers) rungs.emplace_back(layer.units, rung);
    return rungs;
  }
  double time_of(const Rungs& rungs) const {
    double sum = 0;
    for (std::size_t l = 0; l < layers.size(); ++l) sum += layers[l].cost_of(rungs[l]);
    return sum;
  }
  double error_of(const Rungs& rungs) const {
    double sum = 0;
    for (std::size_t l = 0; l < layers.size(); ++l)
      for (std::size_t u = 0; u < layers[l].units; ++u)
        sum += layers[l].at(layers[l].squares, u, rungs[l][u]);
    return std::sqrt(sum);
  }
};

// Whole numbers of shares, `total` of which are the square of the target.
struct Shares {
  double target;
  std::size_t total;

  // More than all where a unit alone exceeds the target.
  std::size_t of(double square) const {
    if (square == 0) return 0;
    const double part = target > 0 ? square / (target * target) : kNever;
    return part > 1 ? total + 1
                    : static_cast<std::size_t>(std::ceil(part * static_cast<double>(total)));
  }
};

// The least times of layers up to one, by shares used, and how they come about.
class Table {
 public:
  Table(const Model& model, const Shares& shares)
      : model_(model), shares_(shares), width_(shares.total + 1), least_(width_, 0.0) {
    for (const Layer& layer : model.layers) add(layer);
  }

  Rungs best() const {
    std::size_t left = width_ - 1;
    while (left > 0 && least_[left - 1] <= least_[width_ - 1]) --left;
    Rungs rungs = model_.all(model_.ladder.full);
    for (std::size_t l = model_.layers.size(); l-- > 0;) {
      const Layer& layer = model_.layers[l];
      const Steps& steps = steps_[l];
      std::size_t rung = steps.last[left];
      if (rung == layer.rungs) continue;  // as it is
      for (std::size_t u = layer.units; u-- > 0 && rung < layer.rungs;) {
        rungs[l][u] = rung;
        left -= shares_.of(layer.at(layer.squares, u, rung));
        if (steps.begins[(u * layer.rungs + rung) * width_ + left])
          rung = steps.before[(2 * u + (rung == layer.full)) * width_ + left];
      }
    }
    return rungs;
  }

 private:
  // Rung R stands for units that are all full, which is the layer as it is unless others follow.
  struct Steps {
    std::vector<bool> begins;  // (U, R, shares before the unit): whether a group begins
    // (U, whether the group is full, shares before the unit): the rung before a new group
    std::vector<std::uint16_t> before;
    std::vector<std::uint16_t> last;  // (shares): rung of the last unit
  };

  void add(const Layer& layer) {
    const auto pure = static_cast<std::uint16_t>(layer.rungs);
    Steps steps;
    steps.begins.assign(layer.units * layer.rungs * width_, true);
    steps.before.assign(2 * layer.units * width_, pure);
    steps.last.assign(width_, pure);
    // Least times after the units so far, by rung of the last one, if not all of them are full.
    std::vector<std::vector<double>> by_rung(layer.rungs, std::vector<double>(width_, kNever));
    std::vector<double> any(width_, kNever);  // of all rungs
    std::vector<std::uint16_t> argument(width_, pure);
    double all_full = 0;
    for (std::size_t u = 0; u < layer.units; ++u) {
      const bool joins = u > 0 && layer.positions[u] == layer.positions[u - 1];
      std::vector<double> begun(width_);
      for (std::size_t b = 0; b < width_; ++b) {
        const bool from_full = least_[b] + all_full <= any[b];
        begun[b] = from_full ? least_[b] + all_full : any[b];
        steps.before[2 * u * width_ + b] = from_full ? pure : argument[b];
        steps.before[(2 * u + 1) * width_ + b] = argument[b];
      }
      for (std::size_t r = 0; r < layer.rungs; ++r)
        by_rung[r] = after(layer, u, r, joins, r == layer.full ? any : begun, by_rung[r], steps);
      all_full += layer.at(layer.time, u, layer.full) + (joins ? 0 : layer.group[layer.full]);
      any.assign(width_, kNever);
      for (std::size_t r = 0; r < layer.rungs; ++r)
        for (std::size_t b = 0; b < width_; ++b)
          if (by_rung[r][b] < any[b]) {
            any[b] = by_rung[r][b];
            argument[b] = static_cast<std::uint16_t>(r);
          }
    }
    for (std::size_t b = 0; b < width_; ++b) {
      const double own = least_[b] + layer.own_time;
      if (any[b] < own) steps.last[b] = argument[b];
      least_[b] = std::min(own, any[b]);
    }
    steps_.push_back(std::move(steps));
  }

  // Least times if unit u takes rung r, after `others` with another rung or `same` with this one.
  std::vector<double> after(const Layer& layer, std::size_t u, std::size_t r, bool joins,
                            const std::vector<double>& others, const std::vector<double>& same,
                            Steps& steps) const {
    const std::size_t used = shares_.of(layer.at(layer.squares, u, r));
    const double time = layer.at(layer.time, u, r);
    std::vector<double> next(width_, kNever);
    for (std::size_t b = 0; b + used < width_; ++b) {
      const double begun = others[b] + layer.group[r];
      const bool stays = joins && same[b] <= begun;
      if (stays) steps.begins[(u * layer.rungs + r) * width_ + b] = false;
      next[b + used] = time + (stays ? same[b] : begun);
    }
    return next;
  }

  const Model& model_;
  Shares shares_;
  std::size_t width_;
  std::vector<double> least_;  // (shares)
  std::vector<Steps> steps_;
};

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds * 1e3 << " ms";
  return text.str();
}

std::string number(double value) {
  std::ostringstream text;
  text.precision(2);
  text << value;
  return text.str();
}

// Why unit u of a layer stays full.
std::string reason_of(const Ladder& ladder, const Layer& layer,
                      const std::vector<std::size_t>& chosen, std::size_t u, double target) {
  const double own = layer.is_own(chosen) ? layer.own_time / static_cast<double>(layer.units)
                                          : layer.at(layer.time, u, layer.full);
  std::optional<std::size_t> fastest, closest, best;
  double saved = 0;
  const double before = layer.cost_of(chosen);
  for (std::size_t r = 0; r < layer.rungs; ++r) {
    if (r == layer.full) continue;
    const double time = layer.at(layer.time, u, r), square = layer.at(layer.squares, u, r);
    if (!fastest || time < layer.at(layer.time, u, *fastest)) fastest = r;
    if (time >= own) continue;
    if (!closest || square < layer.at(layer.squares, u, *closest)) closest = r;
    if (square > target * target) continue;
    std::vector<std::size_t> changed = chosen;
    changed[u] = r;
    const double saving = before - layer.cost_of(changed);
    if (!best || saving > saved) best = r, saved = saving;
  }
  if (!fastest) return "the ladder has no other spec";
  if (!closest)
    return "no spec is faster: " + ladder.texts[*fastest] + " takes " +
           milliseconds(layer.at(layer.time, u, *fastest)) + ", full " + milliseconds(own);
  if (!best)
    return "the error of every faster spec is above the target: " + ladder.texts[*closest] +
           " alone has " + number(std::sqrt(layer.at(layer.squares, u, *closest)));
  const double share = layer.at(layer.squares, u, *best) / (target * target);
  if (saved <= 0)
    return "no spec is faster in a separate group: " + ladder.texts[*best] + " would add " +
           milliseconds(-saved);
  return "the error is better spent on other heads: " + ladder.texts[*best] + " would save " +
         milliseconds(saved) + " for " + number(100 * share) + " % of the target's square";
}

AttentionSpec spec_of(const Ladder& ladder, const Layer& layer,
                      const std::vector<std::size_t>& chosen) {
  AttentionSpec spec;
  for (std::size_t u = 0; u < layer.units; ++u) {
    if (layer.begins_group(chosen, u)) {
      spec.groups.push_back(ladder.groups[chosen[u]]);
      spec.groups.back().positions = layer.positions[u];
    }
    spec.groups.back().heads += layer.heads_per_unit;
  }
  if (spec.groups.size() == 1) spec.groups[0].heads = 0;
  return spec;
}

Choice choice_of(const Model& model, const Rungs& rungs, double target) {
  Choice choice;
  choice.rungs = rungs;
  choice.error = model.error_of(rungs);
  choice.time = model.time_of(rungs);
  choice.full_time = model.time_of(model.all(model.ladder.full));
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    const Layer& layer = model.layers[l];
    choice.layers.push_back(spec_of(model.ladder, layer, rungs[l]));
    std::vector<std::string>& reasons = choice.reasons.emplace_back(layer.units);
    for (std::size_t u = 0; u < layer.units; ++u)
      if (rungs[l][u] == layer.full)
        reasons[u] = reason_of(model.ladder, layer, rungs[l], u, target);
  }
  return choice;
}

Choice choose(const Model& model, double target) {
  std::size_t uniform = model.ladder.full;
  for (std::size_t r = 0; r < model.ladder.size(); ++r) {
    const Rungs rungs = model.all(r);
    if (model.error_of(rungs) <= target && model.time_of(rungs) < model.time_of(model.all(uniform)))
      uniform = r;
  }
  const std::size_t total = std::max(kFewestShares, kSharesPerUnit * model.units);
  Rungs found = Table(model, {target, total}).best();
  // Rounding up may have excluded it.
  const Rungs same = model.all(uniform);
  if (model.time_of(same) < model.time_of(found)) found = same;
  Choice choice = choice_of(model, found, target);
  choice.uniform = uniform;
  choice.uniform_error = model.error_of(same);
  choice.uniform_time = model.time_of(same);
  return choice;
}

void check_target(double target) {
  COTERIE_CHECK(target >= 0 && std::isfinite(target), kOp,
                "expected a finite target of 0 or more; got ", target);
}

double checked(const char* what, double value) {
  COTERIE_CHECK(value >= 0 && std::isfinite(value), kOp, "expected a finite ", what,
                " of 0 or more; got ", value);
  return value;
}

// The fastest as a whole of full attention and the choices that passed; without `seconds`, by their
// estimated times. Earlier ones win ties.
Choice fastest(const Choice& full, const std::vector<Choice>& passed,
               const std::function<double(const Choice&)>& seconds) {
  const auto time_of = [&](const Choice& choice) {
    return seconds ? checked("time of the model", seconds(choice)) : choice.time;
  };
  const double full_time = time_of(full);
  const Choice* best = &full;
  double best_time = full_time, other_time = kNever;
  for (const Choice& choice : passed) {
    const double time = time_of(choice);
    other_time = std::min(other_time, time);
    if (time < best_time) best = &choice, best_time = time;
  }
  Choice found = *best;
  if (!seconds) return found;
  found.seconds = best_time;
  found.full_seconds = full_time;
  if (best != &full || passed.empty()) return found;
  const std::string reason =
      "the whole model is not faster with the chosen specs: " + milliseconds(other_time) +
      ", full " + milliseconds(full_time);
  for (auto& layer : found.reasons) std::fill(layer.begin(), layer.end(), reason);
  return found;
}

}  // namespace

Choice choose_specs(const std::vector<std::string>& ladder,
                    const std::vector<LayerMeasurements>& layers, double target) {
  check_target(target);
  return choose(Model(ladder, layers), target);
}

Choice choose_verified(const std::vector<std::string>& ladder,
                       const std::vector<LayerMeasurements>& layers, double target,
                       const std::function<double(const Choice&)>& verify,
                       const std::function<double(const Choice&)>& seconds, int rounds) {
  check_target(target);
  COTERIE_CHECK(rounds >= 1, kOp, "expected at least 1 round; got ", rounds);
  const Model model(ladder, layers);
  const Choice estimated = choose(model, target);
  Choice full = choice_of(model, model.all(model.ladder.full), target);
  full.verified = 0;
  std::map<Rungs, double> verified = {{full.rungs, 0.0}};
  std::vector<Choice> choices;  // that passed and are estimated to be faster
  const auto error_of = [&](const Rungs& rungs) {
    const auto known = verified.find(rungs);
    if (known != verified.end()) return known->second;
    Choice choice = choice_of(model, rungs, target);
    choice.verified = checked("verified error", verify(choice));
    if (choice.verified <= target && choice.time < full.time) choices.push_back(choice);
    return verified[rungs] = choice.verified;
  };
  double passed = 0, failed = kNever, budget = target;
  for (int round = 0; round < rounds && budget > 0 && std::isfinite(budget); ++round) {
    const double error = error_of(choose(model, budget).rungs);
    if (error <= target) {
      passed = budget;
      budget = failed < kNever ? std::sqrt(passed * failed) : 2 * budget;
    } else {
      failed = budget;
      const double scaled = budget * std::clamp(0.9 * target / error, 0.0625, 0.9);
      budget = passed > 0 ? std::sqrt(passed * failed) : scaled;
    }
  }
  if (seconds && target > 0) {
    for (std::size_t r = 0; r < model.ladder.size(); ++r) {
      if (model.time_of(model.all(r)) < full.time) error_of(model.all(r));
    }
  }
  Choice best = fastest(full, choices, seconds);
  best.uniform = estimated.uniform;
  best.uniform_error = estimated.uniform_error;
  best.uniform_time = estimated.uniform_time;
  return best;
}

}  // namespace coterie
