// SPDX-License-Identifier: MIT
// The safetensors format: eight bytes of header length, a JSON header, raw little-endian tensors.
// Files are written atomically; every number in a file is checked before memory is allocated or
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace coterie::train {

struct StoredTensor {
  std::string dtype;  // "F32", "BF16", "I64", "BOOL", ... as the format names them
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;
};

struct SafeTensors {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Throw Error naming the file and what is wrong with it.
SafeTensors read_safetensors(const std::string& path);
SafeTensors parse_safetensors(const char* data, std::size_t size, const std::string& name);
void write_safetensors(const std::string& path, const SafeTensors& content);

}  // namespace coterie::train
