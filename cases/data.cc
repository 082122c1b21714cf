// SPDX-License-Identifier: MIT
#include "cases/data.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>
#include <variant>
#include <vector>

namespace coterie::cases {
namespace {

using Table = std::shared_ptr<const std::vector<double>>;

// A number in (0, 1) for each row, independent of its elements.
double row_unit(std::uint64_t seed, Tensor tensor, std::int64_t row) {
  return random_unit(stream(seed, tensor).at(static_cast<std::uint64_t>(row)).word[3]);
}

// Repeats the first row of each head; rows (per head) and dim are the last two sizes. Values are
// multiples of 1/16, so that sums of many equal rows are exact.
Values equal_values(std::uint64_t seed, Tensor tensor, std::int64_t rows, std::int64_t dim) {
  return [normal = normal_values(seed, tensor), rows, dim](std::int64_t index) {
    return std::round(16.0 * normal(index / (rows * dim) * dim + index % dim)) / 16.0;
  };
}

// Rows around one of eight centres, common to all heads; centre r is chosen with weight 1/(r+1).
Values mixture_values(std::uint64_t seed, Tensor tensor, std::int64_t dim) {
  return [=](std::int64_t index) {
    constexpr int kNumCentres = 8;
    double total = 0.0;
    for (int r = 0; r < kNumCentres; ++r) total += 1.0 / (r + 1);
    double left = total * row_unit(seed, tensor, index / dim);
    int centre = 0;
    while (centre < kNumCentres - 1 && (left -= 1.0 / (centre + 1)) > 0.0) ++centre;
    const auto at = static_cast<std::uint64_t>(centre * dim + index % dim);
    return random_normal(stream(seed, kCentres), at) +
           0.4 * random_normal(stream(seed, tensor), static_cast<std::uint64_t>(index));
  };
}

// One of seven rows, common to queries and keys.
Values repeated_values(std::uint64_t seed, Tensor tensor, std::int64_t dim) {
  return [=](std::int64_t index) {
    const auto which = static_cast<std::int64_t>(7.0 * row_unit(seed, tensor, index / dim));
    return random_normal(stream(seed, kCentres),
                         static_cast<std::uint64_t>(which * dim + index % dim));
  };
}

// Rows of normal numbers, each times factor(the row's number in (0, 1)).
template <class Factor>
Values scaled_rows(std::uint64_t seed, Tensor tensor, std::int64_t dim, Factor factor) {
  return [=](std::int64_t index) {
    const double by = factor(row_unit(seed, tensor, index / dim));
    return by == 0.0 ? 0.0
                     : by * random_normal(stream(seed, tensor), static_cast<std::uint64_t>(index));
  };
}

struct Centres {
  std::int64_t heads = 1, count = 16;
};

// The number of centres; those of routing and CAST are the centroids.
Centres centres_of(const Case& c, const Mechanism& mechanism) {
  if (const auto* p = std::get_if<RoutingParams>(&mechanism)) return {c.Hkv, p->clusters};
  if (const auto* p = std::get_if<CastParams>(&mechanism)) return {c.H, p->clusters};
  if (const auto* p = std::get_if<ClusteredParams>(&mechanism)) return {1, p->clustering.clusters};
  if (const auto* p = std::get_if<ImprovedClusteredParams>(&mechanism))
    return {1, p->clustering.clusters};
  if (const auto* p = std::get_if<LshParams>(&mechanism)) return {1, p->buckets};
  return {};
}

// The centre of row `row` of its head.
std::int64_t centre_of(Data data, std::int64_t centres, bool key, double unit, std::int64_t row) {
  const auto below = [unit](std::int64_t bound) {
    return static_cast<std::int64_t>(unit * static_cast<double>(bound));
  };
  const std::int64_t half = (centres + 1) / 2;
  switch (data) {
    case Data::one_cluster:
      return centres / 3;
    case Data::spread:
      return row % centres;
    case Data::disjoint:
      return key && half < centres ? half + below(centres - half) : below(half);
    case Data::sparse:
      return 8 * below((centres + 7) / 8);
    default:  // zipf
      return std::min(centres,
                      static_cast<std::int64_t>(std::pow(static_cast<double>(centres), unit))) -
             1;
  }
}

// Context and target embeddings of a few symbols, trained for a few steps of gradient descent to
// predict the next symbol of a bigram process: softmax(context . target) ~ P.
struct Bigrams {
  static constexpr std::int64_t kSymbols = 24;
  std::int64_t dim;
  std::vector<double> probabilities, context, target;

