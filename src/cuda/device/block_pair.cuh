// SPDX-License-Identifier: MIT
// Two blocks side by side (a cluster of Hopper's) that fill each other's shared memory.
#pragma once

#include <cstdint>

namespace coterie::cuda {

constexpr int kPair = 2;  // blocks

__device__ __forceinline__ unsigned pair_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void pair_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same where nothing but barriers was written.
__device__ __forceinline__ void pair_start() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
          : "memory");
}
// Arrives at the barrier of one of the pair's blocks.
__device__ __forceinline__ void pair_arrive(std::uint32_t barrier, int block) {
  asm volatile(
      "{.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Bytes that copies will bring, besides an arrival.
__device__ __forceinline__ void expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// To the same place in both blocks; each one's barrier counts.
__device__ __forceinline__ void copy_to_pair(std::uint32_t to, const void* from, int bytes,
                                             std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<std::uint16_t>((1 << kPair) - 1))
      : "memory");
}

}  // namespace coterie::cuda
