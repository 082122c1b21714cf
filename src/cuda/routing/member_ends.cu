// SPDX-License-Identifier: MIT
// What queries of member lists see.
#include "cuda/launch/launch.h"
#include "cuda/lists/member_ends.cuh"
#include "cuda/prim/dependent.cuh"
#include "cuda/routing/stages.h"

namespace coterie::cuda {

namespace {

constexpr int kThreads = 256;

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
