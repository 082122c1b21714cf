# SPDX-License-Identifier: MIT
# Runs the program and checks exit status, output and messages:
#   cmake -DPROGRAM=build/dev/bin/coterie [-DWORK=folder] -P tests/cli/cli_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

run(0 --help)
expect_out("bench" "info" "coterie VERB --help")
run(0 --version)
if(NOT out MATCHES "^coterie [0-9]+\\.[0-9]+\\.[0-9]+\n$")
  complain("not a version")
endif()
run(0 bench --help)
expect_out("--attention" "--lengths" "--device" "--gate" "--json" "--report" "Examples:" "coterie bench --attention" "coterie help spec")
run(0 info)
expect_out("commit" "compiler" "isa" "threads" "i-clustered" "routing" "cast")
run(0 help spec)
expect_out("clusters (required)" "buckets=64" "keys|hamming-keys|hamming" "none|paper|strict")
expect_mistake("expected one of spec" help specs)

expect_mistake("did you mean \"--lengths\"?" bench --length 4k)
expect_mistake("did you mean \"bench\"?" bensh)
expect_mistake("unknown verb bnech; did you mean \"bench\"?" bnech --lengths 4k)
expect_mistake("unknown option --length; did you mean" bench --length 4k)
expect_mistake("unknown argument extra" info extra)
expect_mistake("coterie: --threads: expected a whole number from 1 to 1024; got \"0\"" bench --threads 0)
expect_mistake("expected a whole number from 1 to 1024; got \"2000\"" bench --heads 2000)
expect_mistake("frobnicate" frobnicate)
expect_mistake("--frobnicate" --frobnicate)
expect_mistake("see coterie bench --help" bench --frobnicate)
expect_mistake("did you mean \"full\"?" bench --attention fulll)
expect_mistake("did you mean \"clusters\"?" bench --attention "clustered(cluster=3)")
expect_mistake("there is no causal form; got causal inputs" bench --causal --attention "clustered(clusters=3)")
expect_mistake("add up to the 8 heads" bench --attention "3*full+4*full")
expect_mistake("got \"many\"" bench --lengths many)
expect_mistake("got \"0\"" bench --lengths 0)
expect_mistake("at least one length" bench --lengths 8k:1k)
expect_mistake("--pass" bench --pass sideways)
expect_mistake("--heads" bench --heads 0)
expect_mistake("--kv-heads" bench --heads 8 --kv-heads 3)
expect_mistake("--dtype" bench --dtype i32)
expect_mistake("--json" bench --json ${WORK}/no/such/folder/file.jsonl)
expect_mistake("--threads" bench --threads 1,none)
expect_mistake("--threads" bench --threads 0)
expect_mistake("--threads" bench --threads 1025)
expect_mistake("no/such.safetensors" bench --data ${WORK}/no/such.safetensors)
expect_mistake("--dim" bench --data ${WORK}/no/such.safetensors --dim 8)
expect_mistake("no/such.jsonl" bench --report ${WORK}/no/such.jsonl)
expect_mistake("--gate" bench --report ${WORK}/no/such.jsonl --gate)

foreach(threads 0 1025 many)
  set(program ${PROGRAM})
  set(PROGRAM ${CMAKE_COMMAND} -E env COTERIE_THREADS=${threads} ${program})
  run(2 info)
  if(NOT err MATCHES "^coterie: .COTERIE_THREADS. expected 1 to 1024 threads; got '${threads}'\n$")
    complain("COTERIE_THREADS=${threads} is not refused")
  endif()
  set(PROGRAM ${program})
endforeach()

# A small run: the table, the crossovers and the file.
set(json ${WORK}/bench.jsonl)
run(0 bench --attention "local(window=8)" "i-clustered(clusters=4,topk=4)"
  "1*local(window=8)+1*routing(clusters=2,window=8,causal=strict)" --lengths 16,32:64 --heads 2
  --dim 8 --repeats 2 --threads 1,2 --gate --title Small --json ${json})
expect_out("agree with the specification" "64 tokens" "64 tokens, causal" "peak " "cluster" "select"
  "backward" "local(window=8)" "i-clustered(clusters=4" "Faster than ")
# With torch as a further entry in builds that have it.
set(wanted 30)  # two full attentions and three specs at three lengths, with one and two threads
if(out MATCHES "torch")
  set(wanted 42)
