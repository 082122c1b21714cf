// SPDX-License-Identifier: MIT
// Centroids of routing: k-means, moving average, commitment loss.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel spherical_kmeans;
Kernel ema_update;
Kernel commitment_loss;
Kernel commitment_loss_backward;

}  // namespace coterie::stable_api
