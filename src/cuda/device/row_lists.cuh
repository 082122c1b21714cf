// SPDX-License-Identifier: MIT
// The candidates of a row of means, from its lists to shared memory, two rows of a warp side by
// side (merge.cuh).
#pragma once

#include <cstdint>

#include "cuda/device/candidates.cuh"
#include "cuda/device/half_warp.cuh"
#include "cuda/device/select.cuh"

namespace coterie::cuda {

constexpr int kStaged = 320;  // candidates of a row that are kept on the chip

// Copies the first kStaged of a row's candidates, if it is `there`; returns how many there are. A
// lane takes two lists of a part, or every so manieth of their candidates; it loads the first ones
// before it knows how many there are.
template <class T>
__device__ __forceinline__ int stage_lists(const SelectArgs<T>& args, const RowLists& lists,
                                           bool there, CandidateKey* to) {
  constexpr int kTogether = 6;
  const int lane = row_lane(), units = lists.parts * (kLaneLists / 2);
  const int bits = units > 8 ? 0 : units > 4 ? 1 : units > 2 ? 2 : 3;  // of the lanes of a unit
  const int share = lane & ((1 << bits) - 1);
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < units; base += kRowLanes) {
    const int unit = base + (lane >> bits);
    const int part = unit < units ? unit / 2 : 0, list = unit % 2 * 2;
    const auto* at = reinterpret_cast<const int4*>(args.candidates + lists.candidate(part, list));
    int2 listed = *reinterpret_cast<const int2*>(args.counts + lists.count(part, list));
    int4 pairs[kTogether];  // a candidate of each list
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        pairs[i] = at[min(((first + i) << bits) + share, args.capacity - 1) * (lists.pitch / 2)];
    };
    load(0);
    if (!there || unit >= units) listed = make_int2(0, 0);
    const int others = (1 << bits) - 1 - share;
    const int own = ((listed.x + others) >> bits) + ((listed.y + others) >> bits);
    int place = count + row_sum_before(own);
    count += row_sum(own);
    const auto put = [&](bool valid, int score, int index) {
      if (valid && place < kStaged) to[place] = candidate_key(__int_as_float(score), index);
      place += valid;
    };
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int number = ((first + i) << bits) + share;
        put(number < listed.x, pairs[i].x, pairs[i].y);
        put(number < listed.y, pairs[i].z, pairs[i].w);
      }
      first += kTogether;
      if (!__any_sync(~0u, first << bits < max(listed.x, listed.y))) break;
      load(first);
    }
  }
  __syncwarp();
  return count;
}

// Leaves the best of keys[0, count), at least `least` and at most `most`, where there are more and
// none is repeated; returns how many, at most `most` in any case.
__device__ __forceinline__ int cut_keys(CandidateKey* keys, int count, int least, int most) {
  const int lane = row_lane();
  bool open = count > most;
  if (!__any_sync(~0u, open)) return count;
  CandidateKey largest = 0, smallest = 0;  // of the complements
#pragma unroll 2
  for (int i = lane; i < count; i += kRowLanes) {
    largest = max(largest, keys[i]);
    smallest = max(smallest, ~keys[i]);
  }
  __syncwarp();
  CandidateKey low = ~row_max(smallest), high = row_max(largest) + 1;  // too many; too few
  CandidateKey cut = 0;
  while (__any_sync(~0u, open)) {
    const CandidateKey middle = low + (high - low) / 2;
    int reached = 0;
#pragma unroll 4
    for (int i = lane; i < count; i += kRowLanes) count_greater(reached, keys[i], middle - 1);
    __syncwarp();
    reached = row_sum(reached);
    if (!open) continue;
    if (reached > most)
      low = middle;
    else
      high = middle;
    cut = high;
    open = (reached > most || reached < least) && high - low > 1;
  }
  int kept = 0;
  const int rounds = pair_max(count);
#pragma unroll 1
  for (int first = 0; first < rounds; first += kRowLanes) {
    const CandidateKey key = first + lane < count ? keys[first + lane] : 0;
    const bool keep = first + lane < count && key >= cut;
    const std::uint32_t votes = row_votes(keep);
    __syncwarp();
    if (keep) keys[kept + __popc(votes & ((1u << lane) - 1))] = key;
    kept += __popc(votes);
    __syncwarp();
  }
  return kept;
}

// The same for rows with more than kStaged candidates, straight from their lists and by the whole
// warp. Rare, and kept out of the way.
template <class T>
__device__ __noinline__ int cut_long_lists(const SelectArgs<T>& args, RowLists own, int count,
                                           int most, CandidateKey* own_keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = 0; row < 2; ++row) {
    const int source = row * kRowLanes;
    if (__shfl_sync(~0u, count, source) <= kStaged) continue;
    RowLists lists = own;
    lists.counts = __shfl_sync(~0u, own.counts, source);
    lists.candidates = __shfl_sync(~0u, own.candidates, source);
    auto* keys = reinterpret_cast<CandidateKey*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(own_keys), source));
    const auto listed = [&](const auto& visit) {
#pragma unroll 1
      for (int i = lane; i < lists.parts * kLaneLists; i += 32) {
        const int part = i / kLaneLists, list = i % kLaneLists;
        const Candidate* at = args.candidates + lists.candidate(part, list);
        const int count = args.counts[lists.count(part, list)];
#pragma unroll 4
        for (int j = 0; j < count; ++j) visit(candidate_key(at[j * lists.pitch]));
      }
    };
    const CandidateKey cut = find_cut(listed, args.wanted, most);
    int above = 0;
    listed([&](CandidateKey key) { above += key >= cut; });
    int place = row_sum_before(above);
    const int low = __shfl_sync(~0u, place + above, kRowLanes - 1);
    if (lane >= kRowLanes) place += low;
    listed([&](CandidateKey key) {
      if (key >= cut) keys[place++] = key;
    });
    const int kept = __reduce_add_sync(~0u, above);
    if (lane / kRowLanes == row) count = kept;
  }
  __syncwarp();
  return count;
}

}  // namespace coterie::cuda
