# SPDX-License-Identifier: MIT
# Decides whether the CUDA back end is built: sets COTERIE_WITH_CUDA and enables the language.
set(COTERIE_WITH_CUDA OFF)
if(NOT COTERIE_CUDA)
  coterie_report(CUDA out "COTERIE_CUDA is OFF")
  return()
endif()

# Asked once per build folder, so that a build does not change because a driver was loaded.
if(NOT DEFINED COTERIE_GPU_IS_HERE)
  execute_process(COMMAND nvidia-smi --list-gpus RESULT_VARIABLE failed OUTPUT_VARIABLE gpus ERROR_QUIET)
  if(NOT failed AND gpus MATCHES "GPU 0")
    set(COTERIE_GPU_IS_HERE ON CACHE INTERNAL "")
  else()
    set(COTERIE_GPU_IS_HERE OFF CACHE INTERNAL "")
  endif()
endif()
if(COTERIE_CUDA STREQUAL "GPU" AND NOT COTERIE_GPU_IS_HERE)
  coterie_report(CUDA out "this machine has no GPU (-DCOTERIE_CUDA=ON builds the kernels anyway)")
  return()
endif()

if(DEFINED ENV{CUDACXX} AND NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER $ENV{CUDACXX})
elseif(NOT CMAKE_CUDA_COMPILER)
  # The toolkit's installer does not put nvcc on the PATH.
  find_program(COTERIE_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(COTERIE_NVCC)
    set(CMAKE_CUDA_COMPILER ${COTERIE_NVCC})
  endif()
endif()
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})  # nvcc's default may be an older one
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90 CACHE STRING "GPU architectures to compile for")
endif()

if(COTERIE_CUDA MATCHES "^(AUTO|GPU)$")
  if(NOT CMAKE_CUDA_COMPILER)
    coterie_report(CUDA out "nvcc was not found")
    return()
  endif()
  # A toolkit that rejects this host compiler must not fail the build, which works without CUDA.
  if(NOT DEFINED COTERIE_NVCC_WORKS)
    set(probe ${PROJECT_BINARY_DIR}/CMakeFiles/probe.cu)
    file(WRITE ${probe} "int main() { return 0; }\n")
    set(host ${CMAKE_CUDA_HOST_COMPILER})
    if(NOT host)
      set(host $ENV{CUDAHOSTCXX})
    endif()
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} -ccbin ${host} -c ${probe} -o ${probe}.o
      RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      set(COTERIE_NVCC_WORKS OFF CACHE INTERNAL "")
    else()
      set(COTERIE_NVCC_WORKS ON CACHE INTERNAL "")
    endif()
  endif()
  if(NOT COTERIE_NVCC_WORKS)
    coterie_report(CUDA out "${CMAKE_CUDA_COMPILER} does not compile an empty program with ${CMAKE_CXX_COMPILER}")
    return()
  endif()
endif()

enable_language(CUDA)
# The host code in .cu files launches kernels; its debug information took an eighth of the time of small files.
string(REPLACE "-g " "" CMAKE_CUDA_FLAGS_RELWITHDEBINFO "${CMAKE_CUDA_FLAGS_RELWITHDEBINFO}")
find_package(CUDAToolkit REQUIRED)
set(COTERIE_WITH_CUDA ON)

# Hopper GPUs have kernels of their own; a build for others leaves them out.
set(architectures ${CMAKE_CUDA_ARCHITECTURES})
if(architectures STREQUAL "native")
  set(architectures ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
endif()
set(COTERIE_WITH_HOPPER OFF)
if(architectures MATCHES "(^|;)(90a?(-real|-virtual)?|all(-major)?)(;|$)")
  set(COTERIE_WITH_HOPPER ON)
endif()

set(quick)
if(COTERIE_CUDA_OPTIMIZE STREQUAL "GPU" AND NOT COTERIE_GPU_IS_HERE
    AND CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.9)
  # A tenth of the time for the largest kernels; ptxas mentions their slowness.
  string(APPEND CMAKE_CUDA_FLAGS " --Ofast-compile=max")
  set(quick ", kernels not optimised, as there is no GPU")
endif()
coterie_report(CUDA in "toolkit ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}${quick}")
