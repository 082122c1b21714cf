// SPDX-License-Identifier: MIT
#include "fuzz/mutate.h"

#include <algorithm>
#include <iterator>

#include "coterie/random.h"

namespace coterie::fuzz {
namespace {

constexpr std::size_t kLongest = 1 << 16;

// Values at which arithmetic goes wrong.
const char* const kNumbers[] = {"0",
                                "-1",
                                "1",
                                "2147483648",
                                "4294967296",
                                "9223372036854775807",
                                "-9223372036854775808",
                                "18446744073709551615",
                                "18446744073709551616",
                                "1e308",
                                "1e999",
                                "-0",
                                "nan",
                                "inf",
                                "0.1",
                                "00"};

class Mutator {
 public:
  Mutator(const Target& target, std::uint64_t seed, std::uint64_t index)
      : target_(target), stream_{random_u64({seed, RandomUse::data, 0}, index)} {}

  std::string make() {
    if (below(8) == 0) return random_bytes(below(300));
    std::string text = one_of(target_.examples);
    for (std::size_t i = below(below(6) + 1) + 1; i > 0; --i) mutate(text);  // often one
    text.resize(std::min(text.size(), kLongest));
    return text;
  }

 private:
  std::size_t below(std::size_t bound) {
    return random_below(stream_, count_++, static_cast<std::uint32_t>(bound));
  }
  template <class List>
  std::string one_of(const List& list) {
    return *(std::begin(list) + static_cast<std::ptrdiff_t>(below(std::size(list))));
  }
  char random_byte() { return static_cast<char>(below(256)); }
  std::string random_bytes(std::size_t size) {
    std::string bytes(size, '\0');
    for (char& byte : bytes) byte = random_byte();
    return bytes;
  }

  // A position in the text and a number of bytes after it.
  std::pair<std::size_t, std::size_t> range(const std::string& text) {
    const std::size_t place = below(text.size() + 1);
    return {place, below(std::min<std::size_t>(text.size() - place, 40) + 1)};
  }

  void mutate(std::string& text) {
    const auto [place, size] = range(text);
    switch (below(9)) {
      case 0:
        if (place < text.size()) text[place] = static_cast<char>(text[place] ^ (1 << below(8)));
        break;
      case 1:
        if (place < text.size()) text[place] = random_byte();
        break;
      case 2:
        text.insert(place, random_bytes(below(9)));
        break;
      case 3:
        text.erase(place, size);
        break;
      case 4:
        text.resize(place);
        break;
      case 5:
        repeat(text, place, size);
        break;
      case 6:
        text.insert(place, one_of(target_.words));
        break;
      case 7:
        replace_number(text, place);
        break;
      default:
        text = text.substr(0, place) + second_half(one_of(target_.examples));
    }
  }

  std::string second_half(const std::string& text) { return text.substr(below(text.size() + 1)); }

  // Sometimes many times, to find what grows or nests.
  void repeat(std::string& text, std::size_t place, std::size_t size) {
    const std::string piece = text.substr(place, size);
    for (std::size_t i = below(10) == 0 ? below(2000) : below(3); i > 0 && text.size() < kLongest;
         --i) {
      text.insert(place, piece);
    }
  }

  // The next number after `place`.
  void replace_number(std::string& text, std::size_t place) {
    constexpr const char* kDigits = "0123456789";
    const std::size_t begin = text.find_first_of(kDigits, place);
    if (begin == std::string::npos) return;
    const std::size_t end = std::min(text.find_first_not_of(kDigits, begin), text.size());
    text.replace(begin, end - begin, one_of(kNumbers));
  }

  const Target& target_;
  RandomStream stream_;
  std::uint64_t count_ = 0;
};

}  // namespace

std::string make_input(const Target& target, std::uint64_t seed, std::uint64_t index) {
  if (index < target.examples.size()) return target.examples[index];
  return Mutator(target, seed, index).make();
}

}  // namespace coterie::fuzz
