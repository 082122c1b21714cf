# SPDX-License-Identifier: MIT
# Compiles several sources of a target as one. Headers of torch, fmt and JSON take most of the compile time of
# the files that include them; a group pays once. coterie_together(target [files per group])
option(COTERIE_TOGETHER "Compile sources in groups: quicker for whole builds, slower after small changes" OFF)

function(coterie_together target)
  set(group 8)
  if(ARGC GREATER 1)
    set(group ${ARGV1})
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${COTERIE_TOGETHER} UNITY_BUILD_BATCH_SIZE ${group})
  if(COTERIE_TOGETHER)
    # Sources of a group are included, and g++ takes a type of an anonymous namespace in them for one in a header.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
    # CMake 3.31 and newer would group CUDA sources as well; nvcc then uses one core, and names repeat.
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources INCLUDE REGEX "\\.cu$")
    set_source_files_properties(${sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()
