// SPDX-License-Identifier: MIT
// Images as sequences of values: the class of the grey image (as in Long Range Arena), or each
// value from those before it, in the order of rows, columns and channels.
#include <fmt/core.h>

#include <cmath>
#include <utility>

#include "coterie/error.h"
#include "train/image_files.h"
#include "train/tasks/examples.h"
#include "train/tasks/tasks.h"
#include "train/tasks/text.h"

namespace coterie::train {
namespace {

constexpr std::int64_t kLevels = 256;
using LazyImages = Lazy<Images>;

std::int64_t value_of(std::string_view values, std::size_t place) {
  return static_cast<unsigned char>(values[place]);
}

void check_length(std::int64_t length, std::int64_t wanted) {
  if (length == wanted) return;
  throw Error(
      fmt::format("[images] expected --length {}, the values of an image; got {}", wanted, length));
}

class ImageClassTask final : public ClassTask {
 public:
  explicit ImageClassTask(const Config& config)
      : ClassTask(config.seed, config.length), images_([config] { return read_images(config); }) {}

  void load() const { check_length(length(), images_.get().height * images_.get().width); }

  std::string name() const override { return "images"; }
  std::int64_t vocabulary() const override { return kLevels; }
  std::optional<ImageAnswers> image() const override {
    return ImageAnswers{images_.get().height, images_.get().width, 1};
  }
  DataFacts data() const override { return images_.get().facts; }

 protected:
  std::int64_t classes() const override { return images_.get().classes; }
  std::int64_t examples(Split split) const override { return images_.get()[split].size(); }

  void fill_example(std::int64_t example, Row& row) const override {
    const Images& images = images_.get();
    const std::string_view values = images.image(row.split, example);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      row.tokens[i] = images.channels == 1 ? value_of(values, i) : grey(values.substr(3 * i, 3));
    }
    row.targets[0] = value_of(images[row.split].labels, static_cast<std::size_t>(example));
  }

 private:
  // Luma of BT.601, rounded.
  static std::int64_t grey(std::string_view rgb) {
    return (299 * value_of(rgb, 0) + 587 * value_of(rgb, 1) + 114 * value_of(rgb, 2) + 500) / 1000;
  }

  LazyImages images_;
};

class ImageValuesTask final : public ExampleTask {
 public:
  explicit ImageValuesTask(const Config& config)
      : ExampleTask(config.seed, config.length),
        images_([config] { return read_images(config); }) {}

  void load() const { check_length(length(), images_.get().values()); }

  std::string name() const override { return "images"; }
  std::int64_t vocabulary() const override { return kLevels; }
  Answers answers() const override { return *image(); }
  std::optional<ImageAnswers> image() const override {
    const Images& images = images_.get();
    return ImageAnswers{images.height, images.width, images.channels};
  }
  bool causal() const override { return true; }
  bool needs_positions() const override { return false; }  // the model has its own
  Metric metric() const override { return Metric::bits_per_dimension; }
  std::vector<Baseline> baselines() const override {
    const double loss = frequency_loss(counts(Split::train), counts(Split::valid));
    return {{"values by frequency", loss / std::log(2.0)}};
  }
  DataFacts data() const override { return images_.get().facts; }

 protected:
  std::int64_t examples(Split split) const override { return images_.get()[split].size(); }

  void fill_example(std::int64_t example, Row& row) const override {
    const std::string_view values = images_.get().image(row.split, example);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      row.tokens[i] = row.targets[i] = value_of(values, i);
    }
  }

 private:
  std::vector<std::int64_t> counts(Split split) const {
    std::vector<std::int64_t> counts(kLevels);
    for (const char value : images_.get()[split].values)
      ++counts[static_cast<unsigned char>(value)];
    return counts;
  }

  LazyImages images_;
};

template <class Kind>
std::unique_ptr<Task> make(const Config& config, const TaskFiles* stored) {
  auto task = std::make_unique<Kind>(config);
  if (stored == nullptr) task->load();
  return task;
}

}  // namespace

std::unique_ptr<Task> make_images_task(const Config& config, const TaskFiles* stored) {
  return config.images.predict == "pixels" ? make<ImageValuesTask>(config, stored)
                                           : make<ImageClassTask>(config, stored);
}

}  // namespace coterie::train
