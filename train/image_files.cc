// SPDX-License-Identifier: MIT
#include "train/image_files.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>

#include "coterie/error.h"
#include "formats/checksum.h"
#include "train/corpus.h"
#include "train/pictures.h"

namespace coterie::train {
namespace {

using Files = std::vector<CorpusFile>;
constexpr std::int64_t kMostValid = 5'000, kMostClasses = 256;

[[noreturn]] void refuse_images(const std::string& name, const std::string& reason) {
  throw Error("[data] " + name + ": " + reason);
}

std::string base_name(const CorpusFile& file) {
  return std::filesystem::path(file.name).filename().string();
}

void append(ImageSet& part, std::string_view values, std::int64_t label) {
  part.values += values;
  part.labels += static_cast<char>(label);
}

std::int64_t big_endian(std::string_view bytes, std::size_t place) {
  std::int64_t value = 0;
  for (std::size_t i = 0; i < 4; ++i)
    value = value << 8 | static_cast<unsigned char>(bytes[place + i]);
  return value;
}

// The values of an idx file of bytes after its header, and its sizes.
std::string_view idx_values(const CorpusFile& file, std::vector<std::int64_t>& sizes) {
  const std::string_view text = file.text;
  const std::size_t header = 4 + 4 * sizes.size();
  const auto magic = static_cast<std::int64_t>(0x800 + sizes.size());
  if (text.size() < header || big_endian(text, 0) != magic) {
    refuse_images(file.name,
                  fmt::format("expected an idx file of bytes with {} dimensions (magic "
                              "number {}); got {}",
                              sizes.size(), magic, text.size() < 4 ? 0 : big_endian(text, 0)));
  }
  std::uint64_t values = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = big_endian(text, 4 + 4 * i);
    values =
        sizes[i] == 0 || values > text.size() ? 0 : values * static_cast<std::uint64_t>(sizes[i]);
  }
  if (values == 0 || values != text.size() - header) {
    refuse_images(file.name, fmt::format("expected {} bytes after its header; got {}", values,
                                         text.size() - header));
  }
  return text.substr(header);
}

const CorpusFile& idx_file(const Files& files, const std::string& name) {
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const CorpusFile& file) { return base_name(file) == name; });
  if (found == files.end())
    throw Error("[data] expected a file " + name + " in the folder of the images");
  return *found;
}

void check_shape(const Images& images, const Picture& picture, const std::string& name) {
  if (picture.height == images.height && picture.width == images.width &&
      picture.channels == images.channels) {
    return;
  }
  refuse_images(name, fmt::format("expected {} x {} x {} values like the other images; got {} x {} "
                                  "x {}",
                                  images.height, images.width, images.channels, picture.height,
                                  picture.width, picture.channels));
}

void read_idx(const Files& files, const std::string& name, Images& images, ImageSet& part) {
  const CorpusFile& pictures = idx_file(files, name + "-images-idx3-ubyte");
  const CorpusFile& answers = idx_file(files, name + "-labels-idx1-ubyte");
  std::vector<std::int64_t> sizes(3), count(1);
  part.values = idx_values(pictures, sizes);
  part.labels = idx_values(answers, count);
  if (count[0] != sizes[0]) {
    refuse_images(answers.name, fmt::format("expected {} labels; got {}", sizes[0], count[0]));
  }
  const Picture shape{.height = sizes[1], .width = sizes[2], .channels = 1, .values = {}};
  if (images.height == 0) {
    std::tie(images.height, images.width, images.channels) =
        std::tuple(shape.height, shape.width, shape.channels);
  }
  check_shape(images, shape, pictures.name);
}

// Records of CIFAR-10 have a plane per channel.
void read_records(const CorpusFile& file, ImageSet& part) {
  constexpr std::size_t kPlane = 1024, kRecord = 1 + 3 * kPlane;
  if (file.text.empty() || file.text.size() % kRecord != 0) {
    refuse_images(file.name, fmt::format("expected records of {} bytes; got {} bytes", kRecord,
                                         file.text.size()));
  }
  std::string values(3 * kPlane, '\0');
  for (std::size_t at = 0; at < file.text.size(); at += kRecord) {
    for (std::size_t i = 0; i < 3 * kPlane; ++i) {
      values[i] = file.text[at + 1 + i % 3 * kPlane + i / 3];
    }
    append(part, values, static_cast<unsigned char>(file.text[at]));
  }
}

