// SPDX-License-Identifier: MIT
// Hashing, clustering, grouping and selection.
#pragma once

#include "bridge.h"

namespace coterie::stable_api {

Kernel hash_planes;
Kernel hash_codes;
Kernel hamming_kmeans;
Kernel cluster_queries;
Kernel nearest_centroid;
Kernel balanced_assign;
Kernel group_by_cluster;
Kernel select_top;

}  // namespace coterie::stable_api
