// SPDX-License-Identifier: MIT
// The functions of the CUDA back end that the rest of the library calls. Without nvcc, src/no_cuda
// defines the same functions, so callers need no compile-time check for CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/call.h"
#include "coterie/block.h"
#include "coterie/inputs.h"
#include "coterie/kmeans.h"
#include "coterie/mechanism.h"
#include "coterie/positions.h"
#include "coterie/result.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"

namespace coterie::cuda {

// True when the library has CUDA kernels and at least one device responds. Never throws.
bool available();

// The devices that respond, in CUDA's order; empty if there are none.
std::vector<CudaDevice> devices();

// Version of the toolkit the library was compiled with, such as "13.0"; "none" without CUDA.
const char* toolkit();

// Why the CUDA back end cannot run a checked call with a resolved mechanism; "" when it can.
std::string refusal(const Mechanism& mechanism, const AttentionCall& call);

// The functions of a mechanism, for calls that are not refused. They launch work on
// workspace.stream and return without waiting for it; the host reads no device memory.
std::int64_t workspace_bytes(const Mechanism& mechanism, const AttentionCall& call);
void select(const Mechanism& mechanism, const AttentionCall& call,
            const std::vector<TensorView>& saved, const Workspace& workspace);
void attend(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace);
// select, then attend, sharing what both need.
void forward(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
             const Workspace& workspace);
void backward(const Mechanism& mechanism, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace);

// Writes `value` to every element of a tensor of f32, bf16, f16 or i32, with any strides.
void fill(const TensorView& tensor, double value, const Workspace& workspace);

// coterie/positions.h, for tensors that are not empty.
void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out,
                 const Workspace& workspace);

// coterie/block.h, for tensors that are not empty.
void add_norm(const AddNorm& inputs, const AddNormResult& result, const Workspace& workspace);
void add_norm_backward(const AddNormBackward& inputs, const AddNormGradients& gradients,
                       const Workspace& workspace);
void bias_gelu(const TensorView& x, const TensorView& bias, const TensorView& out,
               const Workspace& workspace);
void bias_gelu_backward(const TensorView& x, const TensorView& bias, const TensorView& grad_out,
                        const TensorView& dx, const TensorView& dbias, const Workspace& workspace);
void sum_rows(const TensorView& x, const TensorView& sums, const Workspace& workspace);

// Why the functions below cannot take tokens x (B, H, N, D); "" when they can.
std::string refuse_tokens(const TensorView& x);

// The centroids of routing (coterie/routing.h). All tensors are on the device and all work runs on
// workspace.stream. Labels are not checked: labels out of range give wrong results.
void normalise_rows(const TensorView& x, const TensorView& out, const Workspace& workspace);
std::int64_t centroid_statistics_workspace_bytes(const TensorView& x,
                                                 const CentroidStatistics& statistics);
void add_centroid_statistics(const TensorView& x, const Sequences& sequences,
                             const TensorView& labels, const CentroidStatistics& statistics,
                             const Workspace& workspace);
void move_centroids(double decay, const CentroidStatistics& statistics, const CentroidState& state,
                    const Workspace& workspace);
std::int64_t commitment_workspace_bytes(const TensorView& x);
void commitment_loss(const TensorView& x, const Sequences& sequences, const TensorView& centroids,
                     const TensorView& labels, const TensorView& loss, const Workspace& workspace);
void commitment_loss_backward(const TensorView& x, const Sequences& sequences,
                              const TensorView& centroids, const TensorView& labels, double weight,
                              const TensorView& scale, const TensorView& dx,
                              const Workspace& workspace);

// coterie/kmeans.h, for x (1, P, N, D): why it cannot run, or "", and the same functions.
std::string refuse_kmeans(const TensorView& x, std::int64_t clusters);
std::int64_t kmeans_workspace_bytes(const KMeansParams& params, const TensorView& x,
                                    std::int64_t clusters);
void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result,
            const Workspace& workspace);

// Attends, then adds the tokens to the rings; `selection` is that of the call.
void routing_step(const RoutingParams& params, const AttentionCall& call,
                  const std::vector<TensorView>& selection, const RoutingRings& rings,
                  const TensorView& out, const Workspace& workspace);

}  // namespace coterie::cuda
