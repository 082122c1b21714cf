// SPDX-License-Identifier: MIT
// Pathfinder as in Long Range Arena: a square grey image, read by rows, has two long dashed paths,
// shorter ones that distract, and two discs. The class is 1 if the discs are the ends of one path.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "coterie/error.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kTrainPictures = 160'000, kHeldOutPictures = 2'000, kGreys = 256;
constexpr double kPaddle = 2.0, kGap = 1.0;  // lengths in pixels
constexpr double kApart = 2.5;               // distance of paths
constexpr double kMarker = 1.5;              // radius of a disc
constexpr double kTurn = 0.6;                // largest angle between neighbouring paddles
constexpr std::int64_t kDistractorPaddles = 4;

struct Point {
  double x = 0, y = 0;
};

double distance(Point a, Point b) { return std::hypot(a.x - b.x, a.y - b.y); }

double distance_to_segment(Point p, Point a, Point b) {
  const double dx = b.x - a.x, dy = b.y - a.y;
  const double along = ((p.x - a.x) * dx + (p.y - a.y) * dy) / (dx * dx + dy * dy);
  const double t = std::clamp(along, 0.0, 1.0);
  return distance(p, {a.x + t * dx, a.y + t * dy});
}

using DashedPath = std::vector<std::pair<Point, Point>>;  // paddles

// Draws one image.
class PathPicture {
 public:
  PathPicture(RandomStream random, std::int64_t side, const PathfinderConfig& config)
      : random_(random), side_(static_cast<double>(side)) {
    const DashedPath first = new_path(config.paddles), second = new_path(config.paddles);
    complete_ = !first.empty() && !second.empty();
    if (!complete_) return;
    for (std::int64_t i = 0; i < config.distractors; ++i) new_path(kDistractorPaddles);
    joined_ = unit() < 0.5;
    const Point other = unit() < 0.5 ? second.front().first : second.back().second;
    markers_ = {first.front().first, joined_ ? first.back().second : other};
  }

  bool complete() const { return complete_; }  // whether both paths found room
  bool joined() const { return joined_; }

  std::int64_t level(std::int64_t row, std::int64_t column) const {
    const Point pixel{static_cast<double>(column) + 0.5, static_cast<double>(row) + 0.5};
    double light = 0;
    for (const DashedPath& path : paths_) {
      for (const auto& [a, b] : path) {
        light = std::max(light, 1.0 - distance_to_segment(pixel, a, b));
      }
    }
    for (const Point marker : markers_) {
      light = std::max(light, kMarker + 0.5 - distance(pixel, marker));
    }
    return std::lround(std::clamp(light, 0.0, 1.0) * (kGreys - 1));
  }

 private:
  double unit() { return random_unit(random_.at(drawn_++).word[0]); }

  // A path that keeps its distance from the others and from itself; empty if none was found.
  DashedPath new_path(std::int64_t paddles) {
    for (int attempt = 0; attempt < 200; ++attempt) {
      DashedPath path = try_path(paddles);
      if (path.empty()) continue;
      paths_.push_back(path);
      return path;
    }
    return {};
  }

  DashedPath try_path(std::int64_t paddles) {
    DashedPath path;
    Point at{unit() * side_, unit() * side_};
    double angle = unit() * 2 * std::numbers::pi;
    for (std::int64_t i = 0; i < paddles; ++i) {
      const Point end = moved(at, angle, kPaddle);
      if (!has_room(at, path) || !has_room(end, path)) return {};
      path.emplace_back(at, end);
      angle += (2 * unit() - 1) * kTurn;
      at = moved(end, angle, kGap);
    }
    return path;
  }

  static Point moved(Point from, double angle, double by) {
    return {from.x + by * std::cos(angle), from.y + by * std::sin(angle)};
  }

  // In the image, and apart from other paths and from all but the last paddles of the own one.
  bool has_room(Point p, const DashedPath& own) const {
    constexpr double kMargin = kMarker + 0.5;
    constexpr std::size_t kNear = 2;
    if (std::min(p.x, p.y) < kMargin || std::max(p.x, p.y) > side_ - kMargin) return false;
    const auto apart = [&](const std::pair<Point, Point>& paddle) {
      return distance_to_segment(p, paddle.first, paddle.second) >= kApart;
    };
    for (const DashedPath& path : paths_) {
      if (!std::all_of(path.begin(), path.end(), apart)) return false;
    }
    const std::size_t far = own.size() > kNear ? own.size() - kNear : 0;
    return std::all_of(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(far), apart);
  }

  RandomStream random_;
  double side_;
  std::uint64_t drawn_ = 0;
  std::vector<DashedPath> paths_;
  std::array<Point, 2> markers_{};
  bool complete_ = false, joined_ = false;
};

class PathfinderTask final : public ClassTask {
 public:
  explicit PathfinderTask(const Config& config)
      : ClassTask(config.seed, config.length),
        config_(config.pathfinder),
        side_(std::llround(std::sqrt(static_cast<double>(config.length)))) {
    if (side_ * side_ != config.length || side_ < 16) {
      throw Error(fmt::format(
          "[pathfinder] expected --length to be the square of 16 or more, like 1024; got {}",
          config.length));
    }
    drawn(Split::train, 0);
  }

  std::string name() const override { return "pathfinder"; }
  std::int64_t vocabulary() const override { return kGreys; }
  std::optional<ImageAnswers> image() const override { return ImageAnswers{side_, side_, 1}; }
  std::vector<Baseline> baselines() const override { return {{"a guess", 0.5}}; }

 protected:
  std::int64_t classes() const override { return 2; }
  std::int64_t examples(Split split) const override {
    return split == Split::train ? kTrainPictures : kHeldOutPictures;
  }

  void fill_example(std::int64_t example, Row& row) const override {
    const PathPicture picture = drawn(row.split, example);
    for (std::int64_t i = 0; i < length(); ++i) {
      row.tokens[static_cast<std::size_t>(i)] = picture.level(i / side_, i % side_);
    }
    row.targets[0] = picture.joined() ? 1 : 0;
  }

 private:
  PathPicture drawn(Split split, std::int64_t example) const {
    constexpr std::uint32_t kAttempts = 1'000;
    for (std::uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
      PathPicture picture(random_of(split, example, attempt), side_, config_);
      if (picture.complete()) return picture;
    }
    throw Error(
        fmt::format("[pathfinder] two paths of {} paddles do not fit into {} x {} pixels: lower "
                    "--pathfinder.paddles or raise --length",
                    config_.paddles, side_, side_));
  }

  PathfinderConfig config_;
  std::int64_t side_;
};

}  // namespace

std::unique_ptr<Task> make_pathfinder_task(const Config& config, const TaskFiles* /*stored*/) {
  return std::make_unique<PathfinderTask>(config);
}

}  // namespace coterie::train
