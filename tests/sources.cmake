# SPDX-License-Identifier: MIT
# Sources are listed by hand; this check finds files that no list names.
cmake_minimum_required(VERSION 3.25)
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)

set(forgotten)
foreach(room src torch python formats report train cases bench apps fuzz tests)
  file(READ ${root}/${room}/CMakeLists.txt lists)
  string(REGEX REPLACE "#[^\n]*" "" lists "${lists}")
  file(GLOB_RECURSE files RELATIVE ${root}/${room} ${root}/${room}/*.cc ${root}/${room}/*.cu)
  list(FILTER files EXCLUDE REGEX "^package/")  # a separate project
  foreach(file IN LISTS files)
    string(REPLACE "." "\\." pattern "${file}")
    if(NOT lists MATCHES "[ \n(]${pattern}[ \n)]")
      list(APPEND forgotten ${room}/${file})
    endif()
  endforeach()
endforeach()

if(forgotten)
  list(JOIN forgotten "\n  " forgotten)
  message(FATAL_ERROR "Not listed in the CMakeLists.txt of their folder:\n  ${forgotten}")
endif()
