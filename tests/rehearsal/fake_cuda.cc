// SPDX-License-Identifier: MIT
// The functions of the CUDA runtime that the library calls, in place of libcudart_static.
#include "tests/rehearsal/fake_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

namespace coterie::fake_cuda {
namespace {

struct Kernel {
  std::string name;
  std::map<int, int> most_dynamic;  // by device, bytes
};

struct State {
  int device = 0;
  std::map<const void*, Kernel> kernels;
  std::map<std::string, KernelUse> uses;
  Launches launches;
  // The launch that <<<>>> is about to make.
  dim3 grid, block;
  std::size_t shared = 0;
  cudaStream_t stream = nullptr;
};

State& state() {
  static State all;
  return all;
}

const Gpu& current() { return gpus()[static_cast<std::size_t>(state().device)]; }

constexpr int kDefaultDynamic = 48 * 1024, kReserved = 1024;  // bytes of a block

KernelUse use_of(const std::string& name) {
  const auto found = state().uses.find(name);
  if (found != state().uses.end()) return found->second;
  state().launches.faults.push_back(name + " has no entry in the resource usage");
  return {};
}

// Blocks of a kernel that fit on a multiprocessor at once.
int resident_blocks(const KernelUse& use, int threads, int shared) {
  const Gpu& gpu = current();
  const int registers = (use.registers + 7) / 8 * 8 * threads;
  const int by_shared = gpu.shared_per_multiprocessor * 1024 / (shared + kReserved);
  return std::min(
      {by_shared, gpu.threads_per_multiprocessor / threads, 65536 / std::max(registers, 1)});
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, std::size_t dynamic, bool together,
                   bool early) {
  State& all = state();
  const Gpu& gpu = current();
  const Kernel& known = all.kernels[kernel];
  const KernelUse use = use_of(known.name);
  const int shared = use.shared + static_cast<int>(dynamic);
  const int threads = static_cast<int>(block.x * block.y * block.z);
  const auto fault = [&](const std::string& what) {
    all.launches.faults.push_back(std::string(gpu.name) + ": " + known.name + ": " + what);
  };
  ++all.launches.count;
  all.launches.most_shared = std::max(all.launches.most_shared, shared);
  if (shared > gpu.shared_per_block * 1024)
    fault(std::to_string(use.shared) + " + " + std::to_string(dynamic) + " bytes of shared memory");
  const auto most = known.most_dynamic.find(all.device);
  const int allowed =
      most == known.most_dynamic.end() ? kDefaultDynamic - use.shared : most->second;
  if (static_cast<int>(dynamic) > allowed) fault("more dynamic shared memory than was asked for");
  if (resident_blocks(use, threads, shared) == 0) fault("no block fits on a multiprocessor");
  const std::int64_t blocks = static_cast<std::int64_t>(grid.x) * grid.y * grid.z;
  if (blocks == 0 || grid.y > 65535 || grid.z > 65535) fault("a grid that no GPU takes");
  if (together && blocks > static_cast<std::int64_t>(gpu.multiprocessors) *
                               resident_blocks(use, threads, shared))
    fault(std::to_string(blocks) + " blocks do not fit at once");
  if (early && gpu.major < 9) fault("dependent launch");
  if (use.hopper && gpu.major != 9) fault("a kernel of Hopper GPUs");
  return cudaSuccess;
}

}  // namespace

const std::vector<Gpu>& gpus() {
  static const std::vector<Gpu> all{
      {"A100", 8, 0, 108, 163, 164, 2048},    {"RTX 3090", 8, 6, 82, 99, 100, 1536},
      {"RTX 4090", 8, 9, 128, 99, 100, 1536}, {"H200", 9, 0, 132, 227, 228, 2048},
      {"B200", 10, 0, 148, 227, 228, 2048},   {"RTX 5090", 12, 0, 170, 99, 100, 1536},
  };
  return all;
}

void set_uses(std::map<std::string, KernelUse> uses) { state().uses = std::move(uses); }

Launches take_launches() { return std::exchange(state().launches, {}); }

}  // namespace coterie::fake_cuda

using coterie::fake_cuda::gpus;
using coterie::fake_cuda::state;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  state().kernels[host].name = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     CUstream_st* stream) {
  auto& all = state();
  all.grid = grid, all.block = block, all.shared = shared, all.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  const auto& all = state();
  *grid = all.grid, *block = all.block, *shared = all.shared;
  *static_cast<cudaStream_t*>(stream) = all.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**,
                               std::size_t shared, cudaStream_t) {
  return coterie::fake_cuda::launch(kernel, grid, block, shared, false, false);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  bool together = false, early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative) together = attribute.val.cooperative != 0;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      early = attribute.val.programmaticStreamSerializationAllowed != 0;
  }
  return coterie::fake_cuda::launch(kernel, config->gridDim, config->blockDim,
                                    config->dynamicSmemBytes, together, early);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(gpus().size());
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = state().device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  state().device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  const auto& gpu = gpus()[static_cast<std::size_t>(device)];
  std::snprintf(properties->name, sizeof properties->name, "%s", gpu.name);
  properties->major = gpu.major;
  properties->minor = gpu.minor;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const auto& gpu = gpus()[static_cast<std::size_t>(device)];
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = gpu.minor;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = gpu.shared_per_block * 1024;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  std::memset(attributes, 0, sizeof *attributes);
  const auto use = coterie::fake_cuda::use_of(state().kernels[kernel].name);
  attributes->sharedSizeBytes = static_cast<std::size_t>(use.shared);
  attributes->numRegs = use.registers;
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  auto& all = state();
  all.kernels[kernel].most_dynamic[all.device] = value;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the stand-in"; }

}  // extern "C"
