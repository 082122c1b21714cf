// SPDX-License-Identifier: MIT
// SVG helpers shared by all plots.
#pragma once

#include <string>
#include <string_view>

namespace coterie::train {

constexpr double kPlotWidth = 400;
constexpr double kLineHeight = 13.5;

// Estimated width in the label font, assuming a wide one.
double text_width(std::string_view text);

// Coordinates with one decimal, without trailing zeros.
std::string number(double value);

std::string svg_text(double x, double y, const char* classes, std::string_view text);
std::string svg_line(double x1, double y1, double x2, double y2, const std::string& classes);
std::string svg_picture(double height, std::string_view title, const std::string& content);

}  // namespace coterie::train
