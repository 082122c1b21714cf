// SPDX-License-Identifier: MIT
// Hamming distances and bit votes; compiled once per COTERIE_ISA.
#include "cpu/kernels/isa.h"

#include <string.h>

#if defined(__AVX512VPOPCNTDQ__) && defined(__AVX512IFMA__)
#include <immintrin.h>
#endif

namespace coterie::cpu::COTERIE_ISA {

#if defined(__AVX512VPOPCNTDQ__) && defined(__AVX512IFMA__)

namespace {

typedef uint64_t Words __attribute__((vector_size(64)));
typedef uint16_t Keys __attribute__((vector_size(64)));

constexpr int64_t kStrip = 64;   // codes at a time: eight vectors
constexpr int64_t kBlock = 256;  // centroids whose number fits into eight bits

Words distances(Words code, Words centroid) {
  return (Words)_mm512_popcnt_epi64((__m512i)(code ^ centroid));
}

// sum + distance * factor, which stays below 2^52.
Words add_product(Words sum, Words distance, uint64_t factor) {
  return (Words)_mm512_madd52lo_epu64((__m512i)sum, (__m512i)distance, (__m512i)(factor - Words{}));
}

// 256 * distance + number of the nearest of up to 256 centroids for 64 codes; the lower number on
// ties. Four vectors of distances are packed into one of 16-bit keys, so that one minimum covers 32
// pairs: key 32 v + 4 lane + q belongs to code 32 v + 8 q + lane.
void nearest_in_block(const Words* code, const uint64_t* centroids, int64_t count, uint16_t* best) {
  Keys least[2] = {~Keys{}, ~Keys{}}, number = {};
  for (int64_t c = 0; c < count; ++c) {
    const Words centroid = centroids[c] - Words{};
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const Words* own = code + 4 * v;
      Words key = add_product((Words)number, distances(own[0], centroid), uint64_t{1} << 8);
      key = add_product(key, distances(own[1], centroid), uint64_t{1} << 24);
      key = add_product(key, distances(own[2], centroid), uint64_t{1} << 40);
      key |= distances(own[3], centroid) << 56;
      least[v] = (Keys)_mm512_min_epu16((__m512i)least[v], (__m512i)key);
    }
    number += 1;
  }
  memcpy(best, least, sizeof least);
}

}  // namespace

void nearest_code(const uint64_t* codes, int64_t count, const uint64_t* centroids,
                  int64_t num_centroids, int32_t* labels) {
  for (int64_t i0 = 0; i0 < count; i0 += kStrip) {
    const int64_t strip = count - i0 < kStrip ? count - i0 : kStrip;
    Words code[kStrip / 8] = {};
    memcpy(code, codes + i0, static_cast<size_t>(strip) * sizeof(uint64_t));
    int32_t distance[kStrip] = {};
    for (int64_t first = 0; first < num_centroids; first += kBlock) {
      const int64_t block = num_centroids - first < kBlock ? num_centroids - first : kBlock;
      uint16_t best[kStrip];
      nearest_in_block(code, centroids + first, block, best);
      for (int64_t i = 0; i < strip; ++i) {
        const int32_t key = best[i / 32 * 32 + i % 8 * 4 + i % 32 / 8];
        if (first > 0 && (key >> 8) >= distance[i]) continue;
        distance[i] = key >> 8;
        labels[i0 + i] = static_cast<int32_t>(first) + (key & 255);
      }
    }
  }
}

void vote(const uint64_t* codes, const int32_t* labels, int64_t count, int32_t* votes,
          int32_t* sizes) {
  const __m512i one = _mm512_set1_epi32(1);
  for (int64_t i = 0; i < count; ++i) {
    int32_t* row = votes + 64 * static_cast<int64_t>(labels[i]);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __m512i sum = _mm512_loadu_si512(row + 16 * part);
      const __mmask16 bits = static_cast<__mmask16>(codes[i] >> (16 * part));
      _mm512_storeu_si512(row + 16 * part, _mm512_mask_add_epi32(sum, bits, sum, one));
    }
    ++sizes[labels[i]];
  }
}

#else

void nearest_code(const uint64_t* codes, int64_t count, const uint64_t* centroids,
                  int64_t num_centroids, int32_t* labels) {
  // The distance in the high half and the index in the low half make one key per pair, so that the
  // minimum is the nearest centroid with ties to the lower index.
  constexpr int64_t kStrip = 32;
  for (int64_t i0 = 0; i0 < count; i0 += kStrip) {
    uint64_t code[kStrip], best[kStrip];
    const int64_t strip = count - i0 < kStrip ? count - i0 : kStrip;
    for (int64_t i = 0; i < kStrip; ++i) {
      code[i] = codes[i0 + (i < strip ? i : 0)];
      best[i] = ~uint64_t{0};
    }
    for (int64_t c = 0; c < num_centroids; ++c) {
      const uint64_t centroid = centroids[c], index = static_cast<uint64_t>(c);
      for (int64_t i = 0; i < kStrip; ++i) {
        const uint64_t distance = static_cast<uint64_t>(__builtin_popcountll(code[i] ^ centroid));
        const uint64_t key = (distance << 32) | index;
        best[i] = key < best[i] ? key : best[i];
      }
    }
    for (int64_t i = 0; i < strip; ++i) labels[i0 + i] = static_cast<int32_t>(best[i]);
  }
}

void vote(const uint64_t* codes, const int32_t* labels, int64_t count, int32_t* votes,
          int32_t* sizes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t code = codes[i];
    int32_t* row = votes + 64 * static_cast<int64_t>(labels[i]);
    for (int bit = 0; bit < 64; ++bit) row[bit] += static_cast<int32_t>((code >> bit) & 1);
    ++sizes[labels[i]];
  }
}

#endif

}  // namespace coterie::cpu::COTERIE_ISA
