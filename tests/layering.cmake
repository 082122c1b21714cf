# SPDX-License-Identifier: MIT
# Compares every #include line with the table of rooms below: cmake -P tests/layering.cmake
cmake_minimum_required(VERSION 3.25)
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)

# Regular expressions over what stands between the quotes or brackets.
set(std "[a-z0-9_]+|(math|stddef|stdint|stdlib|string|float|limits)\\.h")
string(APPEND std "|(immintrin|x86intrin|cpuid|unistd|fcntl|malloc|signal|sched|pthread|sys/[a-z]+)\\.h")
set(public "coterie/[a-z0-9_]+\\.h")
set(core "core/[a-z0-9_]+\\.h")

set(rooms include src/core src/ref src/cpu src/cuda src/no_cuda src/ops torch python train cases bench apps fuzz)
set(may_include "${std}|${public}")
set(may_src/core "${std}|${public}|core/.*")
set(may_src/ref "${std}|${public}|${core}|ref/.*")
set(may_src/cpu "${std}|${public}|${core}|cpu/.*")
set(may_src/cuda "${std}|${public}|${core}|cuda/.*|cuda[a-z0-9_]*\\.h|(cub|cute|cuda)/.*|(cooperative_groups|mma)\\.h")
set(may_src/no_cuda "${std}|${public}|${core}|cuda/entry\\.h")
set(may_src/ops "${std}|${public}|${core}|ref/.*|cpu/.*|cuda/entry\\.h|ops/.*")
# Torch by narrow headers: torch/torch.h costs 14 s in every file that has it.
set(libtorch "(ATen|c10)/.*\\.h|torch/(csrc|headeronly|nn|optim)/.*\\.h")
set(may_torch "${std}|${public}|coterie/torch/[a-z0-9_]+\\.h|${libtorch}")
# Only what torch keeps stable, so that one binary serves many versions of it.
set(may_python "${std}|dlfcn\\.h|${public}|torch/(csrc/stable|headeronly)/.*\\.h")
set(may_train "${std}|${public}|coterie/torch/[a-z0-9_]+\\.h|${libtorch}|train/.*")
string(APPEND may_train "|(CLI|fmt|nlohmann)/.*|archive(_entry)?\\.h")
# What needs no torch, so that it can be built with sanitizers.
set(may_fuzz "${std}|${public}|fuzz/.*|train/(files|safetensors|config|config_text|options|report)\\.h")
set(may_cases "${std}|${public}|cases/.*")
# The gate compares with the specification; the opponent is torch; the clock of a GPU is CUDA's.
set(may_bench "${std}|${public}|cases/.*|bench/.*|ref/ref\\.h|${libtorch}|cuda_runtime_api\\.h")
set(may_apps "${std}|${public}|cases/.*|bench/.*|train/.*|coterie/torch/[a-z0-9_]+\\.h|apps/.*")
string(APPEND may_apps "|(CLI|fmt|nlohmann)/.*|${libtorch}")

set(wrong)
set(count 0)
foreach(room IN LISTS rooms)
  file(GLOB_RECURSE files ${root}/${room}/*.h ${root}/${room}/*.cc ${root}/${room}/*.cu
    ${root}/${room}/*.cuh)
  foreach(file IN LISTS files)
    file(STRINGS ${file} lines REGEX "^[ \t]*#[ \t]*include")
    get_filename_component(folder ${file} DIRECTORY)
    foreach(line IN LISTS lines)
      math(EXPR count "${count} + 1")
      if(NOT line MATCHES "include[ \t]*([\"<])([^\">]+)[\">]")
        list(APPEND wrong "${file}: cannot read: ${line}")
        continue()
      endif()
      set(kind ${CMAKE_MATCH_1})
      set(name ${CMAKE_MATCH_2})
      # A neighbour in the same folder may be named without its room.
      if(kind STREQUAL "\"" AND name MATCHES "^[a-z0-9_]+\\.cuh?$|^[a-z0-9_]+\\.h$"
          AND EXISTS ${folder}/${name})
        continue()
      endif()
      if(NOT name MATCHES "^(${may_${room}})$" OR name MATCHES "\\.\\.")
        list(APPEND wrong "${file}: ${room} may not include ${name}")
      endif()
    endforeach()
  endforeach()
endforeach()

# tests/ may include everything, but nothing else may include tests/: the table above has no such entry.
if(wrong)
  list(JOIN wrong "\n  " wrong)
  string(REPLACE "${root}/" "" wrong "${wrong}")
  message(FATAL_ERROR "Includes against the direction of the rooms:\n  ${wrong}")
endif()
message(STATUS "${count} includes follow the rooms")
