# SPDX-License-Identifier: MIT
# The one place for warning flags: rooms and tests link coterie_warnings.
add_library(coterie_warnings INTERFACE)
target_compile_options(coterie_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)

if(COTERIE_WERROR)
  # The second line: warnings from data flow, of which g++ gives false ones that depend on how it
  # inlined (-O3, sanitizers). They are shown, but stop nobody.
  target_compile_options(coterie_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-error=maybe-uninitialized -Wno-error=array-bounds
      -Wno-error=stringop-overflow -Wno-error=stringop-overread -Wno-error=restrict>
    $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
else()
  # Nor need those who only build see g++ 12's false ones about joined strings.
  target_compile_options(coterie_warnings INTERFACE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
endif()
