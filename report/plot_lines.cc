// SPDX-License-Identifier: MIT
// Line plots with the names of the series at the right.
#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "report/plot_frame.h"
#include "report/plot_svg.h"
#include "report/text.h"

namespace coterie::train {

namespace {

constexpr std::size_t kLongestName = 20;  // characters, next to a plot
constexpr double kLead = 16;              // from the plot to the names

using Points = std::vector<std::pair<double, double>>;

Points drawn_points(const Frame& frame, const PlotSeries& series) {
  Points points;
  for (const auto& point : series.points) {
    if (frame.draws(point)) points.emplace_back(frame.x(point.first), frame.y(point.second));
  }
  return points;
}

std::string curve(const PlotSeries& series, const Points& points) {
  std::string path;
  for (const auto& [x, y] : points) {
    path += fmt::format("{}{} {}", path.empty() ? "M" : "L", number(x), number(y));
  }
  std::string svg = fmt::format("<path d=\"{}\" class=\"curve c{} d{}\"><title>{}</title></path>",
                                path, series.colour, series.dash % 4, escape(series.name));
  if (points.size() > 12) return svg;
  for (const auto& [x, y] : points) {
    svg += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"2.6\" class=\"mark c{}\"/>", number(x),
                       number(y), series.colour);
  }
  return svg;
}

// Positions near the wanted ones, at least a line apart and, if they fit, within [top, bottom].
std::vector<double> spread(const std::vector<double>& wanted, double top, double bottom) {
  std::vector<std::size_t> order(wanted.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return wanted[a] < wanted[b]; });
  std::vector<double> places(wanted.size());
  double free_from = top;
  for (const std::size_t at : order) {
    places[at] = std::max(wanted[at], free_from);
    free_from = places[at] + kLineHeight;
  }
  double free_to = bottom;  // move names that ran over the bottom up again
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    places[*at] = std::min(places[*at], free_to);
    free_to = places[*at] - kLineHeight;
  }
  return places;
}

double names_width(const Plot& plot) {
  double widest = 0;
  for (const PlotSeries& series : plot.series) {
    widest = std::max(widest, text_width(shortened(series.name, kLongestName)));
  }
  return widest + kLead + 4;
}

std::string end_name(const Frame& frame, const PlotSeries& series,
                     const std::pair<double, double>& end, double place) {
  const double edge = frame.right();
  const std::string lead = fmt::format(
      "<path d=\"M{} {}L{} {}L{} {}\" class=\"lead c{}\"/>", number(end.first), number(end.second),
      number(edge + 2), number(end.second), number(edge + kLead - 3), number(place), series.colour);
  return lead + fmt::format("<text x=\"{}\" y=\"{}\" class=\"name\">{}<title>{}</title></text>",
                            number(edge + kLead), number(place + 4),
                            escape(shortened(series.name, kLongestName)), escape(series.name));
}

}  // namespace

std::string line_plot(const Plot& plot) {
  const double names = kLineHeight * static_cast<double>(plot.series.size());
  const double height = std::max(260.0, 80 + names);
  const Frame frame(plot, height, names_width(plot));
  std::string svg = frame.svg();
  std::vector<const PlotSeries*> named;
  std::vector<std::pair<double, double>> ends;
  std::vector<double> wanted;
  for (const PlotSeries& series : plot.series) {
    const Points points = drawn_points(frame, series);
    if (points.empty()) continue;
    svg += curve(series, points);
    named.push_back(&series);
    ends.push_back(points.back());
    wanted.push_back(points.back().second);
  }
  const std::vector<double> places = spread(wanted, frame.top(), frame.bottom());
  for (std::size_t s = 0; s < named.size(); ++s) {
    svg += end_name(frame, *named[s], ends[s], places[s]);
  }
  if (named.empty()) {
    svg += svg_text((frame.left() + frame.right()) / 2, (frame.top() + frame.bottom()) / 2, "mid",
                    "nothing to draw yet");
  }
  return svg_picture(height, plot.title, svg);
}

}  // namespace coterie::train
