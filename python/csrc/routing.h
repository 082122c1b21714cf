// SPDX-License-Identifier: MIT
// The centroids of routing.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel normalise_rows;
Kernel routing_labels;
Kernel spherical_kmeans;
Kernel add_centroid_statistics;
Kernel move_centroids;
Kernel commitment_loss;
Kernel commitment_loss_backward;

}  // namespace coterie::stable_api
