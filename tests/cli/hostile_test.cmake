# SPDX-License-Identifier: MIT
# Malicious files: one line that names the limit, status 2, no hang and no crash.
#   cmake -DPROGRAM=build/full/bin/coterie -DTRAIN=ON [-DWORK=folder] -P tests/cli/hostile_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

function(shell command)
  execute_process(COMMAND sh -c "${command}" WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

shell("mkfifo pipe && mkdir run step && truncate -s 1G sparse && truncate -s 2G large")
shell("head -c 300000 /dev/zero | tr '\\0' '[' > brackets")
shell("{ echo '{\"kind\":\"run\"}'; printf '{\"kind\":\"run\",\"machine\":'; cat brackets; echo; } > deep.jsonl")
shell("cp deep.jsonl run/log.jsonl")
shell("printf '%s\\n' '{\"kind\":\"\\u001b[2J\"}' > escape.jsonl")
shell("printf '\\0\\0\\0\\100\\0\\0\\0\\0{' > header.safetensors && truncate -s 2G header.safetensors")

foreach(file pipe /dev/zero)
  set(path ${file})
  if(file STREQUAL "pipe")
    set(path ${WORK}/pipe)
  endif()
  expect_mistake("expected a regular file; got a " bench --report ${path})
  expect_mistake("expected a regular file; got a " bench --data ${path})
  expect_mistake("expected a regular file; got a " report --bench ${path} --out ${WORK}/page.html)
endforeach()
expect_mistake("Is a directory" bench --report ${WORK})
expect_mistake("line 2: expected JSON of at most 64 nested levels" bench --report ${WORK}/deep.jsonl)
expect_mistake("line 2: expected JSON of at most 64 nested levels"
  report --bench ${WORK}/deep.jsonl --out ${WORK}/page.html)
expect_mistake("line 2: expected JSON of at most 64 nested levels"
  report ${WORK}/run --out ${WORK}/page.html)
expect_mistake("expected at most 1G bytes; got 2G" report --bench ${WORK}/large --out ${WORK}/page.html)
expect_mistake("kind \"?[2J\"" bench --report ${WORK}/escape.jsonl)
expect_mistake("expected a header of at most 100000000 bytes" bench --data ${WORK}/header.safetensors)

if(TRAIN)
  shell("head -c 200000000 /dev/zero | tr '\\0' x | gzip -1 > bomb.gz")
  shell("ln -s /etc/passwd passwd && tar -cf link.tar passwd && cp brackets step/state.json")
  set(train train --task bytes --out ${WORK}/out)
  expect_mistake("expected at most 1M bytes of text after decompression; got more (raise --data-limit"
    ${train} --data ${WORK}/bomb.gz --data-limit 1M)
  expect_mistake("links inside the archive; got \"/etc/passwd\"" ${train} --data ${WORK}/link.tar)
  expect_mistake("expected at most 1G bytes of text" ${train} --data ${WORK}/large)
  expect_mistake("--data-limit: expected a number of bytes" ${train} --data-limit 1T)
  foreach(path ${WORK}/pipe /dev/zero)
    expect_mistake("expected a regular file; got a " ${train} --data ${path})
    expect_mistake("expected a regular file; got a " train --config ${path})
  endforeach()
  expect_mistake("expected at most 64k bytes; got 1G (is it a config file?)"
    train --config ${WORK}/sparse)
  expect_mistake("64 nested levels" eval ${WORK}/step)
endif()

finish()
