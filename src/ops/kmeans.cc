// SPDX-License-Identifier: MIT
// k-means: checks, then the back end.
#include "coterie/kmeans.h"

#include "core/check.h"
#include "core/dispatch.h"
#include "cpu/cluster/kmeans.h"
#include "cuda/api/entry.h"
#include "ops/call.h"
#include "ops/scratch.h"

namespace coterie {

namespace {

constexpr const char* kOp = "kmeans";

// x (P, N, D) as (1, P, N, D).
TensorView check_rows(const KMeansParams& params, const TensorView& x, std::int64_t clusters) {
  ops::check_rows(kOp, "x", x, 3, x.device);
  COTERIE_CHECK(is_floating(x.dtype), kOp, "expected x of type f32, f64, bf16 or f16; got ",
                describe(x));
  COTERIE_CHECK(x.size(2) >= 1, kOp, "expected at least one element per row; got x ", describe(x));
  COTERIE_CHECK(x.size(1) <= 0x7fffffff, kOp, "expected less than 2^31 rows; got x ", describe(x));
  COTERIE_CHECK(clusters >= 1, kOp, "expected 1 or more clusters; got ", clusters);
  COTERIE_CHECK(params.iterations >= 0, kOp, "expected 0 or more iterations; got ",
                params.iterations);
  TensorView all = x;
  all.rank = 4;
  all.sizes[0] = 1;
  all.strides[0] = x.size(0) * x.stride(0);
  for (int dim = 0; dim < 3; ++dim) {
    all.sizes[dim + 1] = x.size(dim);
    all.strides[dim + 1] = x.stride(dim);
  }
  if (x.device == Device::cuda) {
    const std::string refusal = cuda::refuse_kmeans(all, clusters);
    COTERIE_CHECK(refusal.empty(), kOp, refusal);
  }
  return all;
}

}  // namespace

std::int64_t kmeans_workspace_bytes(const KMeansParams& params, const TensorView& x,
                                    std::int64_t clusters) {
  const TensorView all = check_rows(params, x, clusters);
  return x.device == Device::cuda ? cuda::kmeans_workspace_bytes(params, all, clusters) : 0;
}

void kmeans(const KMeansParams& params, const TensorView& x, const KMeansResult& result,
            const Workspace& workspace) {
  const TensorView& centroids = result.centroids;
  COTERIE_CHECK(centroids.rank == 3, kOp,
                "expected centroids of shape (problems, clusters, elements); got ",
                describe(centroids));
  const std::int64_t clusters = centroids.size(1);
  const TensorView all = check_rows(params, x, clusters);
  ops::check_dense(kOp, "centroids", centroids, accumulator_dtype(x.dtype),
                   {x.size(0), clusters, x.size(2)}, x.device);
  ops::check_dense(kOp, "labels", result.labels, DType::i32, {x.size(0), x.size(1)}, x.device);
  ops::check_dense(kOp, "counts", result.counts, DType::i32, {x.size(0), clusters}, x.device);
  if (x.size(0) == 0) return;
  if (x.device == Device::cuda) return cuda::kmeans(params, all, result, workspace);
  dispatch_accumulator(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    ops::Scratch memory;
    auto scratch = ops::take_scratch(
        memory, [&](Arena& arena) { return cpu::KMeansMemory<T>(arena, all, clusters); });
    cpu::kmeans<T>(params, all, result, scratch);
  });
}

}  // namespace coterie