  Bigrams(std::uint64_t seed, std::int64_t width)
      : dim(width),
        probabilities(kSymbols * kSymbols),
        context(static_cast<std::size_t>(kSymbols * width)),
        target(context.size()) {
    const RandomStream s = stream(seed, kCentres);
    std::uint64_t index = 0;
    for (double& p : probabilities) p = 2.0 * random_normal(s, index++);
    for (double& x : context) x = 0.3 * random_normal(s, index++);
    for (double& x : target) x = 0.3 * random_normal(s, index++);
    for (std::int64_t a = 0; a < kSymbols; ++a) softmax(&probabilities[a * kSymbols]);
    for (int step = 0; step < 20; ++step) descend();
  }

  static void softmax(double* row) {
    double sum = 0.0;
    const double top = *std::max_element(row, row + kSymbols);
    for (std::int64_t b = 0; b < kSymbols; ++b) sum += row[b] = std::exp(row[b] - top);
    for (std::int64_t b = 0; b < kSymbols; ++b) row[b] /= sum;
  }

  void descend() {
    constexpr double kRate = 0.5;
    const std::vector<double> before = context;
    for (std::int64_t a = 0; a < kSymbols; ++a) {
      double error[kSymbols];
      for (std::int64_t b = 0; b < kSymbols; ++b) {
        error[b] = 0.0;
        for (std::int64_t d = 0; d < dim; ++d)
          error[b] += before[a * dim + d] * target[b * dim + d];
      }
      softmax(error);
      for (std::int64_t b = 0; b < kSymbols; ++b) error[b] -= probabilities[a * kSymbols + b];
      for (std::int64_t b = 0; b < kSymbols; ++b)
        for (std::int64_t d = 0; d < dim; ++d) {
          context[a * dim + d] -= kRate * error[b] * target[b * dim + d];
          target[b * dim + d] -= kRate * error[b] * before[a * dim + d];
        }
    }
  }

