// SPDX-License-Identifier: MIT
// The first barrier of a team whose counters are not zero yet.
#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "cuda/prim/team.cuh"

namespace coterie::cuda {

// Sets the teams' counters to zero. The first barrier of a team is preceded by a barrier of the
// whole grid, which every cooperative launch provides. It has two steps (arrive in the constructor,
// wait later), so no block stalls. Each step is also a __syncthreads().
class FirstTeamSync {
 public:
  __device__ explicit FirstTeamSync(const Team& team) : ahead_(team.size > 1) {
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
