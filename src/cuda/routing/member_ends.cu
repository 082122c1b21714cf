// SPDX-License-Identifier: MIT
// What queries of member lists see.
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;

// By the thread of a query slot: `place` in the lists of an item and head, and its row.
__device__ __forceinline__ void write_member_end(const MemberEnds& args, int item, int head,
                                                 std::int64_t place, int row) {
  const std::int64_t block = static_cast<std::int64_t>(args.clusters) * args.q_width;
  const std::int64_t slot = (static_cast<std::int64_t>(item) * args.heads + head) * block + place;
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

// A thread per query slot; the blocks of an item and head are neighbours.
__global__ void __launch_bounds__(kThreads) member_ends_kernel(MemberEnds args) {
  await_previous();
  const std::int64_t block = static_cast<std::int64_t>(args.clusters) * args.q_width;
  const auto each = static_cast<unsigned>((block + kThreads - 1) / kThreads);
  const unsigned problem = blockIdx.x / each;
  const std::int64_t place = static_cast<std::int64_t>(blockIdx.x % each) * kThreads + threadIdx.x;
  if (place < block)
    write_member_end(args, static_cast<int>(problem) / args.heads,
                     static_cast<int>(problem) % args.heads, place,
                     args.q_members[problem * block + place]);
}

}  // namespace

MemberEnds member_ends(const AttentionCall& call, const TensorView& q_members,
                       const TensorView& k_members, std::int32_t* ends, std::uint8_t* flags) {
  MemberEnds args{};
  args.spans = item_spans(call.inputs);
  args.causal = call.causal;
  args.items = static_cast<int>(q_members.size(0));
  args.heads = static_cast<int>(call.H);
  args.group = static_cast<int>(call.H / call.key_heads);
  args.clusters = static_cast<int>(q_members.size(2));
  args.q_width = static_cast<int>(q_members.size(3));
  args.k_width = static_cast<int>(k_members.size(3));
  args.q_members = static_cast<const std::int32_t*>(q_members.data);
  args.k_members = static_cast<const std::int32_t*>(k_members.data);
  args.ends = ends;
  args.flags = flags;
  return args;
}

void find_member_ends(const MemberEnds& args, cudaStream_t stream) {
  const std::int64_t block = static_cast<std::int64_t>(args.clusters) * args.q_width;
  const std::int64_t blocks = (block + kThreads - 1) / kThreads * args.items * args.heads;
  if (!args.wanted() || blocks == 0) return;
  launch_early("member_ends", member_ends_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
               stream, args);
}

}  // namespace coterie::cuda
