# SPDX-License-Identifier: MIT
# The verb export, the task tokens and text from standard input.
#   cmake -DPROGRAM=build/full/bin/coterie [-DWORK=folder] -P tests/cli/export_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

run(0 export --help)
expect_out("--to" "csv|tensorboard|huggingface" "grad_norm" "strata.NAME" "Examples:")

string(REPEAT "the cat sat on the mat, and the other cat didn't\n" 400 text)
file(WRITE ${WORK}/text.txt "${text}")
set(small --length 16 --model.dim 16 --model.layers 1 --model.heads 2 --train.batch 4 --train.steps 4
  --train.log-every 2 --threads 1)
run(0 train --task tokens --text.vocabulary 300 --data ${WORK}/text.txt ${small} --out ${WORK}/run)
expect_out("tokens with full" "perplexity")

# CSV: a header, two steps and at least one evaluation.
run(0 export ${WORK}/run --to csv)
if(NOT out MATCHES "^kind,step,split,loss,metric,accuracy,lr,grad_norm,.*\nstep,2,,[0-9.]+,,,[0-9.e-]+,.*\neval,4,valid,[0-9.]+,[0-9.]+,")
  complain("not the table")
endif()
set(table "${out}")
string(REGEX MATCH "^[^\n]*" columns "${out}")
string(REPLACE "," ";" columns "${columns}")
run(0 export --help)
expect_out(${columns})  # the help explains every column
run(0 export ${WORK}/run --to csv --out ${WORK}/new/curves.csv)
expect_out("${WORK}/new/curves.csv")
file(READ ${WORK}/new/curves.csv written)
if(NOT written STREQUAL table)
  complain("the file differs from standard output")
endif()

# TensorBoard: exporting again replaces the file.
foreach(again 1 2)
  run(0 export ${WORK}/run --to tensorboard --out ${WORK}/board/)
endforeach()
file(GLOB events ${WORK}/board/*)
list(LENGTH events count)
if(NOT count EQUAL 1 OR NOT events MATCHES "/events\\.out\\.tfevents\\.[0-9]+\\.coterie$")
  complain("not one events file: ${events}")
endif()
file(READ ${events} start LIMIT 12 HEX)
if(NOT start STREQUAL "1800000000000000a37f4b22")
  complain("an events file does not begin with ${start}")
endif()

# Hugging Face.
run(0 export ${WORK}/run --to huggingface --out ${WORK}/hf)
expect_out("as GPTNeoXForCausalLM")
foreach(name config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json)
  if(NOT EXISTS ${WORK}/hf/${name})
    complain("no ${name}")
  endif()
endforeach()

# The exported tokenizer trains another model, whose tokenizer is the same.
run(0 train --task tokens --text.tokenizer ${WORK}/hf --data ${WORK}/text.txt ${small} --out ${WORK}/again)
run(0 export ${WORK}/again --to huggingface --out ${WORK}/hf-again)
execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${WORK}/hf/tokenizer.json
  ${WORK}/hf-again/tokenizer.json RESULT_VARIABLE differ)
if(differ)
  complain("the tokenizers differ")
endif()

expect_mistake("expected one of csv, tensorboard, huggingface; got \"xml\"" export ${WORK}/run --to xml)
expect_mistake("--to" export ${WORK}/run)
expect_mistake("expected a folder in --out" export ${WORK}/run --to tensorboard)
expect_mistake("with --to huggingface only" export ${WORK}/run --to csv --attention full)
expect_mistake("log.jsonl" export ${WORK}/missing --to csv)
expect_mistake("expected a checkpoint" export ${WORK}/missing --to huggingface --out ${WORK}/x)
expect_mistake("expected a new folder" export ${WORK}/run --to huggingface --out ${WORK}/new)
run(0 train --task bytes --attention "local(window=4)" --data ${WORK}/text.txt ${small} --out ${WORK}/local)
expect_mistake("layer 0 has \"local(window=4)\"" export ${WORK}/local --to huggingface --out ${WORK}/x)
run(0 export ${WORK}/local --to huggingface --attention full --out ${WORK}/x)
expect_mistake("either text.vocabulary" train --task tokens --text.vocabulary 300
  --text.tokenizer ${WORK}/hf --data ${WORK}/text.txt ${small} --out ${WORK}/y)
expect_mistake("expected a tokenizer.json" train --task tokens --text.tokenizer ${WORK}/board
  --data ${WORK}/text.txt ${small} --out ${WORK}/y)

# Text from standard input, plain and packed, is that of the file.
execute_process(COMMAND ${CMAKE_COMMAND} -E tar cJf ${WORK}/text.tar.xz text.txt WORKING_DIRECTORY ${WORK})
foreach(name run piped packed)
  if(NOT name STREQUAL "run")
    set(input ${WORK}/text.txt)
    if(name STREQUAL "packed")
      set(input ${WORK}/text.tar.xz)
    endif()
    set(arguments train --task tokens --text.vocabulary 300 --data - ${small} --out ${WORK}/${name})
    execute_process(COMMAND ${PROGRAM} ${arguments} INPUT_FILE ${input} RESULT_VARIABLE status
      OUTPUT_VARIABLE out ERROR_VARIABLE err)
    if(NOT status EQUAL 0)
      complain("exit status ${status}")
    endif()
  endif()
  file(STRINGS ${WORK}/${name}/log.jsonl lines REGEX "\"kind\":\"step\"")
  string(REGEX MATCHALL "\"loss\":[0-9.e-]+" losses_${name} "${lines}")
endforeach()
if(NOT losses_run STREQUAL losses_piped OR NOT losses_run STREQUAL losses_packed)
  complain("losses ${losses_run}, piped ${losses_piped}, packed ${losses_packed}")
endif()
# Standard input is not read again unless it is asked for: the run needs a file with the same text.
foreach(verb "eval;${WORK}/piped" "inspect;${WORK}/piped" "train;--resume;--train.steps;8;--out;${WORK}/piped")
  set(arguments ${verb})
  execute_process(COMMAND ${PROGRAM} ${verb} INPUT_FILE ${WORK}/text.txt RESULT_VARIABLE status
    OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT status EQUAL 2 OR NOT err MATCHES "^coterie: [^\n]*standard input[^\n]*\n$" OR NOT err MATCHES "--data FILE")
    complain("a run of standard input: exit status ${status}")
  endif()
  run(0 ${verb} --data ${WORK}/text.txt)
endforeach()
file(WRITE ${WORK}/other.txt "${text}another text")
expect_mistake("was trained on other data" train --resume --train.steps 9 --out ${WORK}/piped --data ${WORK}/other.txt)
set(arguments eval ${WORK}/packed --data -)
execute_process(COMMAND ${PROGRAM} ${arguments} INPUT_FILE ${WORK}/text.tar.xz RESULT_VARIABLE status
  OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT status EQUAL 0 OR NOT err STREQUAL "")
  complain("eval of standard input: exit status ${status}")
endif()
run(0 generate ${WORK}/packed --tokens 3)  # needs no data

set(arguments train --task bytes --data - ${small} --out ${WORK}/empty)
execute_process(COMMAND ${PROGRAM} ${arguments} INPUT_FILE /dev/null RESULT_VARIABLE status
  OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT status EQUAL 2 OR NOT err MATCHES "contains no text")
  complain("empty standard input: exit status ${status}")
endif()
execute_process(COMMAND ${PROGRAM} ${arguments} --data-limit 1k INPUT_FILE ${WORK}/text.txt
  RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT status EQUAL 2 OR NOT err MATCHES "expected at most 1k bytes")
  complain("large standard input: exit status ${status}")
endif()

finish()
