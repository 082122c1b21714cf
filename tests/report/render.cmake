# SPDX-License-Identifier: MIT
# Renders a report in a real browser and checks it: all plots present, nothing wider than the page.
#   cmake -DPROGRAM=build/full/bin/coterie -P tests/report/render.cmake
cmake_minimum_required(VERSION 3.25)
if(NOT PROGRAM)
  message(FATAL_ERROR "expected -DPROGRAM=path of the program")
endif()
execute_process(COMMAND ${PROGRAM} report ${CMAKE_CURRENT_LIST_DIR} RESULT_VARIABLE status
  OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT status EQUAL 2 OR NOT err MATCHES "^coterie: .report. expected a run's folder[^\n]*\n$")
  message(FATAL_ERROR "a folder without runs: status ${status}\n${out}${err}")
endif()
find_program(CHROMIUM NAMES chromium chromium-browser google-chrome)
if(NOT CHROMIUM)
  message(STATUS "SKIP: chromium was not found; scripts/setup installs it")
  return()
endif()
string(RANDOM name)
set(WORK /tmp/coterie_report_test_${name})

# Writes the log of a run with some progress. `finish` is its last line, if any.
function(write_run folder task attention length config finish)
  string(CONCAT log "{\"kind\":\"run\",\"task\":\"${task}\",\"attention\":\"${attention}\","
    "\"config\":\"length = ${length}\\n${config}\",\"machine\":{\"cpu\":\"a processor with a long name\","
    "\"threads\":2},\"parameters\":103242,\"metric\":\"accuracy\",\"baselines\":[{\"name\":"
    "\"most frequent symbol\",\"value\":0.1}],\"seed\":1,\"date\":\"2026-01-02T03:04:05Z\"}\n")
  foreach(step RANGE 10 400 10)
    string(APPEND log "{\"kind\":\"step\",\"step\":${step},\"loss\":0.${step},\"tokens_per_s\":12345.6,"
      "\"seconds\":${step},\"memory_bytes\":${step}000000}\n")
  endforeach()
  foreach(step 100 200 300 400)
    string(APPEND log "{\"kind\":\"eval\",\"step\":${step},\"split\":\"valid\",\"metric\":0.${step},"
      "\"strata\":{\"distance 1\":0.9,\"distance 2-3\":0.8,\"distance 4-127\":0.${step}}}\n")
  endforeach()
  string(APPEND log "{\"kind\":\"clusters\",\"step\":400,\"layers\":[{\"layer\":0,\"group\":0,"
    "\"attention\":\"${attention}\",\"heads\":[{\"sizes\":[9,5,1,0],\"empty\":1,\"mass\":0.9},"
    "{\"sizes\":[5,5,5,5],\"empty\":0,\"mass\":0.99}]}]}\n${finish}")
  file(WRITE ${WORK}/runs/${folder}/log.jsonl "${log}")
endfunction()

set(finished "{\"kind\":\"end\",\"step\":400,\"reason\":\"steps\",\"seconds\":400}\n")
set(long "2*local(window=64)+2*routing(clusters=16,window=128,membership=nearest,causal=strict,queries_in=2)")
foreach(length 64 128)
  write_run(copy-${length}-full copy full ${length} "" "${finished}")
  foreach(clusters 4 8)
    foreach(family clustered i-clustered)
      write_run(copy-${length}-${family}-${clusters} copy "${family}(clusters=${clusters})" ${length} ""
        "${finished}")
    endforeach()
  endforeach()
endforeach()
write_run(a-folder-with-a-name-that-never-seems-to-end-and-has-no-space-to-break-at recall "${long}" 128
  "[recall]\\ncausal = true\\n" "")
write_run(words words "${long}" 128
  "data = \\\"/a/path/to/some/corpus/which/is/quite/far/down/in/the/folders/and/has/no/spaces.tar.xz\\\"\\n"
  "{\"kind\":\"end\",\"step\":400,\"reason\":\"interrupted\",\"seconds\":400}\nbroken")
set(bench "{\"kind\":\"run\",\"cpu\":\"a processor\",\"pass\":\"both\"}\n")
foreach(attention full "${long}" "i-clustered(clusters=256,topk=32,clustering=hamming-keys,iterations=10)")
  foreach(length 1024 4096 16384)
    string(APPEND bench "{\"kind\":\"measurement\",\"attention\":\"${attention}\",\"against\":\"full\","
      "\"causal\":false,\"N\":${length},\"forward_ms\":{\"median\":12.5},\"backward_ms\":{\"median\":25},"
      "\"speed\":1.${length},\"error\":0.01,\"workspace_bytes\":1048576,\"saved_bytes\":${length}}\n")
  endforeach()
endforeach()
file(WRITE ${WORK}/bench.jsonl "${bench}")

