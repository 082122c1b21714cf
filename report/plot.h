// SPDX-License-Identifier: MIT
// Plots as SVG text for an HTML page: lines, dots, bars, heat maps.
//
// Colours are CSS classes c0, c1, ..., and so are ink, grid and surface; the style sheet
// (plot_style) defines them for light and dark pages. Pictures are 400 units wide and scale with
// their box. Names and labels are plain text; they are escaped here.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "report/plot_scale.h"

namespace coterie::train {

constexpr int kPlotColours = 9;  // classes c0 .. c8; c0 is the ink

struct PlotTick {
  double value = 0;
  std::string text;
};

struct PlotAxis {
  std::string label;  // with its unit
  ScaleKind kind = ScaleKind::linear;
  std::optional<double> low{}, high{};  // limits; from the data if absent
  std::vector<PlotTick> ticks{};        // round numbers when empty
  bool percent = false;                 // values are fractions, shown as percentages
};

struct PlotSeries {
  std::string name;
  int colour = 0;
  int dash = 0;                                     // pattern of the line; 0: solid
  std::vector<std::pair<double, double>> points{};  // points that cannot be drawn are skipped
};

// A horizontal reference line.
struct PlotLevel {
  std::string name;
  double value = 0;
};

struct Plot {
  std::string title;  // for screen readers
  PlotAxis x, y;
  std::vector<PlotSeries> series;
  std::vector<PlotLevel> levels{};
};

// A line per series, its name at the right end.
std::string line_plot(const Plot& plot);

// The points of each series as dots, with the name next to the last one.
std::string scatter_plot(const Plot& plot);

// Small bars without axes, and a dashed line at their mean.
struct BarPlot {
  std::string title;
  int colour = 0;
  std::vector<double> values;
  double high = 0;  // upper limit, for comparable pictures; 0: the largest value
};
std::string bar_plot(const BarPlot& plot);

// One value per row and column, printed in its cell.
struct HeatMap {
  std::string title, x_label, y_label;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<std::optional<double>>> values;  // [row][column]; absent: not measured
  double low = 0, high = 1;                                // values of the first and last colour
  std::vector<std::vector<std::string>> texts;             // printed texts, same layout as `values`
};
std::string heat_map(const HeatMap& map);

// The style sheet of all pictures.
std::string plot_style();

}  // namespace coterie::train
