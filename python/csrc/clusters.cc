// SPDX-License-Identifier: MIT
#include "clusters.h"

#include <algorithm>

#include "coterie/cluster.h"
#include "coterie/error.h"
#include "coterie/group.h"
#include "coterie/hash.h"
#include "coterie/select.h"
#include "spec.h"

namespace coterie::stable_api {
namespace {

// Which rows of a tensor count, as lengths or cu_seqlens.
struct Spans {
  OptionalTensor lengths, cu_seqlens;

  explicit Spans(Arguments& arguments)
      : lengths(with_contiguous_rows(arguments.optional_tensor())),
        cu_seqlens(with_contiguous_rows(arguments.optional_tensor())) {}

  Sequences sequences() const { return {view(lengths), view(cu_seqlens)}; }
  std::int64_t items(std::int64_t B) const { return cu_seqlens ? cu_seqlens->size(0) - 1 : B; }
};

void check_rank(const char* op, const char* name, const Tensor& tensor, std::int64_t rank) {
  if (tensor.dim() == rank) return;
  throw Error(std::string("[") + op + "] expected " + name + " with " + std::to_string(rank) +
              " dimensions; got " + std::to_string(tensor.dim()));
}

std::int64_t at_least_one(const char* op, const char* name, std::int64_t value) {
  if (value >= 1) return value;
  throw Error(std::string("[") + op + "] expected " + name + " of at least 1; got " +
              std::to_string(value));
}

Tensor empty_labels(const Tensor& x) {
  return empty(DType::i32, {x.size(0), x.size(1), x.size(2)}, x);
}

const ClusteringParams& clustering_of(const Mechanism& mechanism) {
  if (const auto* params = std::get_if<ClusteredParams>(&mechanism)) return params->clustering;
  if (const auto* params = std::get_if<ImprovedClusteredParams>(&mechanism)) {
    return params->clustering;
  }
  throw Error(std::string("[cluster_queries] expected clustered or i-clustered; got ") +
              mechanism_name(mechanism));
}

}  // namespace

void hash_planes(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor x = arguments.tensor();
  const std::int64_t bits = arguments.integer();
  const bool bias = arguments.flag();
  const std::uint64_t seed = arguments.seed();
  check_rank("hash_planes", "x", x, 4);
  at_least_one("hash_planes", "bits", bits);
  const Scratch scratch(x);
  const Tensor planes = empty(DType::f32, {1, 1, bits, x.size(3)}, x);
  const Tensor thresholds = empty(DType::f32, {1, 1, bits}, x);
  isotropic_planes(seed, bias, view(planes), view(thresholds), scratch.workspace());
  give(stack, planes, thresholds);
}

void hash_codes(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor();
  const Tensor planes = arguments.tensor(), thresholds = arguments.tensor();
  const Spans spans(arguments);
  check_rank("hash_codes", "x", given, 4);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor codes = empty(DType::u64, {x.size(0), x.size(1), x.size(2)}, x);
  coterie::hash_codes(view(x), spans.sequences(), view(planes), view(thresholds), code_view(codes),
                      scratch.workspace());
  give(stack, codes);
}

void hamming_kmeans(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor codes = arguments.tensor();
  const Spans spans(arguments);
  const std::int64_t clusters = arguments.integer();
  HammingKMeansParams params;
  params.iterations = arguments.integer();
  params.bits = arguments.integer();
  params.seed = arguments.seed();
  check_rank("hamming_kmeans", "codes", codes, 3);
  at_least_one("hamming_kmeans", "clusters", clusters);
  const Scratch scratch(codes);
  const Tensor labels = empty_labels(codes);
  const Tensor centroids =
      empty(DType::u64, {spans.items(codes.size(0)), codes.size(1), clusters}, codes);
  coterie::hamming_kmeans(params, code_view(codes), spans.sequences(), view(labels),
                          code_view(centroids), scratch.workspace());
  give(stack, labels, centroids);
}

void cluster_queries(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given_q = arguments.tensor(), given_k = arguments.tensor();
  const OptionalTensor q_lengths = with_contiguous_rows(arguments.optional_tensor());
  const OptionalTensor k_lengths = with_contiguous_rows(arguments.optional_tensor());
  const OptionalTensor cu_seqlens_q = with_contiguous_rows(arguments.optional_tensor());
  const OptionalTensor cu_seqlens_k = with_contiguous_rows(arguments.optional_tensor());
  const std::string text = arguments.text();
  const std::uint64_t seed = arguments.seed();
  check_rank("cluster_queries", "q", given_q, 4);
  Scratch scratch(given_q);
  const Tensor q = with_contiguous_rows(given_q), k = with_contiguous_rows(given_k);
  AttentionInputs inputs;
  inputs.q = view(q);
  inputs.k = inputs.v = view(k);  // values have no part in it
  inputs.q_sequences = {view(q_lengths), view(cu_seqlens_q)};
  inputs.k_sequences = {view(k_lengths), view(cu_seqlens_k)};
  inputs.seed = seed;
  const Mechanism mechanism = mechanism_of(text);
  const ClusteringParams& params = clustering_of(mechanism);
  const Tensor labels = empty_labels(q);
  coterie::cluster_queries(params, inputs, view(labels),
                           scratch.allocate(cluster_queries_workspace_bytes(params, inputs)));
  give(stack, labels);
}

void nearest_centroid(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor(), centroids = arguments.tensor();
  const OptionalTensor bias = arguments.optional_tensor();
  const Spans spans(arguments);
  check_rank("nearest_centroid", "x", given, 4);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given), labels = empty_labels(x);
  coterie::nearest_centroid(view(x), spans.sequences(), view(centroids), view(bias), view(labels),
                            scratch.workspace());
  give(stack, labels);
}

void balanced_assign(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor given = arguments.tensor(), centroids = arguments.tensor();
  const Spans spans(arguments);
  const std::int64_t capacity = arguments.integer();
  check_rank("balanced_assign", "x", given, 4);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given), labels = empty_labels(x);
  coterie::balanced_assign(view(x), spans.sequences(), view(centroids), capacity, view(labels),
                           scratch.workspace());
  give(stack, labels);
}

void group_by_cluster(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor labels = arguments.tensor();
  const Spans spans(arguments);
  const std::int64_t clusters = arguments.integer();
  check_rank("group_by_cluster", "labels", labels, 3);
  at_least_one("group_by_cluster", "clusters", clusters);
  const Scratch scratch(labels);
  const Tensor order = empty_labels(labels), inverse = empty_labels(labels);
  const Tensor offsets =
      empty(DType::i32, {spans.items(labels.size(0)), labels.size(1), clusters + 1}, labels);
  coterie::group_by_cluster(view(labels), spans.sequences(),
                            {view(order), view(inverse), view(offsets)}, scratch.workspace());
  give(stack, order, inverse, offsets);
}

void select_top(StableIValue* stack, std::uint64_t, std::uint64_t) {
  Arguments arguments(stack);
  const Tensor rows = arguments.tensor(), given = arguments.tensor();
  const Spans spans(arguments);
  const std::int64_t count = arguments.integer();
  check_rank("select_top", "rows", rows, 4);
  check_rank("select_top", "x", given, 4);
  at_least_one("select_top", "count", count);
  const Scratch scratch(given);
  const Tensor x = with_contiguous_rows(given);
  const Tensor indices =
      empty(DType::i32,
            {spans.items(x.size(0)), std::max(rows.size(1), x.size(1)), rows.size(2), count}, x);
  coterie::select_top(view(rows), view(x), spans.sequences(), view(indices), scratch.workspace());
  give(stack, indices);
}

}  // namespace coterie::stable_api
