// SPDX-License-Identifier: MIT
// Attention of cluster means over all keys: what its kernels share (attend_centroid_fwd.cu).
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/device/centroid.cuh"
#include "cuda/device/softmax.cuh"

namespace coterie::cuda {

constexpr int kAttendKeys = 64;  // of a tile: one bit each in a row's mask of top keys

struct PartialRow {
  float shift, sum, mass, unused;  // in units of 2^shift
};

template <class T>
struct AttendArgs {
  CentroidQueries queries;
  Tensor4<const T> k, v;
  const std::int32_t* top_keys;  // (items, H, C, topk), or null
  int topk;
  PartialRow* rows;  // (slots, H, C)
  float* outs;       // (slots, H, C, pitch), not normalised
  int pitch;
};

// Walks a row's ascending list of top keys; one thread per row. The key after the next one is
// fetched ahead, so that the walk does not wait for memory at every tile.
struct TopWalk {
  const std::int32_t* list = nullptr;
  int left = 0;  // of the list
  int next = INT_MAX, after = INT_MAX;

  __device__ int fetch() {
    if (left == 0) return INT_MAX;
    --left;
    const int key = *list++;
    return key < 0 ? INT_MAX : key;
  }
  __device__ void advance() {
    next = after;
    after = fetch();
  }
  __device__ void start(const std::int32_t* keys, int count, int first) {
    list = keys;
    left = count;
    after = fetch();
    do advance();
    while (next < first);
  }
  // Bit b: key begin + b is a top key.
  __device__ unsigned long long mask(int begin) {
    unsigned long long bits = 0;
    while (next < begin + kAttendKeys) {
      bits |= 1ull << (next - begin);
      advance();
    }
    return bits;
  }
};

// Partial results of every chunk on Hopper's warpgroup products; 16-bit types only.
// attend_centroid_sm90a.cu
template <class T>
void attend_chunks_sm90a(const AttendArgs<T>& args, cudaStream_t stream);

}  // namespace coterie::cuda
