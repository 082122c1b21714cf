// SPDX-License-Identifier: MIT
// Members from candidates (routing_candidates_sm90a.cu). Rounded scores tell most candidates apart
// from the cut; those that are too close to it are scored exactly.
//
// A rounded score is off by at most e: |y|_2 <= sqrt(Dk) times what rounding did to the centroid,
// and 1.3 * 2^-11 |y|_2 |m|_2 for rounding y (2^-11), sums on tensor cores and the exact score's
// own rounding, for rows whose mean is at most 64 times their deviation.
#include "cuda/device/await.cuh"
#include "cuda/device/routing_choose.cuh"
#include "cuda/launch.h"
#include "cuda/tuning.h"

namespace coterie::cuda {
namespace {

// Whether the candidates decide a list; if so its members are written.
template <int kWidth>
__device__ bool choose(const TopArgs<ChooseElement>& args, const TopList<ChooseElement>& list,
                       const ChooseMemory& memory) {
  const int wanted = list.wanted;
  const ExactScores<ChooseElement, kWidth> scores(list, args.centroids.pitch);
  float most = 0.0f;
  const int count = gather_candidates(list.side.candidates, list.number, memory, most);
  if (count < wanted) return false;
  const float error = rounded_error<kWidth>(scores);
  most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));  // not negative
  __syncwarp();
  const ChooseBounds bounds = find_bounds(memory, count, wanted, most);
  const float low = bounds.low - 2.0f * error, high = bounds.high + 2.0f * error;
  if (!(low > 0.0f)) return false;  // rows below the threshold may be members
  const int2 places = split_candidates(memory, count, low, high);
  if (places.y > memory.close) return false;
  choose_close<kWidth>(scores, memory, places.y, wanted - places.x, memory.chosen + places.x);
  write_ascending(memory, wanted, list.span.length, list.members);
  return true;
}

// A block, of one warp, per list.
template <int kWidth>
__global__ void __launch_bounds__(kChooseThreads, 16)
    choose_kernel(const __grid_constant__ TopArgs<ChooseElement> args, const ChooseSizes sizes) {
  await_previous();
  extern __shared__ __align__(16) unsigned char shared[];
  const TopList<ChooseElement> list(args, static_cast<int>(blockIdx.x));
  if (list.write_ends()) return;
  const ChooseMemory memory(shared, sizes);
  if (choose<kWidth>(args, list, memory) || threadIdx.x != 0) return;
  const int clusters = list.side.shape.clusters;
  const unsigned problem = blockIdx.x / clusters, cluster = blockIdx.x % clusters;
  unsigned* counts = args.open.words.data;
  atomicAdd(counts, 1u);
  args.open.clusters[problem * clusters + atomicAdd(counts + 1 + problem, 1u)] =
      static_cast<std::int32_t>(cluster);
}

}  // namespace

void choose_candidates(const AttentionCall& call, const TopArgs<ChooseElement>& args,
                       cudaStream_t stream) {
  ChooseSizes sizes{};
  for (const TopRows<ChooseElement>& side : args.sides) {
    if (side.lists == 0) continue;
    sizes.capacity = max(sizes.capacity, side.candidates.parts * side.candidates.capacity);
    sizes.width = max(sizes.width, side.width);
    sizes.vectors = max(sizes.vectors, (min(side.shape.rows, kChooseRows) + 127) / 128);
  }
  dispatch_head_dim(call.op, call.Dk, [&](auto dim) {
    launch_early("choose_candidates", choose_kernel<decltype(dim)::value>,
                 dim3(static_cast<unsigned>(args.sides[0].lists + args.sides[1].lists)),
                 kChooseThreads, sizes.bytes(), stream, args, sizes);
  });
}

}  // namespace coterie::cuda
