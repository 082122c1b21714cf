// SPDX-License-Identifier: MIT
#include "cuda/fail.h"

#include "core/check.h"

namespace coterie::cuda {

void fail_cuda(cudaError_t status, const char* what) {
  cudaGetLastError();  // the runtime keeps the error for the next call otherwise
  fail("cuda", "expected ", what, " to succeed; got ", cudaGetErrorName(status), ": ",
       cudaGetErrorString(status));
}

void fail_element(const char* op, DType dtype) {
  fail(op, "expected an element type among f32, bf16, f16; got ", dtype_name(dtype));
}

void fail_head_dim(const char* op, std::int64_t head_dim, std::int64_t most) {
  fail(op, "expected rows of at most ", most, " elements; got ", head_dim);
}

}  // namespace coterie::cuda
