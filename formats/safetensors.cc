// SPDX-License-Identifier: MIT
// Reader and writer. The reader takes nothing on trust: the header's nesting is limited before it
// is built, tensors must fill the rest of the file in some order without gaps or overlaps, and each
// must be as large as its shape and type say.
#include "formats/safetensors.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "coterie/error.h"
#include "formats/files.h"

namespace coterie::train {
namespace {

using nlohmann::json;

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMaxHeader = 100'000'000;  // of the format
constexpr std::size_t kAlignment = 8;            // of the tensors' beginning
constexpr int kMaxDepth = 2;                     // of lists: {"name": {"shape": [n]}}
constexpr int kMaxRank = 64;                     // torch's limit
constexpr const char* kMetadata = "__metadata__";

constexpr std::pair<const char*, std::uint64_t> kTypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
    {"U32", 4},  {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8}};

std::uint64_t type_bytes(const std::string& dtype) {
  for (const auto& [name, bytes] : kTypes) {
    if (dtype == name) return bytes;
  }
  std::string known;
  for (const auto& [name, bytes] : kTypes) known += std::string(known.empty() ? "" : ", ") + name;
  throw Error("expected one of the types " + known + "; got \"" + dtype + '"');
}

std::uint64_t tensor_bytes(const std::string& dtype, const std::vector<std::int64_t>& shape) {
  std::uint64_t bytes = type_bytes(dtype);
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) {
      throw Error("expected a shape that fits in memory; got a size of " + std::to_string(size));
    }
  }
  return bytes;
}

// A whole number in JSON, at most the largest int64.
std::int64_t whole(const json& value) {
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMax) {
    throw Error(std::string("expected a whole number, 0 or more; got ") +
                (value.is_number() ? value.dump() : value.type_name()));
  }
  return value.get<std::int64_t>();
}

const json& member(const json& object, const char* key, json::value_t type) {
  const auto found = object.find(key);
  if (found == object.end() || found->type() != type) {
    throw Error(std::string("expected \"") + key + "\" of type " + json(type).type_name());
  }
  return *found;
}

// The header as JSON, without duplicate names and nested no deeper than the format's.
json parse_header(std::string_view text) {
  std::set<std::string> names;
  int sizes = 0;  // of the list that is read
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    const bool opens =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (opens && depth > kMaxDepth)
      throw Error("expected {\"name\": {\"shape\": [n]}}; got deeper nesting");
    sizes = event == json::parse_event_t::value && depth == kMaxDepth + 1 ? sizes + 1 : 0;
    if (sizes > kMaxRank)
      throw Error("expected at most " + std::to_string(kMaxRank) + " dimensions; got more");
    if (event == json::parse_event_t::key && depth == 1 &&
        !names.insert(value.get<std::string>()).second) {
      throw Error("expected each name once; got \"" + value.get<std::string>() + "\" again");
    }
    return true;
  };
  json header = json::parse(text.begin(), text.end(), check);
  if (!header.is_object()) throw Error("expected a header that is a JSON object");
  return header;
}

struct Span {
  std::uint64_t begin = 0, end = 0;
};

struct Entry {
  std::string name;
  StoredTensor tensor;
  Span span;
};

Entry parse_entry(const json& value) {
  if (!value.is_object()) throw Error("expected a JSON object");
  Entry entry;
  entry.tensor.dtype = member(value, "dtype", json::value_t::string).get<std::string>();
  for (const json& size : member(value, "shape", json::value_t::array)) {
    entry.tensor.shape.push_back(whole(size));
  }
  const json& offsets = member(value, "data_offsets", json::value_t::array);
  if (offsets.size() != 2) {
    throw Error("expected two data_offsets; got " + std::to_string(offsets.size()));
  }
  entry.span = {static_cast<std::uint64_t>(whole(offsets[0])),
                static_cast<std::uint64_t>(whole(offsets[1]))};
  const std::uint64_t expected = tensor_bytes(entry.tensor.dtype, entry.tensor.shape);
  if (entry.span.end < entry.span.begin || entry.span.end - entry.span.begin != expected) {
    throw Error("expected data_offsets " + std::to_string(expected) + " bytes apart; got " +
                offsets.dump());
  }
  return entry;
}

std::map<std::string, std::string> parse_metadata(const json& value) {
  if (!value.is_object()) throw Error("expected a JSON object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) throw Error("expected \"" + key + "\" of type string");
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

// Calls `read`; its errors then start with the entry's name.
template <class Read>
auto in_entry(const std::string& name, const Read& read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error('"' + name + "\": " + error.what());
  }
}

// Tensors must follow each other without gaps, in any order, up to the end of the file. Sorts them
// by position.
void check_spans(std::vector<Entry>& entries, std::uint64_t size) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.span.begin, a.span.end) < std::pair(b.span.begin, b.span.end);
  });
  std::uint64_t end = 0;
  for (const Entry& entry : entries) {
    if (entry.span.begin != end) {
      throw Error("expected tensors without gaps or overlaps; got \"" + entry.name + "\" at byte " +
                  std::to_string(entry.span.begin) + " where the one before ends at " +
                  std::to_string(end));
    }
    end = entry.span.end;
  }
  if (end != size) {
    throw Error("expected " + std::to_string(end) + " bytes of tensors; got " +
                std::to_string(size) + (size < end ? " (the file is cut off)" : ""));
  }
}

