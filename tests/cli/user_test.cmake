# SPDX-License-Identifier: MIT
# What a demanding user does with runs: other data, changed options, two processes, signals, little
# memory, moved folders.
#   cmake -DPROGRAM=build/full/bin/coterie [-DWORK=folder] -P tests/cli/user_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

macro(expect_err)
  foreach(part IN ITEMS ${ARGN})
    string(FIND "${err}" "${part}" at)
    if(at EQUAL -1)
      complain("no \"${part}\" on stderr")
    endif()
  endforeach()
endmacro()

# shell(STATUS script arguments...) runs a shell script; `status`, `out` and `err` as run().
macro(shell wanted script)
  set(arguments ${ARGN})
  execute_process(COMMAND sh -c "${script}" sh ${PROGRAM} ${arguments} WORKING_DIRECTORY ${WORK}
    RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err TIMEOUT 120)
  if(NOT status STREQUAL "${wanted}")
    complain("exit status ${status} instead of ${wanted}")
  endif()
endmacro()

# The number in the first line of `out` that matches `regex`, whose first group it is.
macro(number_in regex result)
  string(REGEX MATCH "${regex}" match "${out}")
  set(${result} ${CMAKE_MATCH_1})
  if(NOT match)
    complain("no match of ${regex}")
  endif()
endmacro()

# Two texts with equally many words but other ones.
set(first)
set(second)
foreach(i RANGE 600)
  math(EXPR a "(${i} * 7 + ${i} / 5) % 11")
  math(EXPR b "(${i} * 3 + ${i} / 7) % 13")
  string(APPEND first "w${a} x${b} the\n")
  string(APPEND second "v${a} y${b} its\n")
endforeach()
file(WRITE ${WORK}/first.txt "${first}")
file(WRITE ${WORK}/second.txt "${second}")
set(small --length 16 --model.dim 16 --model.layers 1 --model.heads 2 --train.batch 4
  --train.steps 4 --train.eval-batches 1 --threads 1)