execute_process(COMMAND ${PROGRAM} report ${WORK}/runs --bench ${WORK}/bench.jsonl
  --out ${WORK}/report.html --title "A title that is long enough to need a second line on a telephone"
  RESULT_VARIABLE status OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT status EQUAL 0)
  file(REMOVE_RECURSE ${WORK})
  message(FATAL_ERROR "coterie report: status ${status}\n${out}${err}")
endif()

# The page as it is and with all details open, in frames as wide as a screen and a phone. A script
# outside the frames records the measurements.
file(READ ${WORK}/report.html page)
string(REPLACE "<details>" "<details open>" unfolded "${page}")
file(WRITE ${WORK}/unfolded.html "${unfolded}")
file(WRITE ${WORK}/look.html "<!DOCTYPE html><body style='margin:0'><script>
const wanted = [['report.html', 1280], ['report.html', 390], ['unfolded.html', 1280], ['unfolded.html', 390]];
for (const [file, width] of wanted) {
  const frame = document.createElement('iframe');
  frame.style = 'border:0;height:900px;width:' + width + 'px';
  frame.src = file;
  frame.onload = () => {
    const page = frame.contentDocument, root = page.scrollingElement;
    const scrolls = e => { const style = getComputedStyle(e).overflowX; return style == 'auto' || style == 'hidden'; };
    const inside = e => { for (let p = e.parentElement; p; p = p.parentElement) if (scrolls(p)) return true; return false; };
    const wide = [...page.body.querySelectorAll('*')].filter(e =>
      !(e instanceof frame.contentWindow.SVGElement) && !inside(e) && e.getBoundingClientRect().right > width + 0.5);
    const texts = [...page.querySelectorAll('figure svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(t => {
      const box = t.getBoundingClientRect(), all = svg.getBoundingClientRect();
      return all.width > 0 && (box.left < all.left - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1);
    }));
    const empty = [...page.querySelectorAll('svg path')].filter(p => p.getAttribute('d').length < 4);
    document.body.insertAdjacentHTML('beforeend', '<p>SE' + 'EN ' + [file, width,
      'scroll=' + root.scrollWidth, 'inner=' + frame.contentWindow.innerWidth, 'wide=' + wide.length,
      'cut=' + texts.length, 'figures=' + page.querySelectorAll('figure svg').length,
      'curves=' + page.querySelectorAll('path.curve').length, 'empty=' + empty.length,
      'tables=' + page.querySelectorAll('table').length].join(' ') + ' END</p>' +
      wide.concat(texts).slice(0, 5).map(e => '<p>OV' + 'ER ' + file + ' ' + width + ': ' + e.tagName + ' ' +
        e.textContent.slice(0, 60).replaceAll('<', ' ') + '</p>').join(''));
  };
  document.body.append(frame);
}
</script></body>")
execute_process(COMMAND ${CHROMIUM} --headless --no-sandbox --disable-gpu --allow-file-access-from-files
  --user-data-dir=${WORK}/profile --virtual-time-budget=10000 --window-size=1600,1000
  --dump-dom file://${WORK}/look.html
  RESULT_VARIABLE status OUTPUT_VARIABLE dom ERROR_VARIABLE err TIMEOUT 90)
file(REMOVE_RECURSE ${WORK})
if(NOT status EQUAL 0)
  message(FATAL_ERROR "chromium: ${status}\n${err}")
endif()

set(wrong)
string(REGEX MATCHALL "SEEN [^<]* END" seen "${dom}")
list(LENGTH seen count)
if(NOT count EQUAL 4)
  list(APPEND wrong "${count} pages were checked instead of 4")
endif()
foreach(line IN LISTS seen)
  string(REGEX MATCH "scroll=([0-9]+) inner=([0-9]+) wide=([0-9]+) cut=([0-9]+) figures=([0-9]+) curves=([0-9]+) empty=([0-9]+) tables=([0-9]+)"
    numbers "${line}")
  # Four plots each for copy (two lengths), recall and words, three grids, three of bench, and the heads.
  if(CMAKE_MATCH_1 GREATER CMAKE_MATCH_2 OR CMAKE_MATCH_3 GREATER 0)
    list(APPEND wrong "wider than the page: ${line}")
  endif()
  if(CMAKE_MATCH_4 GREATER 0)
    list(APPEND wrong "text cut at the edge of a plot: ${line}")
  endif()
  if(CMAKE_MATCH_5 LESS 22 OR CMAKE_MATCH_6 LESS 40 OR CMAKE_MATCH_8 LESS 6)
    list(APPEND wrong "plots or tables are missing: ${line}")
  endif()
  if(CMAKE_MATCH_7 GREATER 0)
    list(APPEND wrong "empty paths: ${line}")
  endif()
endforeach()
if(wrong)
  string(REGEX MATCHALL "OVER [^<]*" over "${dom}")
  list(JOIN wrong "\n  " wrong)
  list(JOIN over "\n  " over)
  message(FATAL_ERROR "The report does not look right:\n  ${wrong}\n  ${over}")
endif()
list(JOIN seen "\n" seen)
message(STATUS "${seen}")
