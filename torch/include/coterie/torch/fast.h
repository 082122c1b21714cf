// SPDX-License-Identifier: MIT
// Speed before equal bits, for the process.
#pragma once

namespace coterie::torch_api {

// Allows kernels whose gradients differ in their last bits from run to run: on Hopper the backward
// pass of full attention is then cuDNN's instead of the core's. Off unless set.
void set_fast(bool allowed);
bool fast();

}  // namespace coterie::torch_api
