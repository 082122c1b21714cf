// SPDX-License-Identifier: MIT
// Sets of labelled images, from the files in which they are published:
//
//   MNIST          train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-...
//   CIFAR-10       records of a label and 3 x 1024 values in files train*.bin (data_batch*.bin) and
//                  test*.bin
//   folders        train/CLASS/*.jpg, test/CLASS/*.jpg; classes are numbered by their names
//
// A tenth of the training images, at most 5,000, is held out for validation: the last ones, of
// folders the last ones of every class.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "train/config.h"
#include "train/task.h"

namespace coterie::train {

struct ImageSet {
  std::string values;  // of all images, by row, column and channel
  std::string labels;  // one byte each

  std::int64_t size() const { return static_cast<std::int64_t>(labels.size()); }
};

struct Images {
  std::int64_t height = 0, width = 0, channels = 0, classes = 0;
  ImageSet parts[3];  // by Split
  DataFacts facts;

  const ImageSet& operator[](Split split) const { return parts[static_cast<std::size_t>(split)]; }
  std::int64_t values() const { return height * width * channels; }  // of an image
  std::string_view image(Split split, std::int64_t index) const {
    const auto size = static_cast<std::size_t>(values());
    return std::string_view((*this)[split].values)
        .substr(static_cast<std::size_t>(index) * size, size);
  }
};

// The images of config.data; throws an Error that names the file that is missing or malformed.
Images read_images(const Config& config);

}  // namespace coterie::train
