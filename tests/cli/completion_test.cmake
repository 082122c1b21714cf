# SPDX-License-Identifier: MIT
# The completion scripts: shells accept them, and bash completes verbs, options and words with one.
#   cmake -DPROGRAM=build/full/bin/coterie [-DWORK=folder] -P tests/cli/completion_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

foreach(shell bash zsh fish)
  run(0 completion ${shell})
  file(WRITE ${WORK}/completion.${shell} "${out}")
  find_program(${shell}_program ${shell})
  if(${shell}_program)
    execute_process(COMMAND ${${shell}_program} -n ${WORK}/completion.${shell} RESULT_VARIABLE failed ERROR_VARIABLE errors)
    if(failed)
      complain("${shell} does not accept its script: ${errors}")
    endif()
  endif()
endforeach()
run(2 completion tcsh)

# expect_words(words-so-far completions): the last word is completed, a blank at the end begins a new one.
macro(expect_words words_so_far expected)
  set(line "${words_so_far}")
  separate_arguments(words UNIX_COMMAND "${line}")
  list(LENGTH words count)
  if(line MATCHES " $")
    string(APPEND line "''")
    math(EXPR count "${count} + 1")
  endif()
  execute_process(COMMAND bash -c "source ${WORK}/completion.bash && COMP_WORDS=(coterie ${line}) && \
COMP_CWORD=${count} && _coterie; echo \"\${COMPREPLY[*]}\"" OUTPUT_VARIABLE got ERROR_VARIABLE errors
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT got STREQUAL "${expected}" OR NOT errors STREQUAL "")
    complain("coterie ${line} is completed to \"${got}\", expected \"${expected}\" ${errors}")
  endif()
endmacro()
expect_words("be" "bench")
expect_words("bench --dty" "--dtype")
expect_words("bench --dtype " "f32 bf16 f16 f64")
expect_words("bench --dtype b" "bf16")
expect_words("bench --attention " "")
expect_words("completion " "bash zsh fish")

finish()
