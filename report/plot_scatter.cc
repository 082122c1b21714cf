// SPDX-License-Identifier: MIT
// Scatter plots: dots with names next to them that do not overlap.
#include <fmt/core.h>

#include <algorithm>

#include "report/plot_frame.h"
#include "report/plot_svg.h"
#include "report/text.h"

namespace coterie::train {

namespace {

constexpr double kHeight = 260, kRadius = 5;
constexpr std::size_t kLongestScatterName = 24;
constexpr int kMostSteps = 12;  // lines between a dot and its name

struct Box {
  double left, top, right, bottom;

  bool meets(const Box& other) const {
    return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
  }
};

class Names {
 public:
  explicit Names(const Frame& frame) : frame_(frame) {}

  void block(double x, double y) {
    taken_.push_back({x - kRadius, y - kRadius, x + kRadius, y + kRadius});
  }

  // A free position for a name of this width near a dot: right, left, then further up and down.
  Box place(double x, double y, double width) {
    const double half = kLineHeight / 2;
    Box first{};
    for (int step = 0; step < 2 * kMostSteps; ++step) {
      const int shift = step % 2 == 0 ? step / 2 : -(step + 1) / 2;
      for (const bool right : {true, false}) {
        const double left = right ? x + kRadius + 4 : x - kRadius - 4 - width;
        const double middle = y + shift * kLineHeight;
        const Box box{left, middle - half, left + width, middle + half};
        if (shift == 0 && right) first = box;
        if (inside(box) && free(box)) return keep(box);
      }
    }
    return keep(first);
  }

 private:
  bool inside(const Box& box) const {
    return box.left >= frame_.left() && box.right <= kPlotWidth && box.top >= frame_.top() - 4 &&
           box.bottom <= frame_.bottom();
  }
  bool free(const Box& box) const {
    return std::none_of(taken_.begin(), taken_.end(),
                        [&](const Box& other) { return box.meets(other); });
  }
  Box keep(const Box& box) {
    taken_.push_back(box);
    return box;
  }

  const Frame& frame_;
  std::vector<Box> taken_;
};

std::string dot(const PlotSeries& series, double x, double y) {
  return fmt::format(
      "<circle cx=\"{}\" cy=\"{}\" r=\"{}\" class=\"dot c{}\"><title>{}</title>"
      "</circle>",
      number(x), number(y), number(kRadius), series.colour, escape(series.name));
}

std::string name_beside(const PlotSeries& series, double x, double y, Names& names) {
  const std::string text = shortened(series.name, kLongestScatterName);
  const Box box = names.place(x, y, text_width(text));
  const double middle = (box.top + box.bottom) / 2;
  const bool right = box.left > x;
  std::string svg;
  if (std::abs(middle - y) > 1) {
    svg = svg_line(x, y, right ? box.left - 2 : box.right + 2, middle,
                   fmt::format("lead c{}", series.colour));
  }
  return svg +
         svg_text(right ? box.left : box.right, middle + 4, right ? "name" : "name end", text);
}

}  // namespace

std::string scatter_plot(const Plot& plot) {
  const Frame frame(plot, kHeight, 0);
  Names names(frame);
  std::string leads, dots;
  for (const PlotSeries& series : plot.series) {
    for (const auto& point : series.points) {
      if (!frame.draws(point)) continue;
      names.block(frame.x(point.first), frame.y(point.second));
      dots += dot(series, frame.x(point.first), frame.y(point.second));
    }
  }
  for (const PlotSeries& series : plot.series) {
    const auto last = std::find_if(series.points.rbegin(), series.points.rend(),
                                   [&](const auto& point) { return frame.draws(point); });
    if (last == series.points.rend()) continue;
    leads += name_beside(series, frame.x(last->first), frame.y(last->second), names);
  }
  if (dots.empty()) {
    dots = svg_text((frame.left() + frame.right()) / 2, (frame.top() + frame.bottom()) / 2, "mid",
                    "nothing to draw yet");
  }
  return svg_picture(kHeight, plot.title, frame.svg() + leads + dots);
}

}  // namespace coterie::train
