# SPDX-License-Identifier: MIT
# Kernels of one instruction set (OBJECTS, separated by |) must not share functions with others: the
# linker keeps one copy of a weak symbol, possibly one that this machine cannot run. So every weak
# function must be in the namespace ISA.
cmake_minimum_required(VERSION 3.25)
string(REPLACE "|" ";" objects "${OBJECTS}")
set(wrong)
foreach(object IN LISTS objects)
  execute_process(COMMAND ${NM} --defined-only -C ${object} OUTPUT_VARIABLE symbols
    COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[][;]" "_" symbols "${symbols}")  # characters that break CMake's lists
  string(REPLACE "\n" ";" symbols "${symbols}")
  foreach(symbol IN LISTS symbols)
    if(symbol MATCHES "^[0-9a-f]+ W (.*)$")
      set(name ${CMAKE_MATCH_1})
      if(NOT name MATCHES "(^|[^a-z0-9_])${ISA}::")
        get_filename_component(file ${object} NAME)
        list(APPEND wrong "${file}: ${name}")
      endif()
    endif()
  endforeach()
endforeach()
if(wrong)
  list(REMOVE_DUPLICATES wrong)
  list(JOIN wrong "\n  " wrong)
  message(FATAL_ERROR "Weak functions outside the namespace ${ISA}; make them static or remove them:\n  ${wrong}")
endif()
