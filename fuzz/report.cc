// SPDX-License-Identifier: MIT
// Logs of runs and records of benchmarks, read and shown on a page.
#include "report/report.h"

#include <filesystem>
#include <fstream>

#include "fuzz/fuzz.h"

namespace {

// Next to the program; contains the input as a run's log.
std::string make_folder() {
  const std::string name = std::filesystem::read_symlink("/proc/self/exe").string() + ".folder";
  std::filesystem::create_directories(name);
  return name;
}

void consume(const std::string& input) {
  static const std::string folder = make_folder();
  const std::string log = folder + "/log.jsonl";
  std::ofstream(log, std::ios::binary) << input;
  coterie::train::make_report({.runs = {folder}, .bench = log, .title = "fuzz"});
}

const char* const kRun = R"json(
{"kind":"run","task":"copy","attention":"full","config":"length = 64\n","machine":{"cpu":"a","threads":2},"seed":7,"parameters":12,"metric":"accuracy","baselines":[{"name":"a guess","value":0.1}],"date":"2026-01-02"}
{"kind":"step","step":10,"loss":2.0,"tokens_per_s":1000,"seconds":1,"memory_bytes":1048576}
{"kind":"step","step":20,"loss":0.5,"tokens_per_s":900,"seconds":2,"memory_bytes":1048576}
{"kind":"eval","step":10,"split":"valid","metric":0.5,"strata":{"distance 9-16":0.1,"distance 1":0.9}}
{"kind":"clusters","step":20,"layers":[{"layer":0,"group":0,"attention":"clustered(clusters=2)","heads":[{"sizes":[3,1],"empty":0,"mass":0.5}]}]}
{"kind":"end","step":20,"reason":"steps","seconds":2.5,"peak_memory_bytes":3145728}
)json";

const char* const kBench = R"json(
{"kind":"run","device":"cpu","cpu":"a","pass":"both","heads":2,"dim":8}
{"kind":"measurement","attention":"full","opponent":true,"causal":false,"N":64,"threads":1,"forward_ms":{"median":1.5},"backward_ms":null,"speed":1,"error":0}
{"kind":"measurement","attention":"local(window=8)","causal":false,"N":128,"threads":1,"forward_ms":{"median":0.5},"speed":3.5,"error":1e-3,"workspace_bytes":8,"saved_bytes":8}
{"kind":"crossover","attention":"local(window=8)","causal":false,"threads":1,"N":96}
)json";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return coterie::fuzz::check_input(consume, data, size);
}

coterie::fuzz::Target coterie::fuzz::target() {
  return {.examples = {kRun, kBench, std::string(kRun) + kBench},
          .words = {"{", "}", "[", "]", ":", ",", "\"", "null", "true", "\\u0000", "\n", "1e308",
                    "\"kind\":\"step\"", "\"loss\":-1e308", "\"N\":0", "{\"kind\":\"run\"}\n",
                    "\"step\":9223372036854775807"}};
}
