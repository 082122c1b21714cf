// SPDX-License-Identifier: MIT
#include "coterie/runtime.h"

#include <fstream>

#include "cuda/api/entry.h"

namespace coterie {

bool cuda_available() { return cuda::available(); }

std::vector<CudaDevice> cuda_devices() { return cuda::devices(); }

BuildInfo build_info() {
  BuildInfo info;
  info.version = COTERIE_VERSION;
  info.compiler = COTERIE_COMPILER;
  info.build_type = COTERIE_BUILD_TYPE;
  info.cuda_toolkit = cuda::toolkit();
#if defined(COTERIE_ASSERTS)
  info.asserts = true;
#endif
  return info;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  const std::string key = "model name";
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, key.size(), key) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

}  // namespace coterie
