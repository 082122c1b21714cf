# SPDX-License-Identifier: MIT
# Kills and interrupts runs of the program or makes their writes fail, then resumes them; losses must
# equal those of an undisturbed run:
#   cmake -DPROGRAM=build/full/bin/coterie [-DWORK=folder] -P tests/train/resume_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/../cli/program.cmake)

# With dropout and routing centroids: everything that has state.
set(options --task recall --recall.causal --length 66 --recall.pairs 16 --recall.queries 16
  --attention "1*local(window=8)+1*routing(clusters=3,window=16)" --model.dim 16 --model.heads 2
  --model.dropout 0.1 --train.batch 4 --train.log-every 1 --train.eval-every 20
  --train.eval-batches 1 --train.steps 60 --checkpoint.every 5 --checkpoint.keep 100
  --threads 1)

# Starts a run in the background, waits for its checkpoint of step 10 and sends it a signal.
# `status` is the program's exit status as the shell reports it.
macro(train_and_signal signal folder)
  set(arguments train ${options} --out ${folder})
  set(script [[
    signal=$1; folder=$2; shift 2
    "$@" >$folder.out 2>$folder.err &
    pid=$!
    for i in $(seq 3000); do
      test -e $folder/checkpoints/step-00000010 && break
      kill -0 $pid 2>/dev/null || break
      sleep 0.02
    done
    kill -$signal $pid
    wait $pid
  ]])
  execute_process(COMMAND sh -c "${script}" sh ${signal} ${folder} ${PROGRAM} ${arguments}
    RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err TIMEOUT 300)
endmacro()

# The steps and losses of a log.
function(losses folder out)
  set(found)
  file(STRINGS ${folder}/log.jsonl lines)
  foreach(line IN LISTS lines)
    string(JSON kind GET "${line}" kind)
    if(kind STREQUAL "step" OR kind STREQUAL "eval")
      string(JSON step GET "${line}" step)
      string(REGEX MATCH "\"loss\":[^,}]*" loss "${line}")  # the digits as written
      list(APPEND found "${kind} ${step} ${loss}")
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

macro(expect_same_losses folder)
  losses(${folder} got)
  if(NOT got STREQUAL straight)
    complain("losses of ${folder} differ from those of the straight run:\n${got}\n${straight}")
  endif()
endmacro()

run(0 train ${options} --out ${WORK}/straight)
losses(${WORK}/straight straight)
list(LENGTH straight count)
if(NOT count EQUAL 63)  # 60 steps, 3 evaluations
  complain("${count} lines of the straight run instead of 63")
endif()

train_and_signal(KILL ${WORK}/killed)
if(NOT status EQUAL 137)
  complain("kill -9: status ${status}: the run was over before it could be killed")
endif()
run(2 train ${options} --out ${WORK}/killed)
if(NOT err MATCHES "^coterie: [^\n]*--resume[^\n]*\n$")
  complain("a used folder is not refused in one line")
endif()
run(0 train --out ${WORK}/killed --resume)
expect_same_losses(${WORK}/killed)

train_and_signal(TERM ${WORK}/stopped)
if(NOT status EQUAL 143)
  complain("SIGTERM: exit status ${status}")
endif()
file(READ ${WORK}/stopped.out out)
if(NOT out MATCHES "interrupted; continue with: coterie train --out [^\n]*/stopped --resume\n$")
  complain("SIGTERM: no hint on how to continue")
endif()
run(0 train --out ${WORK}/stopped --resume)
expect_same_losses(${WORK}/stopped)

# The last checkpoint cut short, as by a crash of the machine.
train_and_signal(TERM ${WORK}/damaged)
file(GLOB checkpoints ${WORK}/damaged/checkpoints/step-*)
list(SORT checkpoints)
list(GET checkpoints -1 last)
file(WRITE ${last}/model.safetensors "cut")
run(0 train --out ${WORK}/damaged --resume)
if(NOT err MATCHES "coterie: warning: [^\n]*step-")
  complain("no warning about the damaged checkpoint")
endif()
expect_same_losses(${WORK}/damaged)

# A limit on file sizes simulates a full disk: writing fails, and existing files are kept.
set(script [[ulimit -f 24; trap '' XFSZ; exec "$@"]])
set(arguments train ${options} --out ${WORK}/full)
execute_process(COMMAND sh -c "${script}" sh ${PROGRAM} ${arguments}
  RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err TIMEOUT 300)
if(status EQUAL 0 OR NOT err MATCHES "coterie: [^\n]*cannot write [^\n]*\n$")
  complain("a full disk: status ${status}")
endif()
file(GLOB left ${WORK}/full/checkpoints/*)
if(left)
  complain("a full disk: incomplete checkpoints are left: ${left}")
endif()

finish()
