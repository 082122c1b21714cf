// SPDX-License-Identifier: MIT
// Errors of kernel files. fail.cc formats the messages: strings and streams of the standard library
// would cost each kernel file a third of its compile time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "coterie/view.h"

namespace coterie::cuda {

[[noreturn]] void fail_cuda(cudaError_t status, const char* what);
[[noreturn]] void fail_element(const char* op, DType dtype);
[[noreturn]] void fail_more_than(const char* op, std::int64_t most, const char* what,
                                 std::int64_t got);
// More shared memory than a block may have on this device.
[[noreturn]] void fail_shared_memory(std::size_t bytes);
[[noreturn]] void fail_alignment(const char* op, const char* what, std::int64_t bytes);

}  // namespace coterie::cuda
