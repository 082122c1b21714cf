// SPDX-License-Identifier: MIT
// Hash codes: bit r of a row x is [plane_r . x > threshold_r].
#include "core/half.h"
#include "coterie/random.h"
#include "ref/ref.h"
#include "ref/selection.h"

namespace coterie::ref {

template <class T>
Planes<T> isotropic_planes(std::uint64_t seed, Index bits, Index dim, bool bias) {
  const RandomStream planes{seed, RandomUse::hash_plane, 0};
  const RandomStream thresholds{seed, RandomUse::hash_threshold, 0};
  Planes<T> result{.planes = Matrix<T>(bits, dim), .thresholds = {}};
  for (Index r = 0; r < bits; ++r) {
    for (Index d = 0; d < dim; ++d)
      result.planes(r, d) =
          to_float(to_bf16(static_cast<float>(random_normal(planes, r * dim + d))));
    result.thresholds.push_back(bias ? static_cast<float>(random_normal(thresholds, r)) : 0.0f);
  }
  return result;
}

template <class T>
Matrix<T> key_difference_planes(std::uint64_t seed, std::uint32_t problem, const Matrix<T>& keys,
                                Index bits) {
  constexpr Index kPairs = 16;
  const RandomStream stream{seed, RandomUse::key_pair, problem};
  Matrix<T> planes(bits, keys.cols);
  if (keys.rows == 0) return planes;
  const std::uint32_t count = static_cast<std::uint32_t>(keys.rows);
  for (Index r = 0; r < bits; ++r)
    for (Index pair = r * kPairs; pair < (r + 1) * kPairs; ++pair) {
      const Index a = random_below(stream, 2 * pair, count);
      const Index b = random_below(stream, 2 * pair + 1, count);
      for (Index d = 0; d < keys.cols; ++d) planes(r, d) += keys(a, d) - keys(b, d);
    }
  return planes;
}

template <class T>
std::vector<T> thresholds_at_mean(const Matrix<T>& planes, const Matrix<T>& queries) {
  const std::vector<Index> one_cluster(static_cast<std::size_t>(queries.rows), 0);
  const Matrix<T> mean = means_of(queries, one_cluster, Matrix<T>(1, queries.cols));
  return inner_products(planes, mean).values;
}

template <class T>
std::vector<std::uint64_t> codes_of(const Matrix<T>& x, const Planes<T>& planes) {
  const Matrix<T> projections = inner_products(x, planes.planes);
  std::vector<std::uint64_t> codes(static_cast<std::size_t>(x.rows), 0);
  for (Index i = 0; i < x.rows; ++i)
    for (Index r = 0; r < projections.cols; ++r)
      if (projections(i, r) > planes.thresholds[r]) codes[i] |= std::uint64_t{1} << r;
  return codes;
}

template <class T>
void isotropic_planes(std::uint64_t seed, bool bias, const TensorView& planes,
                      const TensorView& thresholds) {
  const Planes<T> drawn = isotropic_planes<T>(seed, planes.size(2), planes.size(3), bias);
  write_matrix(planes, drawn.planes);
  write_values(thresholds, {drawn.thresholds.begin(), drawn.thresholds.end()});
}

template <class T>
void key_difference_planes(const AttentionInputs& inputs, const TensorView& planes,
                           const TensorView& thresholds) {
  for (const Place& place : make_places("key_difference_planes", inputs)) {
    const Matrix<T> drawn = key_difference_planes(
        inputs.seed, place.kv_problem(), read_matrix<T>(place.keys(inputs.k)), planes.size(2));
    const std::vector<T> at_mean =
        thresholds_at_mean(drawn, read_matrix<T>(place.queries(inputs.q)));
    write_matrix(place.item_head(planes), drawn);
    write_values(place.item_head(thresholds), {at_mean.begin(), at_mean.end()});
  }
}

template <class T>
void hash_codes(const TensorView& x, const Sequences& sequences, const TensorView& planes,
                const TensorView& thresholds, const TensorView& codes) {
  fill(codes, [](Index) { return 0.0; });
  for (const Place& place : make_places("hash_codes", sequences, x, x.size(1))) {
    const Planes<T> own{.planes = read_matrix<T>(place.item_head(planes)),
                        .thresholds = read_matrix<T>(place.item_head(thresholds)).values};
    write_codes(place.queries(codes), codes_of(read_matrix<T>(place.queries(x)), own));
  }
}

template Planes<float> isotropic_planes(std::uint64_t, Index, Index, bool);
template Planes<double> isotropic_planes(std::uint64_t, Index, Index, bool);
template Matrix<float> key_difference_planes(std::uint64_t, std::uint32_t, const Matrix<float>&,
                                             Index);
template Matrix<double> key_difference_planes(std::uint64_t, std::uint32_t, const Matrix<double>&,
                                              Index);
template std::vector<float> thresholds_at_mean(const Matrix<float>&, const Matrix<float>&);
template std::vector<double> thresholds_at_mean(const Matrix<double>&, const Matrix<double>&);
template std::vector<std::uint64_t> codes_of(const Matrix<float>&, const Planes<float>&);
template std::vector<std::uint64_t> codes_of(const Matrix<double>&, const Planes<double>&);
template void isotropic_planes<float>(std::uint64_t, bool, const TensorView&, const TensorView&);
template void isotropic_planes<double>(std::uint64_t, bool, const TensorView&, const TensorView&);
template void key_difference_planes<float>(const AttentionInputs&, const TensorView&,
                                           const TensorView&);
template void key_difference_planes<double>(const AttentionInputs&, const TensorView&,
                                            const TensorView&);
template void hash_codes<float>(const TensorView&, const Sequences&, const TensorView&,
                                const TensorView&, const TensorView&);
template void hash_codes<double>(const TensorView&, const Sequences&, const TensorView&,
                                 const TensorView&, const TensorView&);

}  // namespace coterie::ref
