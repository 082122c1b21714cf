# SPDX-License-Identifier: MIT
# Shared by the tests of the program: needs -DPROGRAM=path and makes the folder WORK. Every test ends
# with finish().
if(NOT PROGRAM)
  message(FATAL_ERROR "expected -DPROGRAM=path of the program")
endif()
if(NOT WORK)
  string(RANDOM name)
  set(WORK /tmp/coterie_cli_test_${name})
endif()
file(MAKE_DIRECTORY ${WORK})

set(wrong)
macro(complain text)
  list(JOIN arguments " " command)
  list(APPEND wrong "coterie ${command}: ${text}\n    stdout: ${out}\n    stderr: ${err}")
endmacro()

# run(STATUS arguments...) runs the program and leaves its output in `out` and `err`.
macro(run wanted)
  set(arguments ${ARGN})
  execute_process(COMMAND ${PROGRAM} ${arguments} RESULT_VARIABLE status OUTPUT_VARIABLE out
    ERROR_VARIABLE err TIMEOUT 120)
  if(NOT status STREQUAL "${wanted}")
    complain("exit status ${status} instead of ${wanted}")
  endif()
endmacro()

macro(expect_out)
  foreach(part IN ITEMS ${ARGN})
    string(FIND "${out}" "${part}" at)
    if(at EQUAL -1)
      complain("no \"${part}\" on stdout")
    endif()
  endforeach()
endmacro()

# A user's mistake: status 2, nothing on stdout, one line on stderr that contains the given part.
macro(expect_mistake part)
  run(2 ${ARGN})
  string(FIND "${err}" "${part}" at)
  if(at EQUAL -1)
    complain("no \"${part}\" on stderr")
  endif()
  if(NOT err MATCHES "^coterie: [^\n]*\n$")
    complain("not one line on stderr")
  endif()
  if(NOT out STREQUAL "")
    complain("something on stdout")
  endif()
endmacro()

# Removes the folder and fails with all complaints, if there were any.
macro(finish)
  file(REMOVE_RECURSE ${WORK})
  if(wrong)
    list(JOIN wrong "\n  " wrong)
    message(FATAL_ERROR "The program does not behave as expected:\n  ${wrong}")
  endif()
  message(STATUS "the program behaves")
endmacro()
