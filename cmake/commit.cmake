# SPDX-License-Identifier: MIT
# Run at every build: cmake -DROOT=repository -DOUT=header -P cmake/commit.cmake writes the commit
# into a header, which changes only when the commit does: that of git, "-dirty" if files differ from
# it, or COTERIE_COMMIT of the environment, for sources without git (git archive). Otherwise empty.
set(commit "$ENV{COTERIE_COMMIT}")
if(commit)
  if(NOT commit MATCHES "^[0-9a-zA-Z._-]+$")
    message(FATAL_ERROR "COTERIE_COMMIT: expected the name of a commit; got \"${commit}\"")
  endif()
elseif(EXISTS ${ROOT}/.git)  # not that of a folder above
  execute_process(COMMAND git -C ${ROOT} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE commit ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT
  "#pragma once\nnamespace coterie::cli {\nconstexpr char kCommit[] = \"${commit}\";\n}\n")
