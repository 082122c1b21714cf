// SPDX-License-Identifier: MIT
// Conversions of bf16 and fp16; they round to nearest even. The functions are static because files
// compiled for different instruction sets include them, and the linker must not merge their copies.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace coterie {

static inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float to_float(Bf16 value) {
  return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16);
}

static inline Bf16 to_bf16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 64)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline float to_float(F16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Shifting the exponent field and multiplying by 2^112 handles normal and subnormal alike.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
  return bits_to_float(sign | float_to_bits(scaled));
}

static inline F16 to_f16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // overflow
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets the FPU round at the right place
    const float rounded = bits_to_float(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (float_to_bits(rounded) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

static inline float to_float(float value) { return value; }

}  // namespace coterie
