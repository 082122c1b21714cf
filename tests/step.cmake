# SPDX-License-Identifier: MIT
# scripts/step on commands that succeed and fail, in a folder of its own.
#   cmake -DWORK=folder -P tests/step.cmake
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})
file(COPY ${CMAKE_CURRENT_LIST_DIR}/../scripts/step DESTINATION ${WORK}/scripts)

function(step status pattern)
  execute_process(COMMAND ${WORK}/scripts/step ${ARGN} RESULT_VARIABLE got OUTPUT_VARIABLE out ERROR_VARIABLE errors)
  if(NOT got EQUAL status OR NOT "${out}${errors}" MATCHES "${pattern}")
    message(FATAL_ERROR "step ${ARGN}: status ${got}, expected ${status}; output, expected ${pattern}:\n${out}${errors}")
  endif()
endfunction()

step(0 "== Say hello\nhello\n== Say hello: [0-9]+ s \\(processor" "Say hello" echo hello)
step(7 "== Fail: failed after" "Fail" sh -c "exit 7")
step(0 "== Two words\na  b\n" "Two words" printf "%s\n" "a  b")
step(0 "parts:\n[^\n]*Say hello\n[^\n]*Two words\n[^\n]*total\n" --total parts)
step(2 "usage" alone)
if(EXISTS ${WORK}/build/steps)
  message(FATAL_ERROR "the parts are still there after the total")
endif()
