# SPDX-License-Identifier: MIT
# Text from a trained model: prompts, stop strings, samples, seeds, characters.
#   cmake -DPROGRAM=build/full/bin/coterie [-DWORK=folder] -P tests/cli/generate_test.cmake
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/program.cmake)

run(0 train --task bytes --length 64 --model.dim 32 --train.steps 80 --train.batch 4 --train.eval-batches 1
  --train.final-batches 1   --threads 1 --attention "2*local(window=8)+2*routing(clusters=4,window=8,share_qk=true)" --out ${WORK}/run)

# generate(arguments...) leaves the text in `out`.
macro(generate)
  run(0 generate ${WORK}/run ${ARGN})
endmacro()
macro(expect_equal text wanted)
  if(NOT "${text}" STREQUAL "${wanted}")
    complain("got \"${text}\" instead of \"${wanted}\"")
  endif()
endmacro()

# Equal seeds give equal texts; the text alone is on stdout, and nothing on stderr.
generate(--prompt "name" --tokens 60)
set(text "${out}")
if(NOT text MATCHES "^name")
  complain("the text does not begin with the prompt")
endif()
expect_equal("${err}" "")
generate(--prompt "name" --tokens 60)
expect_equal("${out}" "${text}")
generate(--prompt "name" --tokens 60 --seed 2)
if(out STREQUAL text)
  complain("another seed gives the same text")
endif()
foreach(threads 1 3)
  set(ENV{COTERIE_THREADS} ${threads})
  generate(--prompt "name" --tokens 60)
  expect_equal("${out}" "${text}")
endforeach()
unset(ENV{COTERIE_THREADS})

# Prompts from a file and from standard input, of several chunks.
file(WRITE ${WORK}/prompt.txt "name")
generate(--prompt-file ${WORK}/prompt.txt --tokens 60)
expect_equal("${out}" "${text}")
execute_process(COMMAND ${PROGRAM} generate ${WORK}/run --prompt-file - --tokens 60
  INPUT_FILE ${WORK}/prompt.txt RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err)
expect_equal("${status}" 0)
expect_equal("${out}" "${text}")
string(REPEAT "a b\n" 1500 long)
file(WRITE ${WORK}/long.txt "${long}")
generate(--prompt-file ${WORK}/long.txt --tokens 3 --stats)
string(LENGTH "${long}" size)
string(SUBSTRING "${out}" 0 ${size} start)
expect_equal("${start}" "${long}")
if(NOT err MATCHES "prompt: 6000 tokens in [0-9.]+ s, [0-9.]+[kM]? tokens/s\ngenerated: 3 tokens in [0-9.]+ s, ")
  complain("no speed on stderr")
endif()

# Samples: the first is the text of a single run.
generate(--prompt "name" --tokens 60 --samples 3)
string(LENGTH "--- sample 1 of 3 ---\n${text}--- sample 2 of 3 ---\nname" size)
string(SUBSTRING "${out}" 0 ${size} start)
expect_equal("${start}" "--- sample 1 of 3 ---\n${text}--- sample 2 of 3 ---\nname")
expect_out("--- sample 3 of 3 ---\nname")
set(samples "${out}")
generate(--prompt "name" --tokens 60 --samples 3)
expect_equal("${out}" "${samples}")

# Stop strings: the likeliest text of this model repeats itself. Any part of it is a stop, which is not shown.
generate(--prompt "name" --tokens 60 --temperature 0)
set(text "${out}")
string(SUBSTRING "${text}" 10 5 stop)
string(SUBSTRING "${text}" 4 -1 new)
string(FIND "${new}" "${stop}" at)
string(SUBSTRING "${new}" 0 ${at} new)
generate(--prompt "name" --tokens 60 --temperature 0 --stop "not in it" --stop "${stop}")
expect_equal("${out}" "name${new}\n")
generate(--prompt "name" --tokens 60 --temperature 0 --stop "${stop} and more")
expect_equal("${out}" "${text}")

