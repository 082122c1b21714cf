// SPDX-License-Identifier: MIT
// Barriers in shared memory that count arrivals and flip a phase (mbarrier), and named barriers for
// a part of a block. A warp that waits by parity takes part in the next phase, so the phase it
// waits for cannot pass twice unseen.
#pragma once

#include <cstdint>

namespace coterie::cuda {

// One lane arrives for its warp, and parts of a block synchronise at the hardware's named barriers:
// racecheck tracks neither. With COTERIE_RACECHECK every lane arrives and waits at barriers in
// shared memory, with the same dependencies at the same places.
#ifdef COTERIE_RACECHECK
constexpr bool kRacecheck = true;
#else
constexpr bool kRacecheck = false;
#endif
constexpr int kWarpArrivals = kRacecheck ? 32 : 1;  // of mbarrier_arrive_warp

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_invalidate(std::uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Orders the work of this warp's lanes before what follows the barrier.
__device__ __forceinline__ void mbarrier_arrive_warp(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) mbarrier_arrive(barrier);
}
// The same for barriers first .. end - 1, at most 32: at(i) is the address of barrier i.
template <class At>
__device__ __forceinline__ void mbarrier_arrive_warp(int first, int end, const At& at) {
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kRacecheck) {
    for (int i = first; i < end; ++i) mbarrier_arrive(at(i));
  } else {
    if (first + lane < end) mbarrier_arrive(at(first + lane));
  }
}
// Arrives once this thread's cp.async copies have completed.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// The arrivals of a warp that fills a tile, 32 + kWarpArrivals: one of each lane when its copies
// have completed, and the warp's for the lanes' own stores.
__device__ __forceinline__ void arrive_filled(std::uint32_t barrier) {
  arrive_after_copies(barrier);
  mbarrier_arrive_warp(barrier);
}
// Waits for barriers first .. end - 1, at most 32: wait(i) waits for barrier i.
template <class Wait>
__device__ __forceinline__ void mbarrier_wait_warp(int first, int end, const Wait& wait) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kRacecheck) {
    for (int i = first; i < end; ++i) wait(i);
  } else {
    if (first + lane < end) wait(first + lane);
  }
  __syncwarp();
}
// Waits for the end of the phase of the given parity; phases are numbered from 0.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers of a block: 1 to 7 are a kernel's own, the others belong to its warpgroups.
constexpr int kGroupBarriers = 8;

// A barrier for kThreads threads of a block, in whole warps. `number` is that of a named barrier;
// `memory` is the address of 8 bytes of shared memory.
template <int kThreads>
struct PartBarrier {
  int number;
  std::uint32_t memory;

  // Called by one thread, before a block barrier.
  __device__ void init() const {
    if constexpr (kRacecheck) mbarrier_init(memory, kThreads);
  }
  __device__ __forceinline__ void sync() const {
    if constexpr (kRacecheck)
      asm volatile(
          "{.reg .pred p; .reg .b64 state;\n"
          "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
          "again:\n"
          "mbarrier.try_wait.shared::cta.b64 p, [%0], state;\n"
          "vote.sync.all.pred p, p, 0xffffffff;\n"
          "@!p bra.uni again;}" ::"r"(memory)
          : "memory");
    else
      asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
  }
  // Arrives for the others' sync() without waiting.
  __device__ __forceinline__ void arrive() const {
    if constexpr (kRacecheck)
      mbarrier_arrive(memory);
    else
      asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
  }
};

}  // namespace coterie::cuda
