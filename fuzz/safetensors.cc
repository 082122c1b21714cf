// SPDX-License-Identifier: MIT
// The safetensors reader. Each input is read as a file and, if that fails, as the header of one:
// mutations seldom get the header's length right. Accepted tensors are no larger than the file.
#include "formats/safetensors.h"

#include <stdexcept>

#include "coterie/error.h"
#include "fuzz/fuzz.h"

namespace {

std::string with_length(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i));
  return file + header + data;
}

void read(const std::string& file) {
  const coterie::train::SafeTensors content =
      coterie::train::parse_safetensors(file.data(), file.size(), "input");
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : content.tensors) bytes += tensor.bytes.size();
  if (bytes > file.size()) throw std::runtime_error("the tensors are larger than the file");
}

void consume(const std::string& input) {
  try {
    read(input);
  } catch (const coterie::Error&) {
    read(with_length(input, std::string(48, 'x')));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return coterie::fuzz::check_input(consume, data, size);
}

coterie::fuzz::Target coterie::fuzz::target() {
  const std::string two =
      R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,4],)"
      R"("data_offsets":[0,32]},"b":{"dtype":"I64","shape":[2],"data_offsets":[32,48]}})";
  const std::string many =
      R"({"a":{"dtype":"BF16","shape":[0,3],"data_offsets":[0,0]},"b":{"dtype":"BOOL",)"
      R"("shape":[],"data_offsets":[0,1]},"c":{"dtype":"U8","shape":[47,1],"data_offsets":[1,48]}})";
  return {.examples = {two, many, "{}", with_length(two, std::string(48, 'x'))},
          .words = {"{", "}", "[", "]", ":", ",", "\"", "null", "true", "\\u0000",
                    "\"shape\":", "\"w\":", "\"dtype\":\"F64\"", "\"data_offsets\":[0,8]",
                    "\"__metadata__\":", "1.5", "-"}};
}
