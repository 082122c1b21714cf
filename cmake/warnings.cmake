# SPDX-License-Identifier: MIT
# All warning flags; libraries and tests link coterie_warnings.
add_library(coterie_warnings INTERFACE)
target_compile_options(coterie_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)

if(COTERIE_WERROR)
  # The second line: data-flow warnings, for which g++ has false positives that depend on inlining
  # (-O3, sanitizers). They are shown but are not errors.
  target_compile_options(coterie_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=maybe-uninitialized -Wno-error=array-bounds
      -Wno-error=stringop-overflow -Wno-error=stringop-overread -Wno-error=restrict>
    $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
else()
  # g++ 12 warns falsely about concatenated strings.
  target_compile_options(coterie_warnings INTERFACE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
endif()