// Half of the machine's memory: tensors exist twice while a model is loaded.
std::uint64_t most_tensor_bytes() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) / 2 *
         static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Copies the next bytes of a file.
using Source = std::function<void(char* to, std::size_t count)>;

std::string read_header(const Source& read, std::uint64_t size) {
  if (size < kLengthBytes) {
    throw Error("expected a header length of 8 bytes; got a file of " + std::to_string(size) +
                " bytes");
  }
  char bytes[kLengthBytes];
  read(bytes, kLengthBytes);
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(bytes[i]);
  const std::uint64_t left = size - kLengthBytes;
  if (length <= left && length > kMaxHeader) {
    throw Error("expected a header of at most " + std::to_string(kMaxHeader) +
                " bytes, the limit of the format; got one of " + std::to_string(length));
  }
  std::string header(length <= left ? length : 0, '\0');
  read(header.data(), header.size());
  if (header.empty() || header[0] != '{') {
    throw Error("expected a JSON header; got one of " + std::to_string(length) +
                " bytes in a file with " + std::to_string(left) +
                " bytes left (not a safetensors file, or cut off)");
  }
  return header;
}

// A file of `size` bytes. No memory is allocated for tensors before the whole header is checked.
SafeTensors parse(const Source& read, std::uint64_t size) {
  const std::string text = read_header(read, size);
  const json header = parse_header(text);
  SafeTensors content;
  std::vector<Entry> entries;
  for (const auto& item : header.items()) {
    in_entry(item.key(), [&] {
      if (item.key() == kMetadata) {
        content.metadata = parse_metadata(item.value());
      } else {
        entries.push_back(parse_entry(item.value()));
        entries.back().name = item.key();
      }
    });
  }
  const std::uint64_t bytes = size - kLengthBytes - text.size();
  check_spans(entries, bytes);
  if (bytes > most_tensor_bytes()) {
    throw Error("expected at most " + std::to_string(most_tensor_bytes()) +
                " bytes of tensors, half of this machine's memory; got " + std::to_string(bytes));
  }
  for (Entry& entry : entries) {
    entry.tensor.bytes.resize(entry.span.end - entry.span.begin);
    read(entry.tensor.bytes.data(), entry.tensor.bytes.size());
    content.tensors[entry.name] = std::move(entry.tensor);
  }
  return content;
}

SafeTensors parse(const Source& read, std::uint64_t size, const std::string& name) {
  try {
    return parse(read, size);
  } catch (const json::exception& error) {
    throw Error("[safetensors] " + name + ": the header is not JSON: " + error.what());
  } catch (const Error& error) {
    throw Error("[safetensors] " + name + ": " + error.what());
  }
}

// Names in file order: large elements first, which aligns each tensor to its element size.
std::vector<std::string> file_order(const SafeTensors& content) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : content.tensors) names.push_back(name);
  std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return type_bytes(content.tensors.at(a).dtype) > type_bytes(content.tensors.at(b).dtype);
  });
  return names;
}

std::string make_header(const SafeTensors& content, const std::vector<std::string>& names) {
  json header = json::object();
  if (!content.metadata.empty()) header[kMetadata] = content.metadata;
  std::uint64_t offset = 0;
  for (const std::string& name : names) {
    const StoredTensor& tensor = content.tensors.at(name);
    const std::uint64_t bytes =
        in_entry(name, [&] { return tensor_bytes(tensor.dtype, tensor.shape); });
    if (name == kMetadata || bytes != tensor.bytes.size()) {
      throw Error('"' + name + "\": expected a tensor of " + std::to_string(bytes) +
                  " bytes; got " + std::to_string(tensor.bytes.size()));
    }
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  return text;
}

}  // namespace

SafeTensors parse_safetensors(const char* data, std::size_t size, const std::string& name) {
  const auto next = [&](char* to, std::size_t count) {
    std::copy_n(data, count, to);
    data += count;
  };
  return parse(next, size, name);
}

SafeTensors read_safetensors(const std::string& path) {
  InputFile file(path);
  const auto next = [&](char* to, std::size_t count) {
    if (file.read(to, count) < count) throw Error("the file became shorter while it was read");
  };
  return parse(next, file.size(), path);
}

void write_safetensors(const std::string& path, const SafeTensors& content) {
  std::string header;
  std::vector<std::string> names;
  try {
    names = file_order(content);
    header = make_header(content, names);
  } catch (const json::exception& error) {  // names that are not UTF-8
    throw Error("[safetensors] " + path + ": " + error.what());
  } catch (const Error& error) {
    throw Error("[safetensors] " + path + ": " + error.what());
  }
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length[i] = static_cast<char>(header.size() >> (8 * i));
  std::vector<std::string_view> parts = {length, header};
  for (const std::string& name : names) {
    const std::vector<char>& bytes = content.tensors.at(name).bytes;
    parts.emplace_back(bytes.data(), bytes.size());
  }
  write_file(path, parts);
}

}  // namespace coterie::train
