// SPDX-License-Identifier: MIT
#include "formats/event_file.h"

#include <array>
#include <bit>

namespace coterie::train {
namespace {

// Remainders of all bytes by the reflected polynomial 0x1edc6f41.
constexpr std::array<std::uint32_t, 256> make_remainders() {
  std::array<std::uint32_t, 256> remainders{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0x82f63b78U : 0U);
    remainders[byte] = value;
  }
  return remainders;
}
constexpr std::array<std::uint32_t, 256> kRemainders = make_remainders();

template <class Unsigned>
std::string little_endian(Unsigned number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof number; ++i) {
    bytes += static_cast<char>(number >> (8 * i) & 0xff);
  }
  return bytes;
}

// Protobuf: numbers of seven bits a byte, least significant first, and fields after a key of their
// number and type.
enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(std::uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  return bytes + static_cast<char>(number);
}

std::string field(std::uint32_t number, WireType type, const std::string& value) {
  const std::string length = type == kBytes ? varint(value.size()) : "";
  return varint(number << 3 | type) + length + value;
}

std::string record(const std::string& data) {
  const std::string length = little_endian(static_cast<std::uint64_t>(data.size()));
  return length + little_endian(masked_crc32c(length)) + data + little_endian(masked_crc32c(data));
}

// Event: wall_time = 1, step = 2, file_version = 3, summary = 5; Summary: value = 1;
// Summary.Value: tag = 1, simple_value = 2.
std::string time_field(double time) {
  return field(1, kFixed64, little_endian(std::bit_cast<std::uint64_t>(time)));
}

std::string scalar(const ScalarEvent& event) {
  const std::string value =
      field(1, kBytes, event.tag) +
      field(2, kFixed32, little_endian(std::bit_cast<std::uint32_t>(event.value)));
  return time_field(event.time) +
         field(2, kVarint, varint(static_cast<std::uint64_t>(event.step))) +
         field(5, kBytes, field(1, kBytes, value));
}

}  // namespace

std::uint32_t crc32c(std::string_view data) {
  std::uint32_t value = ~0U;
  for (const char byte : data) {
    value = value >> 8 ^ kRemainders[(value ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return ~value;
}

std::uint32_t masked_crc32c(std::string_view data) {
  return std::rotr(crc32c(data), 15) + 0xa282ead8U;
}

std::string event_file(double time, const std::vector<ScalarEvent>& events) {
  std::string content = record(time_field(time) + field(3, kBytes, "brain.Event:2"));
  for (const ScalarEvent& event : events) content += record(scalar(event));
  return content;
}

}  // namespace coterie::train
