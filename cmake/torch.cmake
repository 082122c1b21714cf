# SPDX-License-Identifier: MIT
# Decides whether the torch bindings are built: sets COTERIE_WITH_TORCH and creates the target
# coterie_libtorch. find_package(Torch) is not used: for a torch with CUDA it requires the CUDA
# toolkit and changes the flags of our CUDA files, while the bindings need only torch's headers and
# libraries.
set(COTERIE_WITH_TORCH OFF)
if(NOT COTERIE_TORCH)
  coterie_report(torch out "COTERIE_TORCH is OFF")
  return()
endif()

# The torch of the repository's .venv or of the python in use; found without importing it.
function(coterie_ask_python_for_torch out)
  set(question "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  foreach(python ${PROJECT_SOURCE_DIR}/.venv/bin/python python3 python)
    execute_process(COMMAND ${python} -c "${question}" RESULT_VARIABLE failed OUTPUT_VARIABLE root
      ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT failed AND EXISTS ${root}/lib/libtorch.so)
      set(${out} ${root} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

set(root ${COTERIE_TORCH_ROOT})
set(reason)
if(NOT root)
  coterie_ask_python_for_torch(root)
endif()
if(NOT root)
  set(reason "not in .venv nor in the python in use; scripts/setup installs it")
elseif(NOT EXISTS ${root}/lib/libtorch.so OR NOT EXISTS ${root}/include/ATen/core/Tensor.h)
  set(reason "no libtorch.so with headers in ${root}")
else()
  file(READ ${root}/include/torch/headeronly/version.h header)
  string(REGEX MATCHALL "VERSION_(MAJOR|MINOR|PATCH) [0-9]+" version "${header}")
  list(TRANSFORM version REPLACE ".* " "")
  list(JOIN version "." version)
  if(version VERSION_LESS 2.11)  # all of these have the C++11 ABI of the standard library
    set(reason "2.11 or newer is needed; this is ${version} in ${root}")
  endif()
endif()
if(reason)
  if(NOT COTERIE_TORCH STREQUAL "AUTO")
    message(FATAL_ERROR "COTERIE_TORCH is ${COTERIE_TORCH}, but torch cannot be used: ${reason}")
  endif()
  coterie_report(torch out "${reason}")
  return()
endif()

add_library(coterie_libtorch INTERFACE IMPORTED GLOBAL)
target_include_directories(coterie_libtorch SYSTEM INTERFACE ${root}/include
  ${root}/include/torch/csrc/api/include)
# libtorch.so loads torch's CUDA part, although no symbol refers to it. It also exports its own
# std::filesystem::remove_all, which calls address 0: the standard library must come before it.
target_link_libraries(coterie_libtorch INTERFACE stdc++
  -Wl,--no-as-needed,${root}/lib/libtorch.so,--as-needed ${root}/lib/libtorch_cpu.so
  ${root}/lib/libc10.so)
target_link_options(coterie_libtorch INTERFACE LINKER:-rpath,${root}/lib)
set(COTERIE_WITH_TORCH ON)
set(COTERIE_TORCH_FOLDER ${root})

# Parsing the headers of torch's modules takes 12 s in every file or group of files; precompiled once they take 3.
# These are the ones that coterie/torch/attention.h includes, no others: the test of public headers uses them. g++ 12
# crashes if a file that uses them has another -O than they, and says nothing before.
if(COTERIE_TOGETHER)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/CMakeFiles/torch_modules.cc CONTENT "")
  add_library(coterie_torch_modules OBJECT ${PROJECT_BINARY_DIR}/CMakeFiles/torch_modules.cc)
  target_link_libraries(coterie_torch_modules PRIVATE coterie_libtorch)
  target_precompile_headers(coterie_torch_modules PRIVATE
    <ATen/core/Tensor.h> <torch/nn/module.h> <torch/nn/modules/linear.h> <torch/nn/pimpl.h>)
endif()

# Gives `target`, if it is built, these precompiled headers.
function(coterie_precompiled_torch target)
  if(COTERIE_TOGETHER AND TARGET ${target})
    target_precompile_headers(${target} REUSE_FROM coterie_torch_modules)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "EXECUTABLE")
      target_compile_options(${target} PRIVATE -fPIC)  # as they are, after CMake's -fPIE
    endif()
  endif()
endfunction()
coterie_report(torch in "version ${version} in ${root}")
