// SPDX-License-Identifier: MIT
// Parameters of the attention mechanisms. Defaults are defined only here; docs/mechanisms.md
// explains the formulas. Kernel files include this header, so it includes nothing but <cstdint>.
#pragma once

#include <cstdint>

namespace coterie {

// Which causal form a mechanism with several of them uses. `automatic` is `none`, or `strict` when
// AttentionInputs::causal is set. `leaking` is the form of the mechanism's published code: values
// are causal but selections see the future ("reference" for i-clustered, "paper" for routing).
enum class Causality : std::uint8_t { automatic, none, leaking, strict };

// Softmax over all admissible keys.
struct FullParams {};

enum class LocalKind : std::uint8_t { sliding, blocked };

// sliding, not causal: keys i - floor(w/2) .. i + ceil(w/2) - 1; sliding, causal: the w keys up to
// and including the query's own position. blocked: in blocks of `window` positions, queries of
// block t see blocks t-flange .. t+flange, or t-flange .. t up to their own position (causal).
struct LocalParams {
  std::int64_t window = 0;
  LocalKind kind = LocalKind::sliding;
  std::int64_t flange = 1;  // blocked only
};

// Keys whose distance from the query is a multiple of `stride`.
struct StridedParams {
  std::int64_t stride = 0;
};

// The `topk` keys with the largest exact logits, renormalised.
struct OracleTopParams {
  std::int64_t topk = 32;
};

// keys: Lloyd iterations in the metric of the keys' covariance; hamming_keys: planes from random
// key differences and Hamming k-means; hamming: the published form, isotropic planes.
enum class Clustering : std::uint8_t { keys, hamming_keys, hamming };

constexpr std::int64_t kAutomatic = -1;

struct ClusteringParams {
  std::int64_t clusters = 0;
  Clustering method = Clustering::keys;
  std::int64_t iterations = kAutomatic;  // 1 for keys, 3 for hamming_keys, 10 for hamming
  std::int64_t bits = 63;                // Hamming forms only, 1..63
  bool hash_bias = true;                 // hamming only: random thresholds
};

// Queries of a cluster share the attention row of their mean. With `near`, positions are cut in
// blocks of that many tokens, and a query attends exactly to its own block and the two beside it.
struct ClusteredParams {
  ClusteringParams clustering;
  std::int64_t near = 0;
};

// As clustered, with the `topk` keys of each cluster attended exactly by every member.
struct ImprovedClusteredParams {
  ClusteringParams clustering;
  std::int64_t topk = 32;
  bool mass_grad = true;  // false: the mass of the top keys is a constant for the gradient
  Causality causal = Causality::automatic;
  std::int64_t near = 0;  // as in ClusteredParams; one normaliser for exact and other keys
};

// How the rounds of LSH attention are combined. lse: one softmax over all rounds, a token's own key
// only if no round has another, and the first chunk sees the last (Reformer). mean: mean of the
// rounds, own key included, no wrap-around (the baseline of the clustered-attention paper).
enum class LshCombine : std::uint8_t { lse, mean };

struct LshParams {
  std::int64_t rounds = 4;
  std::int64_t chunk = 32;
  std::int64_t buckets = 64;  // even
  LshCombine combine = LshCombine::lse;
};

enum class SharedKeys : std::uint8_t { automatic, no, yes };
enum class Membership : std::uint8_t { automatic, top, balanced, nearest };
enum class SelfAttention : std::uint8_t { automatic, demote, keep };

// Queries and keys are normalised (zero mean, unit variance per row); each centroid takes its
// `window` best tokens (top), or tokens are partitioned (balanced), or every token goes to its
// nearest centroid and sees the `window` latest tokens there (nearest, the strictly causal form).
struct RoutingParams {
  bool shared() const { return share_qk == SharedKeys::yes; }

  std::int64_t clusters = 0;
  std::int64_t window = 0;                        // must be 0 with balanced membership
  Membership membership = Membership::automatic;  // nearest when strict, else top
  // Whether queries are also the keys. automatic: in causal layers (see layer_spec), not in calls
  SharedKeys share_qk = SharedKeys::automatic;
  Causality causal = Causality::automatic;
  std::int64_t queries_in = 1;                    // strict: clusters that a query looks into
  SelfAttention self = SelfAttention::automatic;  // demote with share_qk, else keep
  bool include_self = false;                      // strict, separate: a query also sees its own key
  double count_eps = 0.01;   // top: outputs are divided by the number of clusters + count_eps
  double decay = 0.9;        // of the centroids' moving average; see move_centroids
  double commitment = 1e-4;  // weight of commitment_loss; applied by the caller
};

enum class CastMode : std::uint8_t { topk, single };
enum class CastActivation : std::uint8_t { softmax, laplace };

// Surrogate tokens attract clusters of `size` tokens; a token attends inside its clusters and to
// one summary of each other cluster. topk: a token may be in several clusters; single: in one.
struct CastParams {
  std::int64_t clusters = 0;
  std::int64_t size = 0;
  CastMode mode = CastMode::topk;
  CastActivation activation = CastActivation::softmax;
  bool share_heads = true;  // one clustering for all heads
  bool gate_scale = true;   // false: the ablation without softplus scaling of the affinities
};

}  // namespace coterie
