# SPDX-License-Identifier: MIT
# Checks the format of all sources with clang-format; with -DFIX=ON, reformats them.
cmake_minimum_required(VERSION 3.25)
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)
find_program(CLANG_FORMAT NAMES clang-format-14 clang-format)
if(NOT CLANG_FORMAT)
  message(STATUS "SKIP: clang-format was not found")
  return()
endif()

set(files)
foreach(room include src torch formats report train python fuzz cases bench apps tests examples)
  file(GLOB_RECURSE some ${root}/${room}/*.h ${root}/${room}/*.cc ${root}/${room}/*.cu
    ${root}/${room}/*.cuh)
  list(APPEND files ${some})
endforeach()

if(FIX)
  execute_process(COMMAND ${CLANG_FORMAT} --style=file -i ${files} COMMAND_ERROR_IS_FATAL ANY)
  return()
endif()

execute_process(COMMAND ${CLANG_FORMAT} --version OUTPUT_VARIABLE version)
execute_process(COMMAND ${CLANG_FORMAT} --style=file --dry-run -Werror ${files}
  RESULT_VARIABLE failed)
if(failed AND NOT version MATCHES "version 14\\.")
  # Versions format differently.
  message(STATUS "SKIP: the sources are formatted for version 14; this is ${version}")
elseif(failed)
  message(FATAL_ERROR "Some sources are not formatted; run make format.")
endif()
