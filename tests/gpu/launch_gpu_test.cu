// SPDX-License-Identifier: MIT
// A kernel's shared memory limit does not depend on which thread launched the kernel last.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "coterie/error.h"
#include "coterie/runtime.h"
#include "cuda/launch/launch.h"

namespace coterie {
namespace {

template <int kNumber>
__global__ void touch_kernel(unsigned char* out, int bytes) {
  extern __shared__ unsigned char memory[];
  __shared__ unsigned char own[1024];
  own[threadIdx.x] = static_cast<unsigned char>(kNumber);
  memory[bytes - 1] = own[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) out[0] = memory[bytes - 1];
}

constexpr int kSmall = 40 * 1024, kLarge = 90 * 1024;

TEST(LaunchGpuTest, ASmallerLaunchDoesNotLowerTheLimit) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const auto kernel = touch_kernel<1>;
  cuda::allow_shared_memory(kernel, kLarge);
  cuda::allow_shared_memory(kernel, kSmall);
  cudaFuncAttributes attributes{};
  ASSERT_EQ(cudaFuncGetAttributes(&attributes, kernel), cudaSuccess);
  EXPECT_EQ(attributes.maxDynamicSharedSizeBytes, cuda::shared_per_block() - 1024);
}

TEST(LaunchGpuTest, MoreThanABlockHasIsRefused) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const int most = cuda::shared_per_block();
  try {
    cuda::allow_shared_memory(touch_kernel<1>, static_cast<std::size_t>(most) + 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(most) + " bytes of shared memory"),
              std::string::npos)
        << error.what();
  }
}

// A kernel may start early only if its image has the instructions with which it waits.
__global__ void waits_kernel(int* out) {
#if __CUDA_ARCH__ >= 900
  *out = 1;
#else
  *out = 0;
#endif
}

TEST(LaunchGpuTest, KernelsStartEarlyOnlyWhereTheyWait) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  int *out = nullptr, waits = -1;
  ASSERT_EQ(cudaMalloc(&out, sizeof waits), cudaSuccess);
  waits_kernel<<<1, 1>>>(out);
  ASSERT_EQ(cudaMemcpy(&waits, out, sizeof waits, cudaMemcpyDeviceToHost), cudaSuccess);
  cudaFree(out);
  EXPECT_EQ(cuda::device_limits().early, waits == 1);
}

// Threads launch one kernel with two shapes.
TEST(LaunchGpuTest, ThreadsLaunchOneKernelWithTheirOwnBytes) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  std::atomic<int> failures{0};
  const auto launch = [&](int bytes) {
    unsigned char* out = nullptr;
    cudaStream_t stream = nullptr;
    if (cudaMalloc(&out, 1) != cudaSuccess ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      ++failures;
      return;
    }
    for (int i = 0; i < 2000; ++i) {
      try {
        cuda::launch_kernel("touch", {false, false}, touch_kernel<2>, dim3(1), 32, bytes, stream,
                            out, bytes);
      } catch (const std::exception&) {
        ++failures;
      }
    }
    if (cudaStreamSynchronize(stream) != cudaSuccess) ++failures;
    cudaStreamDestroy(stream);
    cudaFree(out);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) threads.emplace_back(launch, t % 2 ? kLarge : kSmall);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace coterie
