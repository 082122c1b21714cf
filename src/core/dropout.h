// SPDX-License-Identifier: MIT
// Attention dropout: which weights a call drops. The factor of a normalised weight is 0 with
// probability p, else 1 / (1 - p): a pure function of (seed, item, query head, query, key), or
// (seed, item, query head, cluster, key) for weights that the members of a cluster share. So any
// thread, device or pass finds the same ones, and nothing is stored.
//
// A row (a query or a cluster) has two words of Philox; a key's word is a hash of them and of the
// key's number (two multiplications and xor-shifts), and the weight is dropped if that is below
// p 2^32. p is therefore rounded to a multiple of 2^-32.
#pragma once

#include <cstdint>

#include "coterie/random.h"

namespace coterie {

// The random words of a row. Without initial values, for shared memory of kernels.
struct DropoutRow {
  std::uint32_t low, high;
};

// Static: CPU kernels of several instruction sets include it.
COTERIE_HOST_DEVICE static inline std::uint32_t dropout_word(DropoutRow row, std::uint32_t key) {
  std::uint32_t word = key ^ row.low;
  word = (word ^ (word >> 16)) * 0x7FEB352Du;
  word = (word ^ (word >> 15) ^ row.high) * 0x846CA68Bu;
  return word ^ (word >> 16);
}

struct Dropout {
  std::uint64_t seed = 0;
  std::uint32_t threshold = 0;  // p 2^32; 0: nothing is dropped
  double keep_scale = 1;        // 1 / (1 - p)
  CallPart part;                // of a call with
  std::int64_t heads = 1;       // query heads

  COTERIE_HOST_DEVICE bool on() const { return threshold != 0; }

  // Items and heads are numbered by problem = item * (query heads) + head; queries, keys and
  // clusters within their item.
  COTERIE_HOST_DEVICE DropoutRow query(std::int64_t problem, std::int64_t number) const {
    return row(RandomUse::dropout, problem, number);
  }
  COTERIE_HOST_DEVICE DropoutRow cluster(std::int64_t problem, std::int64_t number) const {
    return row(RandomUse::cluster_dropout, problem, number);
  }
  COTERIE_HOST_DEVICE bool drops(DropoutRow row, std::int64_t key) const {
    return dropout_word(row, static_cast<std::uint32_t>(key)) < threshold;
  }

 private:
  COTERIE_HOST_DEVICE DropoutRow row(RandomUse use, std::int64_t problem,
                                     std::int64_t number) const {
    const RandomBits bits =
        RandomStream{seed, use, part.stream(problem, heads)}.at(static_cast<std::uint64_t>(number));
    return {bits.word[0], bits.word[1]};
  }
};

// p in [0, 1).
inline Dropout make_dropout(std::uint64_t seed, double p) {
  const double scaled = p * 4294967296.0 + 0.5;
  Dropout dropout;
  dropout.seed = seed;
  dropout.threshold = scaled < 4294967295.0 ? static_cast<std::uint32_t>(scaled) : 4294967295u;
  dropout.keep_scale = 1 / (1 - dropout.threshold / 4294967296.0);
  return dropout;
}

}  // namespace coterie