  std::int64_t next(std::int64_t symbol, double unit) const {
    std::int64_t b = 0;
    while (b < kSymbols - 1 && (unit -= probabilities[symbol * kSymbols + b]) > 0.0) ++b;
    return b;
  }
};

}  // namespace

RandomStream stream(std::uint64_t seed, Tensor tensor) {
  return {.seed = seed, .use = RandomUse::data, .problem = tensor};
}

Values normal_values(std::uint64_t seed, Tensor tensor) {
  return [s = stream(seed, tensor)](std::int64_t index) {
    return random_normal(s, static_cast<std::uint64_t>(index));
  };
}

Values integer_values(std::uint64_t seed, Tensor tensor) {
  return [s = stream(seed, tensor)](std::int64_t index) {
    return static_cast<double>(random_below(s, static_cast<std::uint64_t>(index), 5)) - 2.0;
  };
}

TokenData::TokenData(const Case& c, const Mechanism& mechanism, std::uint64_t seed)
    : case_(c), mechanism_(mechanism), seed_(seed) {}

Values TokenData::centred_values(Tensor tensor) const {
  const Centres centres = centres_of(case_, mechanism_);
  const std::int64_t dim = case_.Dk, rows = tensor == kQ ? case_.N : case_.S;
  const std::int64_t heads = tensor == kQ ? case_.H : case_.Hkv, group = heads / centres.heads;
  std::vector<double> centre(static_cast<std::size_t>(centres.heads * centres.count * dim));
  for (std::size_t e = 0; e < centre.size(); ++e)
    centre[e] = random_normal(stream(seed_, kCentroids), e);
  const Table table = std::make_shared<const std::vector<double>>(std::move(centre));
  return [=, data = case_.data, seed = seed_](std::int64_t index) {
    const std::int64_t row = index / dim;
    const std::int64_t head =
        centres.heads == 1 ? 0 : row / rows % heads / std::max<std::int64_t>(1, group);
    const std::int64_t c =
        centre_of(data, centres.count, tensor == kK, row_unit(seed, tensor, row), row % rows);
    return (*table)[(head * centres.count + c) * dim + index % dim] +
           0.2 * random_normal(stream(seed, tensor), static_cast<std::uint64_t>(index));
  };
}

Values TokenData::trained_values(Tensor tensor) const {
  const std::int64_t dim = case_.Dk, rows = tensor == kQ ? case_.N : case_.S;
  const std::int64_t heads = tensor == kQ ? case_.H : case_.Hkv, group = heads / case_.Hkv;
  const Bigrams bigrams(seed_, dim);
  // Symbols of each batch entry; queries and keys have the same if their numbers agree.
  std::vector<std::int32_t> symbols;
  const RandomStream s = stream(seed_, kTokens);
  for (std::int64_t b = 0; b < case_.B; ++b)
    for (std::int64_t i = 0, symbol = 0; i < rows; ++i) {
      symbol =
          bigrams.next(symbol, random_unit(s.at(static_cast<std::uint64_t>(b * rows + i)).word[0]));
      symbols.push_back(static_cast<std::int32_t>(symbol));
    }
  const auto of_rows = std::make_shared<const std::vector<std::int32_t>>(std::move(symbols));
  const Table table =
      std::make_shared<const std::vector<double>>(tensor == kQ ? bigrams.context : bigrams.target);
  return [=](std::int64_t index) {
    const std::int64_t row = index / dim, i = row % rows, head = row / rows % heads;
    // Each key/value head has the embeddings' elements in a different order.
    const std::int64_t d = (index % dim + head / group) % dim;
    const double rate = std::pow(1e-4, static_cast<double>(d / 2 * 2) / static_cast<double>(dim));
    const std::int32_t symbol = (*of_rows)[row / rows / heads * rows + i];
    return 2.0 * (*table)[symbol * dim + d] +
           0.5 * std::sin(static_cast<double>(i) * rate + (d % 2 == 0 ? 0.0 : 1.5707963267948966));
  };
}

Values TokenData::values(Tensor tensor) const {
  const bool tokens = tensor == kQ || tensor == kK;
  const std::int64_t dim = tokens ? case_.Dk : case_.Dv;
  if (case_.data == Data::zeros)
    return scaled_rows(seed_, tensor, dim, [](double unit) { return unit < 0.3 ? 0.0 : 1.0; });
  if (!tokens) return normal_values(seed_, tensor);
  switch (case_.data) {
    case Data::mixture:
      return mixture_values(seed_, tensor, dim);
    case Data::equal:
      return equal_values(seed_, tensor, tensor == kQ ? case_.N : case_.S, dim);
    case Data::integers:
      return integer_values(seed_, tensor);
    case Data::one_cluster:
    case Data::spread:
    case Data::disjoint:
    case Data::sparse:
    case Data::zipf:
      return centred_values(tensor);
    case Data::repeated:
      return repeated_values(seed_, tensor, dim);
    case Data::large:
      return scaled_rows(seed_, tensor, dim, [](double unit) {
        return std::ldexp(1.0, static_cast<int>(7.0 * unit) - 3);
      });
    case Data::huge:
      return [value = tensor == kQ ? 6144.0 : 7168.0](std::int64_t) { return value; };
    case Data::trained:
      return trained_values(tensor);
    default:
      return normal_values(seed_, tensor);
  }
}

void fill_rows(const TensorView& tensor, const Values& values) {
  constexpr std::int64_t kChunk = 1 << 14;  // elements, about
  const std::int64_t heads = tensor.size(1), rows = tensor.size(2), dim = tensor.size(3);
  const std::int64_t per_chunk = std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, dim));
  const std::int64_t chunks = (rows + per_chunk - 1) / per_chunk;
  const std::int64_t count = tensor.size(0) * heads * chunks;
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t task = next++; task < count; task = next++) {
      const std::int64_t head = task / chunks, first = task % chunks * per_chunk;
      fill(tensor.narrowed(0, head / heads, 1)
               .narrowed(1, head % heads, 1)
               .narrowed(2, first, std::min(per_chunk, rows - first)),
           [&, start = (head * rows + first) * dim](std::int64_t i) { return values(start + i); });
    }
  };
  std::vector<std::thread> helpers;
  const std::int64_t most = std::min<std::int64_t>(std::thread::hardware_concurrency(), count / 2);
  for (std::int64_t t = 1; t < most; ++t) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace coterie::cases
