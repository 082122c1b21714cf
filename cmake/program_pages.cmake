# SPDX-License-Identifier: MIT
# Writes the completions of `program` for three shells under `data`, and its manual pages under `man` if
# `help2man` is set. `version` is the version of the pages.
function(coterie_output file)
  execute_process(COMMAND ${ARGN} OUTPUT_FILE ${file} ERROR_VARIABLE errors RESULT_VARIABLE failed)
  if(failed)
    file(REMOVE ${file})
    message(FATAL_ERROR "${file} cannot be written: ${errors}")
  endif()
  message(STATUS "Installing: ${file}")
endfunction()

file(MAKE_DIRECTORY ${data}/bash-completion/completions ${data}/zsh/site-functions
  ${data}/fish/vendor_completions.d)
coterie_output(${data}/bash-completion/completions/coterie ${program} completion bash)
coterie_output(${data}/zsh/site-functions/_coterie ${program} completion zsh)
coterie_output(${data}/fish/vendor_completions.d/coterie.fish ${program} completion fish)

if(help2man)
  file(MAKE_DIRECTORY ${man})
  execute_process(COMMAND ${program} --help OUTPUT_VARIABLE help)
  string(REGEX MATCHALL "\n  [a-z]+  +[A-Z][^\n]*" verbs "${help}")
  set(pages --no-info --manual=Coterie --source=coterie --version-string=${version})
  coterie_output(${man}/coterie.1 ${help2man} ${pages} "--name=content-clustered attention" ${program})
  foreach(line IN LISTS verbs)
    string(REGEX MATCH "[a-z]+" verb "${line}")
    execute_process(COMMAND ${program} ${verb} --help OUTPUT_VARIABLE help)
    string(REGEX MATCH "^([^\n]+(\n[^\n]+)*)\nUsage:" found "${help}")
    string(REPLACE "\n" " " name "${CMAKE_MATCH_1}")
    coterie_output(${man}/coterie-${verb}.1 ${help2man} ${pages} "--name=${name}" "${program} ${verb}")
  endforeach()
endif()
