// SPDX-License-Identifier: MIT
// Teams of thread blocks that share a clustering problem, one problem per (item, head). The blocks
// of a team synchronise at counters in global memory that are 0 at launch. Precondition: all blocks
// are resident, so these kernels are launched cooperatively.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "cuda/launch/launch.h"
#include "cuda/prim/dependent.cuh"
#include "cuda/prim/tensor.cuh"

namespace coterie::cuda {

struct ClusterShape {
  int items, heads, group;  // `group` query heads share a key head
  int rows, clusters;
  SequenceSpans q, k;
  std::uint64_t seed;
  CallPart part;

  __host__ __device__ int problems() const { return items * heads; }
  __host__ __device__ int key_problems() const { return items * (heads / group); }
  __device__ int key_problem(int problem) const {
    return problem / heads * (heads / group) + problem % heads / group;
  }
  // Their numbers in random streams.
  __device__ std::uint32_t stream(int problem) const { return part.stream(problem, heads); }
  __device__ std::uint32_t key_stream(int key_problem) const {
    return part.stream(key_problem, heads / group);
  }
  // First element of an item and head in a contiguous (B, H, N) tensor.
  __device__ std::int64_t start(const ItemSpan& span, int head) const {
    return (static_cast<std::int64_t>(span.batch) * heads + head) * rows + span.begin;
  }
};

inline ClusterShape cluster_shape(const AttentionCall& call, std::int64_t clusters) {
  return {static_cast<int>(call.num_items()),
          static_cast<int>(call.H),
          static_cast<int>(call.H / call.key_heads),
          static_cast<int>(call.N),
          static_cast<int>(clusters),
          sequence_spans(call.inputs.q_sequences, call.N),
          sequence_spans(call.inputs.k_sequences, call.S),
          call.inputs.seed,
          call.inputs.part};
}

// `count` teams of `size` blocks; team t works on problems t, t + count, ...
struct Teams {
  int count, size;
  unsigned* arrivals;  // one counter per team, zero at launch

  int blocks() const { return count * size; }
};

// For `blocks` resident blocks and problems of up to `rows` rows.
inline Teams make_teams(int problems, int rows, int blocks, unsigned* arrivals) {
  const int most = max(1, (rows + 63) / 64);
  const int size = min(max(blocks / max(1, problems), 1), most);
  return {max(1, min(problems, blocks / size)), size, arrivals};
}

struct RowRange {
  int begin, end;
};

// This block's place in its team.
struct Team {
  int number, rank, size;
  unsigned* arrivals;
  unsigned expected = 0;

  __device__ explicit Team(const Teams& teams)
      : number(blockIdx.x / teams.size),
        rank(blockIdx.x % teams.size),
        size(teams.size),
        arrivals(teams.arrivals + number) {}

  // Waits until all blocks of the team arrive; each then sees what the others wrote before.
  __device__ void sync() {
    arrive();
    wait();
  }
  // The two halves of sync(): this block arrives, and waits for the others.
  __device__ void arrive() {
    __syncthreads();
    if (size == 1) return;
    expected += size;
    if (threadIdx.x == blockDim.x - 1)  // the release waits for all stores; thread 0 has other work
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
  }
  __device__ void wait() const {
    if (size == 1) return;
    if (threadIdx.x == 0) {
      unsigned seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
      } while (seen < expected);
    }
    __syncthreads();
  }

  // This block's part of `count` rows; parts start at multiples of 64, in the order of the ranks.
  __device__ RowRange share(int count) const {
    const int each = ((count + size - 1) / size + 63) / 64 * 64;
    const int begin = static_cast<int>(
        min(static_cast<std::int64_t>(rank) * each, static_cast<std::int64_t>(count)));
    return {begin, min(begin + each, count)};
  }
};

// Writes -1 after the last row of an item; the team's threads share the work.
__device__ inline void fill_padding(const ClusterShape& shape, const Team& team, int item, int head,
                                    std::int32_t* labels, std::int32_t* order) {
  const ItemSpan span = shape.q.span(item);
  if (shape.q.cu_seqlens && item + 1 < shape.items) return;
  const std::int64_t start = shape.start(span, head);
  const int padding = shape.rows - span.begin;
  for (int i = span.length + team.rank * blockDim.x + threadIdx.x; i < padding;
       i += team.size * blockDim.x) {
    if (labels) labels[start + i] = -1;
    order[start + i] = -1;
  }
}

template <class... Parameters, class... Arguments>
void launch_cooperative(void (*kernel)(Parameters...), int blocks, int threads, std::size_t shared,
                        cudaStream_t stream, const Arguments&... arguments) {
  launch_kernel("launching a kernel of teams", {false, true}, kernel,
                dim3(static_cast<unsigned>(blocks)), threads, shared, stream, arguments...);
}

// As launch_early: the kernel itself waits for earlier ones.
template <class... Parameters, class... Arguments>
void launch_cooperative_early(void (*kernel)(Parameters...), int blocks, int threads,
                              std::size_t shared, cudaStream_t stream,
                              const Arguments&... arguments) {
  launch_kernel("launching a kernel of teams", {true, true}, kernel,
                dim3(static_cast<unsigned>(blocks)), threads, shared, stream, arguments...);
}

}  // namespace coterie::cuda
