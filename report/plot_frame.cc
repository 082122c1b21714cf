// SPDX-License-Identifier: MIT
#include "report/plot_frame.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "report/plot_svg.h"
#include "report/text.h"

namespace coterie::train {

namespace {

constexpr double kAbove = 24, kBelow = 38;  // for the label of y; for ticks and label of x
constexpr double kInset = 5;

Scale scale_of(const PlotAxis& axis, std::vector<double> values) {
  for (const PlotTick& tick : axis.ticks) values.push_back(tick.value);
  Scale scale = scale_over(axis.kind, values);
  if (axis.low) scale.low = *axis.low;
  if (axis.high) scale.high = *axis.high;
  if (scale.low < scale.high) return scale;
  return scale_over(axis.kind, {scale.low});  // ends that leave nothing between them
}

// Percent, or enough digits to tell neighbours apart.
std::string tick_text(const PlotAxis& axis, double value, double step) {
  if (axis.percent) return fmt::format("{:.4g}%", 100 * value);
  if (axis.kind == ScaleKind::log || std::abs(value) < step / 2) return compact(value);
  if (std::abs(value) >= 1e4) return compact(value);
  return fmt::format("{:.6g}", value);
}

}  // namespace

Frame::Frame(const Plot& plot, double height, double right) : plot_(plot) {
  std::vector<double> xs, ys;
  for (const PlotSeries& series : plot.series) {
    for (const auto& [x, y] : series.points) {
      if (!drawable(plot.x.kind, x) || !drawable(plot.y.kind, y)) continue;
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  for (const PlotLevel& level : plot.levels) ys.push_back(level.value);
  x_ = scale_of(plot.x, xs);
  y_ = scale_of(plot.y, ys);
  x_ticks_ = ticks_of(plot.x, x_, 5);
  y_ticks_ = ticks_of(plot.y, y_, 5);
  double widest = 0;
  for (const PlotTick& tick : y_ticks_) widest = std::max(widest, text_width(tick.text));
  left_ = widest + 2 * kInset;
  right_ = kPlotWidth - std::max(right, 12.0);
  top_ = kAbove;
  bottom_ = height - kBelow;
}

std::vector<PlotTick> Frame::ticks_of(const PlotAxis& axis, const Scale& scale, int wanted) const {
  if (!axis.ticks.empty()) return axis.ticks;
  const std::vector<double> values = ticks(scale, wanted);
  const double step = values.size() > 1 ? values[1] - values[0] : 1;
  std::vector<PlotTick> all;
  for (const double value : values) all.push_back({value, tick_text(axis, value, step)});
  return all;
}

std::size_t Frame::text_stride() const {
  for (std::size_t stride = 1; stride < x_ticks_.size(); ++stride) {
    bool touches = false;
    for (std::size_t t = stride; t < x_ticks_.size(); t += stride) {
      const PlotTick &a = x_ticks_[t - stride], &b = x_ticks_[t];
      const double room = x(b.value) - x(a.value) - kInset;
      touches = touches || text_width(a.text) + text_width(b.text) > 2 * room;
    }
    if (!touches) return stride;
  }
  return std::max<std::size_t>(x_ticks_.size(), 1);
}

std::string Frame::x_axis() const {
  std::string svg = svg_line(left_, bottom_, right_, bottom_, "axis");
  const std::size_t stride = text_stride();
  for (std::size_t t = 0; t < x_ticks_.size(); ++t) {
    const double at = x(x_ticks_[t].value), half = text_width(x_ticks_[t].text) / 2;
    svg += svg_line(at, bottom_, at, bottom_ + 4, "axis");
    if (t % stride != 0) continue;
    svg += svg_text(std::min(at, kPlotWidth - half), bottom_ + 16, "mid", x_ticks_[t].text);
  }
  return svg + svg_text((left_ + right_) / 2, bottom_ + 32, "mid", plot_.x.label);
}

std::string Frame::y_axis() const {
  std::string svg = svg_text(kInset, 12, "name", plot_.y.label);
  for (const PlotTick& tick : y_ticks_) {
    svg += svg_line(left_, y(tick.value), right_, y(tick.value), "grid");
    svg += svg_text(left_ - kInset, y(tick.value) + 4, "end", tick.text);
  }
  return svg;
}

int Frame::points_in(double from, double to, double low, double high) const {
  int count = 0;
  for (const PlotSeries& series : plot_.series) {
    for (const auto& point : series.points) {
      if (!draws(point)) continue;
      const double at_x = x(point.first), at_y = y(point.second);
      count += at_x >= from && at_x <= to && at_y >= low && at_y <= high ? 1 : 0;
    }
  }
  return count;
}

std::string Frame::level(const PlotLevel& level) const {
  if (!drawable(y_.kind, level.value)) return "";
  const double at = y(level.value), width = text_width(level.name) + kInset;
  const double text_at = at - 4 < top_ + 8 ? at + 12 : at - 4;
  const double low = text_at - kLineHeight, high = text_at + 4;
  const bool left =
      points_in(left_, left_ + width, low, high) < points_in(right_ - width, right_, low, high);
  return svg_line(left_, at, right_, at, "level") +
         svg_text(left ? left_ + 4 : right_ - 4, text_at, left ? "" : "end", level.name);
}

std::string Frame::svg() const {
  std::string svg = y_axis() + x_axis();
  for (const PlotLevel& line : plot_.levels) svg += level(line);
  return svg;
}

}  // namespace coterie::train