# A words checkpoint has its vocabulary, and the run recognises its data.
shell(0 [["$@"]] train --task words --data first.txt ${small} --text.vocabulary 20 --out words)
expect_out("% of the validation words are <unk>" "known words" "on all validation data")
file(GLOB vocabulary ${WORK}/words/checkpoints/*/vocabulary.txt)
if(NOT vocabulary)
  complain("no vocabulary.txt in the checkpoint")
endif()
run(0 eval ${WORK}/words)
expect_out("known words" "% of the validation words are <unk>")
set(before "${out}")
file(RENAME ${WORK}/first.txt ${WORK}/moved.txt)
run(0 generate ${WORK}/words --prompt "the w1" --tokens 4)  # needs no data
expect_mistake("give its new place with --data" eval ${WORK}/words)
run(0 eval ${WORK}/words --data ${WORK}/moved.txt)
run(0 eval ${WORK}/words --data ${WORK}/second.txt)
expect_err("trained on other data")
expect_mistake("was trained on other data" train --resume --out ${WORK}/words --data
  ${WORK}/second.txt --train.steps 6)
run(0 train --resume --out ${WORK}/words --data ${WORK}/moved.txt --train.steps 6)
expect_out("6 of 6 steps")

# The folder may move, and commands may be given elsewhere.
shell(0 [[
  "$@" && mkdir elsewhere && mv bytes elsewhere && cd elsewhere && "$1" eval bytes &&
  "$1" inspect bytes --threads 2 --device cpu && "$1" generate bytes --tokens 3
]] train --task bytes --data second.txt ${small} --out bytes)

# Resumed runs: what may change, what may not, and what a finished run does.
file(READ ${WORK}/elsewhere/bytes/log.jsonl log)
file(READ ${WORK}/elsewhere/bytes/config.toml config)
run(0 train --resume --out ${WORK}/elsewhere/bytes)
expect_out("has finished its 4 steps: nothing to do")
file(READ ${WORK}/elsewhere/bytes/log.jsonl log_after)
if(NOT log STREQUAL log_after)
  complain("resuming a finished run changed its log")
endif()
foreach(change "--model.dim;32" "--task;words" "--text.valid;0.1")  # its parameters may not fit
  list(GET change 0 option)
  expect_mistake("For a new run: coterie train --out FOLDER ${option}" train --resume
    --out ${WORK}/elsewhere/bytes --train.steps 8 ${change})
endforeach()
foreach(change "--seed;2" "--length;8" "--train.batch;8" "--attention;local(window=4)" "--optimizer.lr;0.1"
    "--schedule.warmup;3" "--train.dtype;bf16")
  list(GET change 0 option)
  expect_mistake("--init-from" train --resume --out ${WORK}/elsewhere/bytes --train.steps 8 ${change})
  expect_mistake("${option}" train --resume --out ${WORK}/elsewhere/bytes --train.steps 8 ${change})
endforeach()
run(0 train --resume --out ${WORK}/elsewhere/bytes --train.steps 6 --threads 2 --train.log-every 1
  --checkpoint.keep 1 --train.micro-batch 2)
expect_err("the run used 1 thread(s) until step 4 and uses 2 from there on")
file(STRINGS ${WORK}/elsewhere/bytes/log.jsonl resumed REGEX "\"kind\": *\"resume\"")
if(NOT resumed MATCHES "steps = 6")
  complain("the log does not have the config of the resumed run")
endif()
expect_mistake("; and " train --init-from ${WORK}/elsewhere/bytes --task bytes --data ${WORK}/second.txt ${small}
  --model.dim 32 --out ${WORK}/wider)  # a few tensors, not all
expect_mistake("expected a checkpoint or a run's folder" eval ${WORK}/second.txt)
expect_mistake("expected a whole number" train --length 1k5)
run(0 train --init-from ${WORK}/elsewhere/bytes --task bytes --data ${WORK}/second.txt ${small} --seed 5
  --optimizer.lr 0 --out ${WORK}/tuned)
run(0 eval ${WORK}/elsewhere/bytes)
number_in("[*] full +([0-9.]+)" trained)
run(0 eval ${WORK}/tuned)
number_in("[*] full +([0-9.]+)" copied)
if(NOT trained STREQUAL copied)
  complain("--init-from with rate 0 scores ${copied} instead of ${trained}")
endif()

# eval: every attention starts from the trained one, and all are checked first.
run(0 eval ${WORK}/tuned --attention "full(positions=none)" full)
string(REGEX MATCHALL "full +[0-9.]+" scores "${out}")
list(GET scores 0 own)
list(GET scores -1 again)
if(NOT own STREQUAL again)
  complain("full scores ${again} after full(positions=none), ${own} before")
endif()
expect_mistake("trained with full" eval ${WORK}/tuned --attention full "routing(clusters=2,window=4)")

run(0 eval ${WORK}/tuned --batches 1 --rows 2)
expect_out("(the first 1 of ")
run(0 eval ${WORK}/tuned --batches 1 --rows 2 --json)
string(JSON share ERROR_VARIABLE missing GET "${out}" share)
if(missing OR NOT share LESS 1)
  complain("share ${share} of the validation data")
endif()
run(0 eval ${WORK}/tuned --split test)
expect_out("bytes by frequency" "(of the validation data)")

# The label of a run whose layers all have another attention than --attention.
run(0 train --task bytes --data ${WORK}/second.txt ${small} --attention-at 0 "local(window=4)" --out ${WORK}/at)
expect_out("bytes with local(window=4)")
expect_err("bytes  local(window=4)")

# Options of other tasks, and too little text.
expect_mistake("--copy.symbols is an option of copy" train --task bytes --copy.symbols 3)
expect_mistake("--text.vocabulary is an option of tokens and words" train --task bytes --text.vocabulary 9)
expect_mistake("--data is an option of bytes and masked and tokens and words" train --task copy --data ${WORK}/second.txt)
file(MAKE_DIRECTORY ${WORK}/corpus)
file(CREATE_LINK loop ${WORK}/corpus/loop SYMBOLIC)
expect_mistake("cannot read ${WORK}/corpus/loop: " train --task bytes --data ${WORK}/corpus ${small})
file(WRITE ${WORK}/short.txt "0123456789012345678901234567890123456789")
expect_mistake("validation tokens" train --task bytes --data ${WORK}/short.txt ${small})

# Two processes in one folder: the second one names the first.
shell(2 [[
  "$@" --train.steps 100000 --out busy >busy.out 2>&1 &
  owner=$!
  for i in $(seq 500); do test -e busy/log.jsonl && break; sleep 0.02; done
  "$1" train --resume --out busy --train.steps 3; status=$?
  echo "owner $owner"
  kill -9 $owner
  exit $status
]] train --task bytes --data second.txt ${small})
string(REGEX MATCH "owner ([0-9]+)" match "${out}")
expect_err("is in use by process ${CMAKE_MATCH_1} on ")
run(0 train --resume --out ${WORK}/busy --train.steps 3)  # the lock ends with its process

# Signals: 130 and 143, a message, a checkpoint; also in a long step and in a long validation.
set(interrupt [[
  "$@" & child=$!
  for i in $(seq 3000); do test -s $folder/log.jsonl && break; sleep 0.02; done
  sleep 2
  start=$(date +%s)
  kill -$signal $child
  wait $child; status=$?
  echo "stopped after $(($(date +%s) - start)) s"
  exit $status
]])
foreach(signal INT TERM)
  set(code 130)
  if(signal STREQUAL TERM)
    set(code 143)
  endif()
  foreach(case "step;--train.batch;4;--train.steps;1000000" "long-step;--train.batch;6000;--model.layers;40;--train.steps;2"
      "validation;--train.batch;1;--train.steps;1;--train.eval-batches;0;--task;copy;--model.layers;40;--length;512")
    list(POP_FRONT case name)
    shell(${code} "signal=${signal}; folder=${signal}-${name}; ${interrupt}" train --task bytes ${small} ${case}
      --out ${signal}-${name})
    number_in("stopped after ([0-9]+) s" seconds)
    if(seconds GREATER 20)
      complain("took ${seconds} s to stop")
    endif()
    expect_err("again to quit now")
    expect_out("continue with: coterie train --out")
    string(REGEX MATCH "checkpoint ([^\n]+)" match "${out}")  # none before the first step has ended
    if(match AND NOT EXISTS ${WORK}/${CMAKE_MATCH_1})
      complain("there is no ${CMAKE_MATCH_1}")
    endif()
  endforeach()
endforeach()

# A terminal of 80 columns shows how far a training and a long validation are.
find_program(script script)
if(script)
  list(JOIN small " " words)
  set(arguments train --task copy ${small} --train.steps 3 --train.batch 1 --length 512 --model.layers 40 in a terminal)
  execute_process(COMMAND timeout -k 5 20 ${script} -qec "stty cols 80; exec ${PROGRAM} train --task copy ${words} \
    --train.steps 3 --train.batch 1 --length 512 --model.layers 40 --out ${WORK}/terminal" /dev/null
    OUTPUT_VARIABLE out ERROR_VARIABLE err INPUT_FILE /dev/null)
  string(REPLACE "\r" "\n" shown "${out}")
  foreach(part "copy  full" "tokens/s" " left" "validation [")
    string(FIND "${shown}" "${part}" at)
    if(at EQUAL -1)
      complain("no ${part} on the terminal")
    endif()
  endforeach()
endif()

# Not enough memory: one line with what to try.
shell(1 "ulimit -v 4000000; exec \"$@\"" train --task bytes --length 4096 --model.dim 256 --model.layers 8
  --train.batch 64 --threads 1 --out memory)
expect_err("not enough memory" "--train.micro-batch 32" "--model.recompute" "--length")
if(NOT err MATCHES "^coterie: [^\n]*\n$")
  complain("not one line on stderr")
endif()

# A dry run estimates the memory of the run, and writes nothing.
set(real --task bytes --length 512 --model.dim 128 --model.layers 2 --train.batch 16 --train.steps 6
  --train.eval-batches 2 --train.final-batches 2 --threads 1)
run(0 train ${real} --dry-run --out ${WORK}/real)
expect_out("parameters" "tokens/s" "for 6 steps")
number_in("memory +([0-9]+) MiB" estimate)
if(EXISTS ${WORK}/real)
  complain("a dry run wrote something")
endif()
run(0 train ${real} --out ${WORK}/real)
file(STRINGS ${WORK}/real/log.jsonl end REGEX "\"kind\": *\"end\"")
string(JSON peak GET "${end}" peak_memory_bytes)
math(EXPR peak "${peak} / 1048576")
math(EXPR low "${peak} * 8 / 10")
math(EXPR high "${peak} * 12 / 10")
if(estimate LESS low OR estimate GREATER high)
  complain("estimated ${estimate} MiB, used ${peak}")
endif()

# Help without a verb.
run(0)
expect_out("train" "bench")

finish()
