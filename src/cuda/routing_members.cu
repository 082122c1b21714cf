// SPDX-License-Identifier: MIT
// What queries of member lists see.
#include "cuda/device/await.cuh"
#include "cuda/device/problem.cuh"
#include "cuda/launch.h"
#include "cuda/routing.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;

struct MemberArgs {
  ItemSpans spans;
  bool causal;
  int heads, group, clusters, q_width, k_width;
  const std::int32_t *q_members, *k_members;
  std::int32_t* ends;
  std::uint8_t* flags;
};

// Entries of an ascending list, -1 behind its end, that are at most `most`.
__device__ __forceinline__ int entries_up_to(const std::int32_t* list, int width, int most) {
  if (most < 0) return 0;
  int first = 0;
  for (int count = width; count > 0;) {
    const int half = count / 2;
    const bool in = static_cast<unsigned>(list[first + half]) <= static_cast<unsigned>(most);
    first += in ? half + 1 : 0;
    count = in ? count - half - 1 : half;
  }
  return first;
}

// A thread per query slot; the blocks of an item and head are neighbours.
__global__ void __launch_bounds__(kThreads) member_ends_kernel(MemberArgs args) {
  await_previous();
  const std::int64_t block = static_cast<std::int64_t>(args.clusters) * args.q_width;
  const auto each = static_cast<unsigned>((block + kThreads - 1) / kThreads);
  const unsigned problem = blockIdx.x / each;
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x % each) * kThreads + threadIdx.x;
  if (place >= block) return;
  const int item = static_cast<int>(problem) / args.heads;
  const int head = static_cast<int>(problem) % args.heads;
  const std::int64_t slot = problem * block + place;
  const int row = args.q_members[slot];
  int seen = 0;
  if (row >= 0) {
    const std::int64_t list =
        (static_cast<std::int64_t>(item) * (args.heads / args.group) + head / args.group) *
            args.clusters +
        place / args.q_width;
    const int last = args.causal
                         ? row + args.spans.k.span(item).length - args.spans.q.span(item).length
                         : args.spans.k.rows;
    seen = entries_up_to(args.k_members + list * args.k_width, args.k_width, last);
  }
  if (args.ends) args.ends[slot] = seen;
  if (args.flags) args.flags[slot] = seen > 1;
}

}  // namespace

void find_member_ends(const AttentionCall& call, const TensorView& q_members,
                      const TensorView& k_members, std::int32_t* ends, std::uint8_t* flags,
                      cudaStream_t stream) {
  if ((!ends && !flags) || q_members.count() == 0) return;
  MemberArgs args{};
  args.spans = item_spans(call.inputs);
  args.causal = call.causal;
  args.heads = static_cast<int>(call.H);
  args.group = static_cast<int>(call.H / call.key_heads);
  args.clusters = static_cast<int>(q_members.size(2));
  args.q_width = static_cast<int>(q_members.size(3));
  args.k_width = static_cast<int>(k_members.size(3));
  args.q_members = static_cast<const std::int32_t*>(q_members.data);
  args.k_members = static_cast<const std::int32_t*>(k_members.data);
  args.ends = ends;
  args.flags = flags;
  const std::int64_t block = q_members.size(2) * q_members.size(3);
  launch_early(
      "member_ends", member_ends_kernel,
      dim3(static_cast<unsigned>((block + kThreads - 1) / kThreads * (q_members.size(0) * call.H))),
      kThreads, 0, stream, args);
}

}  // namespace coterie::cuda
