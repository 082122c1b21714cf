// SPDX-License-Identifier: MIT
#include "formats/safetensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

StoredTensor tensor(const std::string& dtype, std::vector<std::int64_t> shape, std::size_t bytes) {
  StoredTensor made{.dtype = dtype, .shape = std::move(shape), .bytes = {}};
  for (std::size_t i = 0; i < bytes; ++i) made.bytes.push_back(static_cast<char>(i * 37 + 5));
  return made;
}

std::string with_length(const std::string& header, const std::string& data, std::uint64_t length) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(length >> (8 * i));
  return file + header + data;
}

std::string file_of(const std::string& header, const std::string& data = "") {
  return with_length(header, data, header.size());
}

SafeTensors parsed(const std::string& file) {
  return parse_safetensors(file.data(), file.size(), "a file");
}

std::string error_of(const std::string& file) {
  try {
    parsed(file);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The entry of one tensor "w" over the first eight bytes.
std::string entry(const std::string& dtype, const std::string& shape,
                  const std::string& offsets = "[0,8]") {
  return R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

void expect_equal(const SafeTensors& a, const SafeTensors& b) {
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, stored] : a.tensors) {
    ASSERT_TRUE(b.tensors.contains(name)) << name;
    const StoredTensor& other = b.tensors.at(name);
    EXPECT_EQ(stored.dtype, other.dtype) << name;
    EXPECT_EQ(stored.shape, other.shape) << name;
    EXPECT_EQ(stored.bytes, other.bytes) << name;
  }
}

TEST(SafeTensors, WhatIsWrittenIsRead) {
  const TemporaryFolder folder;
  SafeTensors content;
  content.tensors["weight"] = tensor("F32", {2, 3}, 24);
  content.tensors["scalar"] = tensor("BF16", {}, 2);
  content.tensors["none"] = tensor("I64", {0, 7}, 0);
  content.tensors["mask \"\n\u00e4"] = tensor("BOOL", {5}, 5);
  content.metadata = {{"format", "pt"}, {"note", "a \"quoted\" one"}};
  write_safetensors(folder.path("a"), content);
  expect_equal(read_safetensors(folder.path("a")), content);
  write_safetensors(folder.path("empty"), {});
  expect_equal(read_safetensors(folder.path("empty")), {});
}

TEST(SafeTensors, TensorsAreAlignedToTheirElements) {
  const TemporaryFolder folder;
  SafeTensors content;
  content.tensors["a"] = tensor("BOOL", {3}, 3);
  content.tensors["b"] = tensor("F64", {1}, 8);
  content.tensors["c"] = tensor("F16", {3}, 6);
  content.tensors["d"] = tensor("F32", {1}, 4);
  write_safetensors(folder.path("a"), content);
  const std::string file = read_file(folder.path("a"));
  const std::size_t header =
      static_cast<unsigned char>(file[0]) + 256u * static_cast<unsigned char>(file[1]);
  EXPECT_EQ(header % 8, 0u);
  EXPECT_EQ(file[8], '{');
  EXPECT_EQ(file.size(), 8 + header + 21);
  for (const char* const place :
       {R"("data_offsets":[0,8],"dtype":"F64")", R"("data_offsets":[8,12],"dtype":"F32")",
        R"("data_offsets":[12,18],"dtype":"F16")", R"("data_offsets":[18,21],"dtype":"BOOL")"}) {
    EXPECT_NE(file.find(place), std::string::npos) << place << " in " << file.substr(8, header);
  }
}

TEST(SafeTensors, FilesOfOtherWritersAreRead) {
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("b":{"dtype":"I32","shape":[1,2],"data_offsets":[2,10]},)"
                             R"( "a":{"shape":[2],"dtype":"U8","data_offsets":[0,2]}}   )";
  const SafeTensors content = parsed(file_of(header, "0123456789"));
  EXPECT_EQ(content.metadata.at("format"), "pt");
  EXPECT_EQ(content.tensors.at("a").bytes, (std::vector<char>{'0', '1'}));
  EXPECT_EQ(content.tensors.at("b").shape, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(content.tensors.at("b").bytes.size(), 8u);
}

TEST(SafeTensors, EveryCutIsNoticed) {
  const TemporaryFolder folder;
  SafeTensors content;
  content.tensors["weight"] = tensor("F32", {2, 3}, 24);
  write_safetensors(folder.path("a"), content);
  const std::string file = read_file(folder.path("a"));
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(error_of(file.substr(0, size)).find("[safetensors] a file: "), std::string::npos)
        << size << " of " << file.size();
  }
  EXPECT_NE(error_of(file + "x").find("expected 24 bytes of tensors; got 25"), std::string::npos);
}

TEST(SafeTensors, LengthsBeyondTheFileAreRefused) {
  const std::string header = entry("F32", "[2]");
  EXPECT_EQ(error_of(file_of(header, "01234567")), "");
  for (const std::uint64_t length :
       {std::uint64_t{0}, header.size() + 9, std::uint64_t{1} << 40, std::uint64_t{1} << 63,
        std::numeric_limits<std::uint64_t>::max()}) {
    EXPECT_NE(error_of(with_length(header, "01234567", length)).find("expected a JSON header"),
              std::string::npos)
        << length;
  }
}

struct Malformed {
  std::string header, message;
};

TEST(SafeTensors, MalformedHeadersAreRefusedWithAReason) {
  const std::vector<Malformed> cases = {
      {"[1]", "expected a JSON header"},
      {R"({"w":)", "the header is not JSON"},
      {"{} {}", "the header is not JSON"},
      {"{\"\xff\":1}", "the header is not JSON"},
      {R"({"w":3})", "\"w\": expected a JSON object"},
      {R"({"w":{}})", "expected \"dtype\" of type string"},
      {R"({"__metadata__":{"a":1}})", "expected \"a\" of type string"},
      {R"({"__metadata__":"a"})", "expected a JSON object"},
      {entry("F31", "[2]"), "expected one of the types BOOL, U8"},
      {entry("F32", "2"), "expected \"shape\" of type array"},
      {entry("F32", "[-2]"), "expected a whole number, 0 or more; got -2"},
      {entry("F32", "[2.0]"), "expected a whole number, 0 or more; got 2.0"},
      {entry("F32", "[\"2\"]"), "expected a whole number, 0 or more; got string"},
      {entry("F32", "[18446744073709551615]"), "expected a whole number"},
      {entry("F32", "[99999999999999999999]"), "expected a whole number"},
      {entry("F32", "[4611686018427387904,4]"), "expected a shape that fits in memory"},
      {entry("F32", "[3]"), "expected data_offsets 12 bytes apart; got [0,8]"},
      {entry("F32", "[2]", "[8,0]"), "expected data_offsets 8 bytes apart"},
      {entry("F32", "[2]", "[0,8,8]"), "expected two data_offsets; got 3"},
      {entry("F32", "[2]", "[1,9]"), "expected tensors without gaps or overlaps"},
      {entry("F32", "[2]", "[9223372036854775799,9223372036854775807]"), "without gaps"},
      {entry("F32", "[[[2]]]"), "deeper nesting"},
      {entry("F32", "[4]", "[0,16]"), "expected 16 bytes of tensors; got 8 (the file is cut off)"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "expected tensors without gaps or overlaps; got \"v\" at byte 4"},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "expected each name once; got \"w\" again"}};
  for (const Malformed& malformed : cases) {
    const std::string error = error_of(file_of(malformed.header, "01234567"));
    EXPECT_NE(error.find(malformed.message), std::string::npos)
        << malformed.header << ": " << error;
  }
}

TEST(SafeTensors, WhatDoesNotFitTogetherIsNotWritten) {
  const TemporaryFolder folder;
  SafeTensors short_one, unknown, reserved, no_text;
  short_one.tensors["w"] = tensor("F32", {2}, 4);
  unknown.tensors["w"] = tensor("F31", {1}, 4);
  reserved.tensors["__metadata__"] = tensor("U8", {1}, 1);
  no_text.tensors["\xff"] = tensor("U8", {1}, 1);
  for (const SafeTensors* const content : {&short_one, &unknown, &reserved, &no_text}) {
    EXPECT_THROW(write_safetensors(folder.path("a"), *content), Error);
    EXPECT_FALSE(std::filesystem::exists(folder.path("a")));
  }
}

}  // namespace
}  // namespace coterie::train
