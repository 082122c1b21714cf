// SPDX-License-Identifier: MIT
// The frame of a plot with two axes: margins, ticks, grid, labels.
#pragma once

#include <string>

#include "report/plot.h"

namespace coterie::train {

class Frame {
 public:
  // Leaves `right` units to the right of the plot for names.
  Frame(const Plot& plot, double height, double right);

  double x(double value) const { return left_ + x_.share(value) * (right_ - left_); }
  double y(double value) const { return bottom_ - y_.share(value) * (bottom_ - top_); }
  double left() const { return left_; }
  double right() const { return right_; }
  double top() const { return top_; }
  double bottom() const { return bottom_; }

  bool draws(std::pair<double, double> point) const {
    return drawable(x_.kind, point.first) && drawable(y_.kind, point.second);
  }

  std::string svg() const;  // grid, ticks, labels and levels

 private:
  std::vector<PlotTick> ticks_of(const PlotAxis& axis, const Scale& scale, int wanted) const;
  std::string x_axis() const;
  std::string y_axis() const;
  std::string level(const PlotLevel& level) const;  // labelled at the end with fewer points
  std::size_t text_stride() const;                  // between x ticks whose labels fit
  int points_in(double from, double to, double low, double high) const;

  const Plot& plot_;
  Scale x_, y_;
  double left_ = 0, right_ = 0, top_ = 0, bottom_ = 0;
  std::vector<PlotTick> x_ticks_, y_ticks_;
};

}  // namespace coterie::train
