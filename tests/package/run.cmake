# SPDX-License-Identifier: MIT
# Installs BUILD into a fresh prefix, component by component, then configures, builds and runs the consumer in this
# folder, and compiles it again with the flags of pkg-config. PROGRAM: whether the build has the program.
cmake_minimum_required(VERSION 3.25)
set(work ${BUILD}/package)
file(REMOVE_RECURSE ${work})

function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed)
  if(failed)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed: ${command}")
  endif()
endfunction()

function(expect_files folder)
  foreach(file IN LISTS ARGN)
    if(NOT EXISTS ${folder}/${file})
      message(FATAL_ERROR "not installed: ${folder}/${file}")
    endif()
  endforeach()
endfunction()

# The example of README.md between declarations of what it takes as given.
file(READ ${CMAKE_CURRENT_LIST_DIR}/../../README.md page)
string(REGEX MATCH "```cpp\n(#include <coterie/coterie.h>\n)([^`]*)```" found "${page}")
if(NOT found)
  message(FATAL_ERROR "README.md has no C++ example")
endif()
file(WRITE ${work}/readme.cc "#include <vector>\n${CMAKE_MATCH_1}
int main() {
  constexpr std::int64_t B = 1, H = 2, N = 200, D = 16;
  std::vector<float> memory(8 * B * H * N * D, 0.5f);
  const float *q = memory.data(), *k = q + B * H * N * D, *v = k + B * H * N * D;
  float* out = memory.data() + 3 * B * H * N * D;
  const float* grad_out = out;
  coterie::AttentionGradients gradients;
  gradients.dq = coterie::view(out + 1 * B * H * N * D, {B, H, N, D});
  gradients.dk = coterie::view(out + 2 * B * H * N * D, {B, H, N, D});
  gradients.dv = coterie::view(out + 3 * B * H * N * D, {B, H, N, D});
${CMAKE_MATCH_2}
  return out[0] > 0.499f && out[0] < 0.501f ? 0 : 1;
}
")

step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --config ${CONFIG} --component development)
expect_files(${work}/prefix include/coterie/coterie.h)
if(EXISTS ${work}/prefix/bin)
  message(FATAL_ERROR "the component development has programs")
endif()
if(PROGRAM)
  step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/runtime --config ${CONFIG} --component runtime)
  expect_files(${work}/runtime bin/coterie share/bash-completion/completions/coterie
    share/zsh/site-functions/_coterie share/fish/vendor_completions.d/coterie.fish)
  if(EXISTS ${work}/runtime/include)
    message(FATAL_ERROR "the component runtime has headers")
  endif()
  find_program(help2man help2man)
  if(help2man)
    expect_files(${work}/runtime share/man/man1/coterie.1 share/man/man1/coterie-bench.1)
  endif()
endif()
step(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${work}/build -G ${GENERATOR}
  -DCMAKE_BUILD_TYPE=${CONFIG} -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${FLAGS}
  -DCMAKE_PREFIX_PATH=${work}/prefix -DREADME_SOURCE=${work}/readme.cc -DCUDAToolkit_ROOT=${CUDA_ROOT})
step(${CMAKE_COMMAND} --build ${work}/build --config ${CONFIG})
step(${work}/build/consumer ${VERSION})
step(${work}/build/readme)

find_program(pkg_config NAMES pkg-config pkgconf)
if(pkg_config)
  file(GLOB_RECURSE pc ${work}/prefix/*/coterie.pc)
  get_filename_component(folder ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${folder})
  execute_process(COMMAND ${pkg_config} --cflags --libs coterie OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  separate_arguments(own UNIX_COMMAND "${FLAGS}")
  step(${CXX} -std=c++17 ${own} ${CMAKE_CURRENT_LIST_DIR}/consumer.cc -o ${work}/by_pkg_config ${flags})
  step(${work}/by_pkg_config ${VERSION})
endif()
