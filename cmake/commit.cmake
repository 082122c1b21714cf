# SPDX-License-Identifier: MIT
# Run at every build: cmake -DROOT=repository -DOUT=header -P cmake/commit.cmake writes the commit
# into a header, which changes only when the commit does. The commit is empty when git fails.
execute_process(COMMAND git -C ${ROOT} describe --always --dirty --abbrev=12 --exclude=*
  RESULT_VARIABLE failed OUTPUT_VARIABLE commit ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  set(commit "")
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT
  "#pragma once\nnamespace coterie::cli {\nconstexpr char kCommit[] = \"${commit}\";\n}\n")