void read_folders(const Files& files, Images& images) {
  // By part, file name and class, so that the last ones are of all classes.
  std::map<std::tuple<std::string, std::string, std::string>, const CorpusFile*> order;
  std::map<std::string, std::int64_t> classes;
  for (const CorpusFile& file : files) {
    const std::filesystem::path path(file.name);
    if (path.extension() != ".jpg" && path.extension() != ".jpeg") continue;
    const std::string label = path.parent_path().filename().string();
    const std::string part = path.parent_path().parent_path().filename().string();
    if (part != "train" && part != "test") {
      refuse_images(file.name, "expected images in train/CLASS and test/CLASS");
    }
    order[{part, path.filename().string(), label}] = &file;
    classes[label] = 0;
  }
  std::int64_t number = 0;
  for (auto& item : classes) item.second = number++;
  if (number > kMostClasses) {
    refuse_images("--data",
                  fmt::format("expected at most {} classes; got {}", kMostClasses, number));
  }
  for (const auto& [key, file] : order) {
    const Picture picture = decode_jpeg(file->text, file->name);
    if (images.height == 0) {
      std::tie(images.height, images.width, images.channels) =
          std::tuple(picture.height, picture.width, picture.channels);
    }
    check_shape(images, picture, file->name);
    const Split split = std::get<0>(key) == "train" ? Split::train : Split::test;
    append(images.parts[static_cast<std::size_t>(split)], picture.values,
           classes[std::get<2>(key)]);
  }
}

bool ends_with(const Files& files, const std::string& ending) {
  return std::any_of(files.begin(), files.end(),
                     [&](const CorpusFile& file) { return file.name.ends_with(ending); });
}

void read_all(const Files& files, const std::string& data, Images& images) {
  ImageSet& train = images.parts[static_cast<std::size_t>(Split::train)];
  ImageSet& test = images.parts[static_cast<std::size_t>(Split::test)];
  if (ends_with(files, "-idx3-ubyte")) {
    read_idx(files, "train", images, train);
    read_idx(files, "t10k", images, test);
  } else if (ends_with(files, ".bin")) {
    images.height = images.width = 32;
    images.channels = 3;
    for (const CorpusFile& file : files) {
      const std::string name = base_name(file);
      if (!name.ends_with(".bin")) continue;
      read_records(file, name.starts_with("test") ? test : train);
    }
  } else if (ends_with(files, ".jpg") || ends_with(files, ".jpeg")) {
    read_folders(files, images);
  } else {
    refuse_images(data,
                  "expected images: idx files of MNIST, .bin files of CIFAR-10, or "
                  "train/CLASS/*.jpg and test/CLASS/*.jpg; got none of them");
  }
}

// Moves the last training images to valid.
void hold_out(Images& images) {
  ImageSet& train = images.parts[static_cast<std::size_t>(Split::train)];
  ImageSet& valid = images.parts[static_cast<std::size_t>(Split::valid)];
  const auto held = static_cast<std::size_t>(std::min(kMostValid, train.size() / 10));
  const std::size_t kept = train.labels.size() - held;
  const std::size_t bytes = kept * static_cast<std::size_t>(images.values());
  valid = {train.values.substr(bytes), train.labels.substr(kept)};
  train.values.resize(bytes);
  train.labels.resize(kept);
}

}  // namespace

Images read_images(const Config& config) {
  if (config.data.empty()) {
    throw Error("[images] expected --data with images: a folder or archive; got none");
  }
  const Files files = read_corpus_files(config.data, config.data_limit, FileKind::any);
  Images images;
  read_all(files, config.data, images);
  hold_out(images);
  std::string sums;
  for (const ImageSet& part : images.parts) {
    sums += text_checksum(part.values) + text_checksum(part.labels);
    images.facts.bytes += static_cast<std::int64_t>(part.values.size() + part.labels.size());
    for (const char label : part.labels) {
      images.classes =
          std::max<std::int64_t>(images.classes, static_cast<unsigned char>(label) + 1);
    }
  }
  images.facts.checksum = text_checksum(sums);
  if (images[Split::valid].size() == 0 || images[Split::test].size() == 0) {
    refuse_images(config.data,
                  fmt::format("expected at least 10 training images and a test image; "
                              "got {} and {}",
                              images[Split::train].size(), images[Split::test].size()));
  }
  return images;
}

}  // namespace coterie::train
