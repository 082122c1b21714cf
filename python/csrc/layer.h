// SPDX-License-Identifier: MIT
// What layers are made of besides attention: positions, the centroids of routing and its decoding.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel rotate_rows;
Kernel normalise_rows;
Kernel routing_labels;
Kernel spherical_kmeans;
Kernel kmeans;
Kernel add_centroid_statistics;
Kernel move_centroids;
Kernel commitment_loss;
Kernel commitment_loss_backward;
Kernel routing_step;

}  // namespace coterie::stable_api
