// SPDX-License-Identifier: MIT
// Heat maps and small bars.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "report/plot.h"
#include "report/plot_svg.h"
#include "report/text.h"

namespace coterie::train {

namespace {

struct Colour {
  double red, green, blue;  // 0..255
};

// Stops of viridis: perceptually uniform, also for colour-blind readers and in print.
constexpr std::array<Colour, 5> kStops = {
    {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}}};

Colour colour_at(double share) {
  const double place = std::clamp(share, 0.0, 1.0) * (kStops.size() - 1);
  const std::size_t below = std::min(static_cast<std::size_t>(place), kStops.size() - 2);
  const double part = place - static_cast<double>(below);
  const Colour &a = kStops[below], &b = kStops[below + 1];
  const auto mix = [&](double from, double to) { return from + part * (to - from); };
  return {mix(a.red, b.red), mix(a.green, b.green), mix(a.blue, b.blue)};
}

std::string hex(const Colour& colour) {
  return fmt::format("#{:02x}{:02x}{:02x}", static_cast<int>(colour.red),
                     static_cast<int>(colour.green), static_cast<int>(colour.blue));
}

bool bright(const Colour& colour) {
  return 0.299 * colour.red + 0.587 * colour.green + 0.114 * colour.blue > 120;
}

struct Cell {
  double x, y, width, height;
};

std::string cell_svg(const HeatMap& map, std::size_t row, std::size_t column, const Cell& cell) {
  const std::optional<double>& value = map.values[row][column];
  const std::string box =
      fmt::format("x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"3\"", number(cell.x + 1),
                  number(cell.y + 1), number(cell.width - 2), number(cell.height - 2));
  const double middle_x = cell.x + cell.width / 2, middle_y = cell.y + cell.height / 2 + 4;
  if (!value || !std::isfinite(*value)) {
    return fmt::format("<rect {} class=\"none\"/>", box) + svg_text(middle_x, middle_y, "mid", "–");
  }
  const Colour colour = colour_at((*value - map.low) / (map.high - map.low));
  return fmt::format("<rect {} fill=\"{}\"/>", box, hex(colour)) +
         fmt::format("<text x=\"{}\" y=\"{}\" class=\"mid strong\" style=\"fill:{}\">{}</text>",
                     number(middle_x), number(middle_y), bright(colour) ? "#000" : "#fff",
                     escape(map.texts[row][column]));
}

}  // namespace

std::string heat_map(const HeatMap& map) {
  constexpr double kAbove = 22, kBelow = 40, kRow = 34, kWidest = 120;
  double left = 0;
  for (const std::string& row : map.rows) left = std::max(left, text_width(row) + 12);
  const double columns = static_cast<double>(map.columns.size());
  const double width = std::min(kWidest, (kPlotWidth - left - 4) / columns);
  const double bottom = kAbove + kRow * static_cast<double>(map.rows.size());
  std::string svg = svg_text(4, 13, "name", map.y_label);
  for (std::size_t row = 0; row < map.rows.size(); ++row) {
    const double y = kAbove + kRow * static_cast<double>(row);
    svg += svg_text(left - 6, y + kRow / 2 + 4, "end", map.rows[row]);
    for (std::size_t column = 0; column < map.columns.size(); ++column) {
      const Cell cell{left + width * static_cast<double>(column), y, width, kRow};
      svg += cell_svg(map, row, column, cell);
    }
  }
  for (std::size_t column = 0; column < map.columns.size(); ++column) {
    svg += svg_text(left + width * (static_cast<double>(column) + 0.5), bottom + 16, "mid",
                    map.columns[column]);
  }
  svg += svg_text(left + width * columns / 2, bottom + 32, "mid", map.x_label);
  return svg_picture(bottom + kBelow, map.title, svg);
}

std::string bar_plot(const BarPlot& plot) {
  constexpr double kHeight = 130;
  const double count = static_cast<double>(plot.values.size());
  double high = plot.high;
  for (const double value : plot.values) high = std::max(high, value);
  const auto y = [&](double value) { return high > 0 ? kHeight * (1 - value / high) : kHeight; };
  const double step = kPlotWidth / std::max(count, 1.0), gap = step > 6 ? 2 : 0;
  std::string path;
  for (std::size_t bar = 0; bar < plot.values.size(); ++bar) {
    const double value = plot.values[bar], x = step * static_cast<double>(bar);
    if (!(value > 0) || !std::isfinite(value)) continue;
    path += fmt::format("M{0} {1}V{2}H{3}V{1}Z", number(x), number(kHeight), number(y(value)),
                        number(x + step - gap));
  }
  const double sum = std::accumulate(plot.values.begin(), plot.values.end(), 0.0);
  const double mean = y(sum / std::max(count, 1.0));
  return svg_picture(kHeight + 2, plot.title,
                     fmt::format("<path d=\"{}\" class=\"bar c{}\"/>", path, plot.colour) +
                         svg_line(0, mean, kPlotWidth, mean, "level") +
                         svg_line(0, kHeight, kPlotWidth, kHeight, "axis"));
}

}  // namespace coterie::train
