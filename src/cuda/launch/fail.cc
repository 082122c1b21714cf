// SPDX-License-Identifier: MIT
#include "cuda/launch/fail.h"

#include "core/check.h"
#include "cuda/launch/device.h"

namespace coterie::cuda {

void fail_cuda(cudaError_t status, const char* what) {
  cudaGetLastError();  // otherwise the next call reports this error
  fail("cuda", "expected ", what, " to succeed; got ", cudaGetErrorName(status), ": ",
       cudaGetErrorString(status));
}

void fail_element(const char* op, DType dtype) {
  fail(op, "expected an element type among f32, bf16, f16; got ", dtype_name(dtype));
}

void fail_more_than(const char* op, std::int64_t most, const char* what, std::int64_t got) {
  fail(op, "expected at most ", most, " ", what, "; got ", got);
}

void fail_shared_memory(std::size_t bytes) {
  fail("cuda", "expected a kernel that needs at most ", shared_per_block(),
       " bytes of shared memory, as a block has on this GPU; it needs ", bytes);
}

void fail_alignment(const char* op, const char* what, std::int64_t bytes) {
  fail(op, "expected ", what, " aligned to ", bytes, " bytes");
}

}  // namespace coterie::cuda
