# SPDX-License-Identifier: MIT
# The verbs train and eval: a first run, its files, and a user's mistakes.
#   cmake -DPROGRAM=build/full/bin/coterie [-DWORK=folder] -P tests/cli/train_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

run(0 train --help)
expect_out("--task" "--attention-at" "--model.dim" "--optimizer.lr" "--schedule.warmup"
  "--checkpoint.every" "--config" "--resume" "Examples:" "coterie help spec")
run(0 eval --help)
expect_out("--attention" "--split" "--beam" "--json" "Examples:")

# A small model learns visibly in seconds.
set(options --task copy --length 18 --copy.symbols 4 --model.dim 32 --model.layers 1 --model.embedding-std 0.5
  --train.eval-every 100 --train.log-every 1 --train.batch 16 --threads 1)
string(TIMESTAMP start %s)
run(0 train ${options} --train.steps 300 --out ${WORK}/run)
string(TIMESTAMP end %s)
expect_out("copy with full: 300 of 300 steps" "on all validation data" "a guess 0.25"
  "checkpoint ${WORK}/run/checkpoints/step-00000300")
if(NOT err MATCHES "step 1/300  loss .*step 300/300  loss ")
  complain("no progress on stderr")
endif()
string(REGEX MATCHALL "\n" lines "${err}")
list(LENGTH lines count)
if(count GREATER 15)
  complain("${count} lines of progress")
endif()
file(STRINGS ${WORK}/run/log.jsonl lines)
set(losses)
foreach(line IN LISTS lines)
  string(JSON kind GET "${line}" kind)
  if(kind STREQUAL "step")
    string(JSON loss GET "${line}" loss)
    list(APPEND losses ${loss})
  endif()
endforeach()
list(GET losses 0 first)
list(GET losses -1 last)
if(NOT last LESS 0.3 OR NOT first GREATER 1.2)
  complain("the loss went from ${first} to ${last}")
endif()

# Config files: the file that a run wrote reproduces the run; the command line takes precedence.
run(0 train --config ${WORK}/run/config.toml --train.steps 3 --out ${WORK}/other)
file(STRINGS ${WORK}/other/config.toml steps REGEX "^steps = 3$")
if(NOT steps)
  complain("the command line does not take precedence over the file")
endif()
file(WRITE ${WORK}/wrong.toml "[model]\nwidth = 3\n")
expect_mistake("line 2: expected one of model.dim" train --config ${WORK}/wrong.toml)

# Without --out the run goes to a new numbered folder.
execute_process(COMMAND ${PROGRAM} train ${options} --train.steps 2 WORKING_DIRECTORY ${WORK}
  RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT status EQUAL 0 OR NOT EXISTS ${WORK}/runs/copy-full-1/log.jsonl)
  complain("no runs/copy-full-1")
endif()

# Trained with one attention, evaluated with others.
run(0 eval ${WORK}/run --attention "clustered(clusters=2)" "i-clustered(clusters=9,topk=32)"
  --batches 2)
expect_out("accuracy" "loss" "* full " "  clustered(clusters=2) "
  "  i-clustered(clusters=9) " "* trained with this attention" "a guess 0.25")
run(0 eval ${WORK}/run/checkpoints/step-00000300 --attention "local(window=4)" --split test --json)
string(REGEX MATCHALL "[^\n]+" lines "${out}")
list(LENGTH lines count)
if(NOT count EQUAL 2)
  complain("${count} lines of JSON instead of 2")
endif()
foreach(line IN LISTS lines)
  foreach(key attention trained split metric loss accuracy seconds strata)
    string(JSON value ERROR_VARIABLE error GET "${line}" ${key})
    if(error)
      complain("no ${key} in ${line}")
    endif()
  endforeach()
endforeach()

# Shared queries and keys with fewer key/value heads: training to its end, inspection, generation.
set(shared --task bytes --length 32 --model.dim 32 --model.kv-heads 2 --train.steps 2 --train.batch 4
  --train.eval-batches 1 --threads 1)
run(0 train ${shared} --attention "routing(clusters=4,window=8,causal=strict,share_qk=true)" --out ${WORK}/routing)
run(0 inspect ${WORK}/routing)
expect_out("routing")
run(0 generate ${WORK}/routing --prompt "a" --tokens 4)
run(0 train ${shared} --attention "lsh(chunk=8,buckets=4)" --out ${WORK}/lsh)
run(0 inspect ${WORK}/lsh)
expect_out("lsh")
foreach(name routing lsh)
  file(STRINGS ${WORK}/${name}/log.jsonl ends REGEX "\"kind\": *\"end\"")
  if(NOT ends)
    complain("no end line in the log of ${name}")
  endif()
endforeach()

# Masked bytes: a model with rotary positions in half of its heads, evaluated with another attention per head group.
set(masked --task masked --length 64 --model.dim 32 --model.layers 1 --train.steps 3 --train.batch 4
  --train.eval-batches 1 --train.final-batches 1 --threads 1)
run(0 train ${masked} --masked.share 0.2 --attention "2*full+2*full(positions=none)" --out ${WORK}/masked)
expect_out("bits per masked byte" "bytes by frequency")
run(0 eval ${WORK}/masked --batches 1 --attention "2*local(window=16)+2*i-clustered(clusters=8,topk=4)"
  "2*i-clustered(clusters=8,topk=4,near=8,positions=rotary)+2*i-clustered(clusters=8,topk=4)"
  "2*clustered(clusters=8,near=8,positions=rotary)+2*full(positions=none)")
expect_out("* 2*full" "near=8,positions=rotary)+2*i-clustered(clusters=8,topk=4) " "outside tables" "in tables")
run(0 inspect ${WORK}/masked)
expect_out("full")
run(0 report ${WORK}/masked --out ${WORK}/masked.html)
run(0 inspect ${WORK}/masked --rows 2 --save-rows ${WORK}/rows)
expect_out("${WORK}/rows/layer-00-group-0.safetensors" "${WORK}/rows/layer-00-group-1.safetensors")
run(0 bench --data ${WORK}/rows/layer-00-group-0.safetensors --alone --repeats 1
  --attention full "i-clustered(clusters=8,topk=4,near=8)")
expect_out("near=8")
expect_mistake("masked.share above 0" train ${masked} --masked.share 0)
expect_mistake("--masked.share is an option of masked" train --task bytes --masked.share 0.5)
expect_mistake("expected a task with text" generate ${WORK}/masked --prompt "a")

expect_mistake("--resume" train ${options} --out ${WORK}/run)
expect_mistake("expected --out" train --resume)
expect_mistake("no config.toml" train --resume --out ${WORK}/nothing)
expect_mistake("expected one of copy, recall" train --task sing)
expect_mistake("did you mean \"full\"?" train --attention fulll)
expect_mistake("expected layers of --attention-at" train --attention-at 7 full)
expect_mistake("--model.dim" train --model.dim 0)
expect_mistake("--threads" train --threads 1025)
expect_mistake("--threads" compare --threads 1025)
expect_mistake("--schedule.decay" train --schedule.decay linear)
expect_mistake("see coterie train --help" train --frobnicate)
expect_mistake("no/such/run" eval ${WORK}/no/such/run)
expect_mistake("did you mean" eval ${WORK}/run --attention fulll)
expect_mistake("--split" eval ${WORK}/run --split train)
run(0 info)
if(out MATCHES "no CUDA device")
  expect_mistake("expected a CUDA device" train --device cuda --out ${WORK}/cuda)
endif()

finish()
