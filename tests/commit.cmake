# SPDX-License-Identifier: MIT
# The commit in records: cmake -DWORK=folder -P tests/commit.cmake runs cmake/commit.cmake on sources
# without git, in a folder of the checkout, whose commit they must not get.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

function(expect_commit name expected)
  set(ENV{COTERIE_COMMIT} "${name}")
  execute_process(COMMAND ${CMAKE_COMMAND} -DROOT=${WORK} -DOUT=${WORK}/commit.h
    -P ${CMAKE_CURRENT_LIST_DIR}/../cmake/commit.cmake RESULT_VARIABLE failed ERROR_VARIABLE error)
  if(failed)
    file(WRITE ${WORK}/commit.h "${error}")
  endif()
  file(READ ${WORK}/commit.h found)
  if(NOT found MATCHES "${expected}")
    message(FATAL_ERROR "COTERIE_COMMIT=${name}: expected ${expected}; got\n${found}")
  endif()
endfunction()

expect_commit("0123456789ab" "kCommit\\[\\] = \"0123456789ab\";")
expect_commit("" "kCommit\\[\\] = \"\";")
expect_commit("two words" "expected the name of a commit")