endif()
if(EXISTS ${json})
  file(STRINGS ${json} lines)
  set(measurements 0)
  foreach(line IN LISTS lines)
    string(JSON kind ERROR_VARIABLE error GET "${line}" kind)
    if(error)
      complain("not a JSON object with a kind: ${line}")
    elseif(kind STREQUAL "run")
      foreach(key version commit date title command opponent cpu isa threads load device gpu copy_gbs
          hamming_gpairs gated dtype data seed)
        string(JSON value ERROR_VARIABLE error GET "${line}" ${key})
        if(error)
          complain("no ${key} in ${line}")
        endif()
      endforeach()
    elseif(kind STREQUAL "measurement")
      math(EXPR measurements "${measurements} + 1")
      foreach(key attention opponent groups causal leaks_future N threads hash_ms cluster_ms select_ms
          backward_ms launch_ms against speed error error_rows gbs gflops forward_gflops peak_gflops
          workspace_bytes saved_bytes io_bytes)
        string(JSON value ERROR_VARIABLE error GET "${line}" ${key})
        if(error)
          complain("no ${key} in ${line}")
        endif()
      endforeach()
      string(JSON value ERROR_VARIABLE error GET "${line}" forward_ms median)
      if(error)
        complain("no median in ${line}")
      endif()
    endif()
  endforeach()
  if(NOT measurements EQUAL wanted)
    complain("${measurements} measurements in the file instead of ${wanted}")
  endif()
else()
  complain("no ${json}")
endif()
file(GLOB left ${WORK}/*.tmp)
if(left)
  complain("left behind: ${left}")
endif()

# The same file as a report.
run(0 bench --report ${json})
expect_out("# Performance" "## Small" "| 64 | " "--lengths 16,32:64" "i-clustered(clusters=4,topk=4)"
  "with 2 threads against 1" "faster")

# The performance document is generated from the records.
get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
file(GLOB records ${root}/docs/performance/*.jsonl)  # in the order of their names
if(records)
  run(0 bench --report ${records})
  file(READ ${root}/docs/performance.md document)
  if(NOT out STREQUAL document)
    complain("docs/performance.md is not what coterie bench --report makes of docs/performance")
  endif()
endif()

# Saved rows: q, k and v of two heads, three tokens and two elements, zeros.
string(CONCAT header [[{"q":{"dtype":"F32","shape":[2,3,2],"data_offsets":[0,48]},]]
  [["k":{"dtype":"F32","shape":[2,3,2],"data_offsets":[48,96]},]]
  [["v":{"dtype":"F32","shape":[2,3,2],"data_offsets":[96,144]}}]])
string(LENGTH "${header}" length)  # below 256: one byte, then seven zeros
set(saved ${WORK}/rows.safetensors)
execute_process(COMMAND sh -c
  "printf \"\\\\$(printf %03o ${length})\"; head -c 7 /dev/zero; printf '%s' '${header}'; head -c 144 /dev/zero"
  OUTPUT_FILE ${saved})
run(0 bench --data ${saved} --attention "local(window=2)" --repeats 1 --pass forward)
expect_out("2 heads of 2, data saved" "3 tokens" "local(window=2)")
expect_mistake("at most the 3 tokens" bench --data ${saved} --lengths 4)

# The CUDA device, or an error if there is none.
run(0 info)
if(out MATCHES "no CUDA device")
  expect_mistake("expected a CUDA device" bench --device cuda)
endif()
# Help offers the devices of the build.
run(0 info)
string(REGEX MATCH "cuda +none" without_cuda "${out}")
foreach(verb bench train eval generate inspect compare)
  run(0 ${verb} --help)
  if(without_cuda AND out MATCHES "cuda")
    complain("offers cuda in a build without it")
  elseif(NOT without_cuda AND out MATCHES "--device" AND NOT out MATCHES "cuda")
    complain("does not offer cuda")
  endif()
endforeach()
# Help fits a terminal of 80 columns.
foreach(page --help "help;spec" "bench;--help" "train;--help" "eval;--help" "generate;--help" "inspect;--help"
    "compare;--help" "report;--help" "export;--help" "info;--help" "help;--help")
  set(arguments ${page})
  execute_process(COMMAND ${PROGRAM} ${page} COMMAND awk "length > 80" OUTPUT_VARIABLE out ERROR_VARIABLE err
    RESULTS_VARIABLE status)
  if(NOT status STREQUAL "0;0" OR NOT out STREQUAL "")
    complain("exit status ${status}, or lines of more than 80 columns")
  endif()
endforeach()
run(0 bench --alone --attention "local(window=8)" --lengths 64 --heads 1 --dim 8 --repeats 1)
if(out MATCHES "torch sdpa|Faster")
  complain("something beside what was to run alone")
endif()

# Threads of OpenMP, which comes with torch, wait passively, and the libraries are initialised once.
set(ENV{OMP_DISPLAY_ENV} TRUE)
run(0 --version)
unset(ENV{OMP_DISPLAY_ENV})
string(REGEX MATCHALL "DISPLAY ENVIRONMENT BEGIN" starts "${err}")
list(LENGTH starts starts)
if(starts GREATER 1 OR (starts EQUAL 1 AND NOT err MATCHES "OMP_WAIT_POLICY = 'PASSIVE'"))
  complain("OpenMP was initialised ${starts} times or waits actively")
endif()

# The causal set, with a mark on each attention whose selection sees the future.
run(0 bench --causal --lengths 32 --heads 1 --dim 8 --repeats 1 --pass forward --data normal)
expect_out("routing(clusters=16,window=256,causal=paper) *" "its selection sees the future")

finish()
