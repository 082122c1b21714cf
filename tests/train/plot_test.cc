// SPDX-License-Identifier: MIT
// Scales, ticks and the shapes of plots.
#include "report/plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <regex>

namespace coterie::train {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(PlotScale, MapsEndsToZeroAndOne) {
  const Scale linear{.low = 2, .high = 6};
  EXPECT_DOUBLE_EQ(linear.share(2), 0);
  EXPECT_DOUBLE_EQ(linear.share(5), 0.75);
  const Scale log{.kind = ScaleKind::log, .low = 0.01, .high = 100};
  EXPECT_DOUBLE_EQ(log.share(1), 0.5);
  EXPECT_DOUBLE_EQ(log.share(100), 1);
}

TEST(PlotScale, CoversWhatCanBeDrawnAndNothingElse) {
  const Scale linear = scale_over(ScaleKind::linear, {3, kNan, 5, kInfinity, 1e300});
  EXPECT_LT(linear.low, 3);
  EXPECT_GT(linear.low, 2.5);
  EXPECT_GT(linear.high, 5);
  EXPECT_LT(linear.high, 5.5);
  const Scale log = scale_over(ScaleKind::log, {-1, 0, 0.1, 10});
  EXPECT_GT(log.low, 0.05);
  EXPECT_LT(log.low, 0.1);
}

TEST(PlotScale, HasWidthForOneValueAndForNone) {
  for (const ScaleKind kind : {ScaleKind::linear, ScaleKind::log}) {
    for (const std::vector<double>& values :
         {std::vector<double>{}, std::vector<double>{5}, std::vector<double>{1e-20, 1e-20},
          std::vector<double>{kNan}}) {
      const Scale scale = scale_over(kind, values);
      EXPECT_LT(scale.low, scale.high);
      EXPECT_FALSE(ticks(scale, 5).empty());
    }
  }
}

TEST(PlotScale, TicksAreRoundNumbers) {
  EXPECT_EQ(ticks({.low = 0, .high = 1}, 5), (std::vector<double>{0, 0.2, 0.4, 0.2 * 3, 0.8, 1}));
  EXPECT_EQ(ticks({.low = -3, .high = 7}, 5), (std::vector<double>{-2, 0, 2, 4, 6}));
  const std::vector<double> decades =
      ticks({.kind = ScaleKind::log, .low = 0.001, .high = 1000}, 5);
  ASSERT_GE(decades.size(), 3u);
  for (const double tick : decades) {
    EXPECT_NEAR(std::log10(tick), std::round(std::log10(tick)), 1e-9);
  }
  EXPECT_FALSE(std::signbit(ticks({.low = -0.1, .high = 1}, 5)[0]));  // no label "-0"
}

// Coordinates of all circles of a picture.
std::vector<std::pair<double, double>> circles(const std::string& svg) {
  std::vector<std::pair<double, double>> found;
  const std::regex circle("cx=\"([-0-9.e]+)\" cy=\"([-0-9.e]+)\"");
  for (std::sregex_iterator at(svg.begin(), svg.end(), circle), end; at != end; ++at) {
    found.emplace_back(std::stod((*at)[1]), std::stod((*at)[2]));
  }
  return found;
}

TEST(Plots, HigherValuesAreHigherAndLaterOnesFurtherRight) {
  const Plot plot{.title = "t",
                  .x = {.label = "x"},
                  .y = {.label = "y"},
                  .series = {{.name = "s", .points = {{0, 1}, {1, 2}, {2, 5}}}}};
  const auto points = circles(line_plot(plot));
  ASSERT_EQ(points.size(), 3u);
  EXPECT_LT(points[0].first, points[1].first);
  EXPECT_GT(points[0].second, points[1].second);
  EXPECT_GT(points[1].second, points[2].second);
  EXPECT_NEAR((points[1].second - points[2].second) / (points[0].second - points[1].second), 3,
              0.05);  // coordinates have one decimal
}

TEST(Plots, WhatCannotBeDrawnIsLeftOut) {
  const Plot plot{.title = "t",
                  .x = {.label = "x"},
                  .y = {.label = "y", .kind = ScaleKind::log},
                  .series = {{.name = "s", .points = {{0, 1}, {1, kNan}, {2, 0}, {3, 5}}},
                             {.name = "empty", .points = {}}}};
  for (const std::string& svg : {line_plot(plot), scatter_plot(plot)}) {
    EXPECT_EQ(circles(svg).size(), 2u);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
  }
  EXPECT_NE(line_plot({.title = "t", .x = {}, .y = {}, .series = {}}).find("nothing to draw"),
            std::string::npos);
}

// Vertical positions of the names next to a plot.
std::vector<double> name_places(const std::string& svg) {
  std::vector<double> found;
  const std::regex name("y=\"([-0-9.e]+)\" class=\"name\">s");
  for (std::sregex_iterator at(svg.begin(), svg.end(), name), end; at != end; ++at) {
    found.push_back(std::stod((*at)[1]));
  }
  return found;
}

TEST(Plots, NamesOfEqualLinesDoNotCoverEachOther) {
  Plot plot{.title = "t", .x = {.label = "x"}, .y = {.label = "y"}, .series = {}};
  for (int s = 0; s < 12; ++s) {
    plot.series.push_back({.name = "s" + std::to_string(s), .points = {{0, 0}, {1, 1}}});
  }
  std::vector<double> places = name_places(line_plot(plot));
  ASSERT_EQ(places.size(), 12u);
  std::sort(places.begin(), places.end());
  for (std::size_t s = 1; s < places.size(); ++s) EXPECT_GE(places[s] - places[s - 1], 12);
  EXPECT_GE(places.front(), 0);
  EXPECT_LE(places.back(), 260);
}

TEST(Plots, HeatMapsMarkWhatWasNotMeasured) {
  const HeatMap map{.title = "t",
                    .x_label = "x",
                    .y_label = "y",
                    .columns = {"64", "128"},
                    .rows = {"4"},
                    .values = {{0.5, std::nullopt}},
                    .texts = {{"50 %", ""}}};
  const std::string svg = heat_map(map);
  EXPECT_NE(svg.find("50 %"), std::string::npos);
  EXPECT_NE(svg.find("class=\"none\""), std::string::npos);
  EXPECT_NE(svg.find("fill=\"#21918c\""), std::string::npos);  // the middle of the scale
}

TEST(Plots, BarsShareAScale) {
  const std::string svg = bar_plot({.title = "t", .colour = 3, .values = {2, 1, 0}, .high = 4});
  EXPECT_NE(svg.find("V65H"), std::string::npos);    // half of 130
  EXPECT_NE(svg.find("V97.5H"), std::string::npos);  // a quarter
  EXPECT_EQ(svg.find("V130H"), std::string::npos);   // no bar for 0
}

TEST(Plots, NamesAreEscaped) {
  const Plot plot{.title = "<t>",
                  .x = {.label = "<x>"},
                  .y = {.label = "<y>"},
                  .series = {{.name = "<s>", .points = {{0, 1}}}},
                  .levels = {{"<l>", 1}}};
  for (const std::string& svg : {line_plot(plot), scatter_plot(plot)}) {
    for (const char* const raw : {"<t>", "<x>", "<y>", "<s>", "<l>"}) {
      EXPECT_EQ(svg.find(raw), std::string::npos) << raw;
    }
  }
}

}  // namespace
}  // namespace coterie::train
