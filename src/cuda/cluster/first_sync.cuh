// SPDX-License-Identifier: MIT
#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// Counters of the teams start from zero: before the blocks of a team meet for the first time, all
// of the grid do, at the barrier that every cooperative launch has. In two steps, so that nobody
// waits; each is a __syncthreads() besides.
class FirstMeeting {
 public:
  __device__ explicit FirstMeeting(const Team& team) : ahead_(team.size > 1) {
    if (ahead_) {
      if (team.rank == 0 && threadIdx.x == 0) *team.arrivals = 0;
      token_ = cooperative_groups::this_grid().barrier_arrive();
    } else {
      __syncthreads();
    }
  }
  __device__ void wait() {
    if (ahead_)
      cooperative_groups::this_grid().barrier_wait(std::move(token_));
    else
      __syncthreads();
    ahead_ = false;
  }

 private:
  bool ahead_;
  cooperative_groups::grid_group::arrival_token token_{};
};

}  // namespace coterie::cuda
