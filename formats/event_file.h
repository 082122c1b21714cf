// SPDX-License-Identifier: MIT
// Event files of TensorBoard with scalars: TFRecords of protobuf messages `Event`.
//
// A record is the length of its data (u64), the masked checksum of these eight bytes, the data and
// their masked checksum (u32 each), all little-endian. The first event has a version, the others a
// time, a step and one value. Only this subset of the protobuf wire format is written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace coterie::train {

struct ScalarEvent {
  double time = 0;  // seconds since 1970
  std::int64_t step = 0;
  std::string tag;  // "train/loss"
  float value = 0;
};

// The content of a file that begins at `time`.
std::string event_file(double time, const std::vector<ScalarEvent>& events);

// CRC-32C (Castagnoli), and as TFRecords store it.
std::uint32_t crc32c(std::string_view data);
std::uint32_t masked_crc32c(std::string_view data);

}  // namespace coterie::train