# Characters: the euro sign of the prompt is complete although its bytes are tokens; a cut one is dropped or
# completed by the model; a byte of none is replaced.
generate(--prompt "5 €" --tokens 1)
if(NOT out MATCHES "^5 €")
  complain("the euro sign is not shown")
endif()
string(ASCII 255 byte)
file(WRITE ${WORK}/bytes.txt "a${byte}b")
generate(--prompt-file ${WORK}/bytes.txt --tokens 1)
if(NOT out MATCHES "^a�b")
  complain("a byte of no character is shown")
endif()
execute_process(COMMAND ${PROGRAM} generate ${WORK}/run --tokens 400 --temperature 9
  OUTPUT_FILE ${WORK}/random.txt RESULT_VARIABLE status)
expect_equal("${status}" 0)
find_program(iconv iconv)
if(iconv)
  execute_process(COMMAND ${iconv} -f UTF-8 -t UTF-8 ${WORK}/random.txt RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
  expect_equal("${status}" 0)
endif()

expect_mistake("use one of them" generate ${WORK}/run --prompt a --prompt-file ${WORK}/prompt.txt)
expect_mistake("no/such/prompt" generate ${WORK}/run --prompt-file ${WORK}/no/such/prompt)
file(WRITE ${WORK}/empty.txt "")
expect_mistake("the prompt is empty" generate ${WORK}/run --prompt-file ${WORK}/empty.txt)
expect_mistake("--samples" generate ${WORK}/run --samples 0)
expect_mistake("--out is for models of images" generate ${WORK}/run --out ${WORK}/text.png)

# Images: drawn into one file, equal for equal seeds; the report shows them.
file(MAKE_DIRECTORY ${WORK}/images)
file(WRITE ${WORK}/images/write.sh [[
for part in train t10k; do
  { printf '\0\0\10\3\0\0\0\170\0\0\0\4\0\0\0\4'; yes 'abcdefg' | head -c 1920; } >$part-images-idx3-ubyte
  { printf '\0\0\10\1\0\0\0\170'; yes | tr 'y\n' '\0\1' | head -c 120; } >$part-labels-idx1-ubyte
done
]])
execute_process(COMMAND sh write.sh WORKING_DIRECTORY ${WORK}/images)
run(0 train --task images --images.predict pixels --data ${WORK}/images --length 16 --model.dim 16 --train.steps 2
  --train.final-batches 1 --threads 1 --out ${WORK}/pixels)
expect_mistake("expected --out FILE.png" generate ${WORK}/pixels)
expect_mistake("--prompt is for text" generate ${WORK}/pixels --out ${WORK}/a.png --prompt a)
foreach(name a b)
  run(0 generate ${WORK}/pixels --samples 3 --out ${WORK}/${name}.png)
  file(SHA256 ${WORK}/${name}.png sum_${name})
endforeach()
expect_equal("${sum_a}" "${sum_b}")
run(0 generate ${WORK}/pixels --samples 3 --seed 2 --out ${WORK}/pixels/samples.png)
file(SHA256 ${WORK}/pixels/samples.png sum_b)
if(sum_a STREQUAL sum_b)
  complain("another seed gives the same images")
endif()
run(0 train --task pathfinder --length 256 --pathfinder.paddles 4 --model.dim 16 --train.steps 1 --train.eval-batches 1 --train.final-batches 1
  --threads 1 --attention "2*cast(clusters=4,size=64)+2*local(window=8)" --out ${WORK}/paths)
run(0 inspect ${WORK}/paths --picture ${WORK}/paths/clusters.png)
expect_mistake("expected a task whose tokens are an image" inspect ${WORK}/run --picture ${WORK}/c.png)
expect_mistake("the model has none" inspect ${WORK}/pixels --picture ${WORK}/c.png)
run(0 report ${WORK}/pixels ${WORK}/paths --out ${WORK}/report.html)
file(READ ${WORK}/report.html page)
string(REGEX MATCHALL "base64,iVBORw0KGgo" found "${page}")
list(LENGTH found count)
expect_equal("${count}" 2)
run(0 generate --help)
expect_out("--prompt-file" "--stop" "--samples" "Examples:")

finish()
