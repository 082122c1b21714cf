// SPDX-License-Identifier: MIT
// Takes the place of the files *_sm90a.cu in builds without Hopper GPUs. on_hopper() is false
// there, so only the functions that answer false are called.
#include "cuda/cast/select.h"
#include "cuda/cast/stages.h"
#include "cuda/cluster/nearest.cuh"
#include "cuda/clustered/backward.h"
#include "cuda/clustered/centroid.cuh"
#include "cuda/clustered/near.cuh"
#include "cuda/clustered/select.cuh"
#include "cuda/launch/device.h"
#include "cuda/lists/backward.h"
#include "cuda/lists/forward.h"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

bool has_sm90a_kernels() { return false; }

namespace {

[[noreturn]] void absent() {
  fail_cuda(cudaErrorNoKernelImageForDevice, "launching a kernel of Hopper GPUs");
}

}  // namespace

void cast_inner_queries(const CastShape&, const AttentionCall&, const CastBackward&, cudaStream_t) {
  absent();
}
void cast_inner_keys(const CastShape&, const AttentionCall&, const CastBackward&, cudaStream_t) {
  absent();
}
void cast_mix_backward_sm90a(const CastShape&, const AttentionCall&, const CastBackward&,
                             cudaStream_t) {
  absent();
}
bool cast_mix_fits_sm90a(const CastShape&) { return false; }
void cast_mix_sm90a(const CastShape&, const AttentionCall&, const CastForward&, cudaStream_t) {
  absent();
}
void cast_scores_sm90a(const CastScores&, const AttentionCall&, int, int, void*, cudaStream_t) {
  absent();
}

bool key_kmeans_fits(const AttentionCall&, const ClusterShape&) { return false; }
bool key_kmeans_serves(const AttentionCall&, const ClusterShape&) { return false; }
KeyKMeansPlan::KeyKMeansPlan(Arena&, const AttentionCall&, const ClusterShape&) { absent(); }
void key_kmeans(const AttentionCall&, const KeyKMeansPlan&, const KeyMetricBuffers&,
                const KeyKMeansRun&, cudaStream_t) {
  absent();
}

bool scan_fits(const AttentionCall&, std::int64_t) { return false; }
bool scan_finds_ends(const AttentionCall&) { return false; }
void nearest_scan(const AttentionCall&, const CentredCentroids&, const RoutingSide&,
                  const RoutingSide*, std::int32_t*, unsigned*, Arena&, cudaStream_t) {
  absent();
}
bool candidates_pay(const RoutingSide&) { return false; }
void find_candidates(const AttentionCall&, const CentredCentroids&, CandidateRun&, CandidateRun&,
                     const ZeroedWords&, unsigned*, Arena&, cudaStream_t) {
  absent();
}

template <class T>
void nearest_sm90a(const NearestArgs<T>&, cudaStream_t) {
  absent();
}
template <class T>
void centroid_gradients_sm90a(const BackwardArgs<T>&, cudaStream_t) {
  absent();
}
template <class T>
void attend_chunks_sm90a(const AttendArgs<T>&, cudaStream_t) {
  absent();
}
template <class T>
void attend_near_sm90a(const NearArgs<T>&, cudaStream_t) {
  absent();
}
template <class T>
void near_query_gradients_sm90a(const BackwardArgs<T>&, const CentroidQueries&, cudaStream_t) {
  absent();
}
template <class T>
void near_key_gradients_sm90a(const BackwardArgs<T>&, const CentroidQueries&, cudaStream_t) {
  absent();
}
template <class T>
void select_sm90a(const SelectArgs<T>&, const SelectTeams&, const MeanOutputs<T>*, cudaStream_t) {
  absent();
}
template <class T>
void launch_list_forward_sm90a(const ListForwardArgs<T>&, const ListForwardPlan&, cudaStream_t) {
  absent();
}
template <class T>
void launch_wide_tiles_sm90a(const ListBackwardArgs<T>&, bool, cudaStream_t) {
  absent();
}
template <class T>
void launch_list_stream_sm90a(const ListBackwardArgs<T>&, const ListBackwardPlan&, bool,
                              cudaStream_t) {
  absent();
}
template <class T>
void launch_whole_lists_sm90a(const ListBackwardArgs<T>&, const ListBackwardPlan&,
                              const std::array<TensorView, 3>&, cudaStream_t) {
  absent();
}
template <class T>
void launch_windows_sm90a(const ListBackwardArgs<T>&, const WalkCut&, cudaStream_t) {
  absent();
}
template <class T>
void launch_full_sm90a(const FullBackwardArgs<T>&, cudaStream_t) {
  absent();
}

#define COTERIE_INSTANTIATE(T)                                                                  \
  template void nearest_sm90a(const NearestArgs<T>&, cudaStream_t);                             \
  template void centroid_gradients_sm90a(const BackwardArgs<T>&, cudaStream_t);                 \
  template void attend_chunks_sm90a(const AttendArgs<T>&, cudaStream_t);                        \
  template void attend_near_sm90a(const NearArgs<T>&, cudaStream_t);                            \
  template void near_query_gradients_sm90a(const BackwardArgs<T>&, const CentroidQueries&,      \
                                           cudaStream_t);                                       \
  template void near_key_gradients_sm90a(const BackwardArgs<T>&, const CentroidQueries&,        \
                                         cudaStream_t);                                         \
  template void select_sm90a(const SelectArgs<T>&, const SelectTeams&, const MeanOutputs<T>*,   \
                             cudaStream_t);                                                     \
  template void launch_list_forward_sm90a(const ListForwardArgs<T>&, const ListForwardPlan&,    \
                                          cudaStream_t);                                        \
  template void launch_wide_tiles_sm90a(const ListBackwardArgs<T>&, bool, cudaStream_t);        \
  template void launch_list_stream_sm90a(const ListBackwardArgs<T>&, const ListBackwardPlan&,   \
                                         bool, cudaStream_t);                                   \
  template void launch_whole_lists_sm90a(const ListBackwardArgs<T>&, const ListBackwardPlan&,   \
                                         const std::array<TensorView, 3>&, cudaStream_t);       \
  template void launch_windows_sm90a(const ListBackwardArgs<T>&, const WalkCut&, cudaStream_t); \
  template void launch_full_sm90a(const FullBackwardArgs<T>&, cudaStream_t)
COTERIE_INSTANTIATE(Bf16);
COTERIE_INSTANTIATE(F16);

}  // namespace coterie::cuda
