// SPDX-License-Identifier: MIT
// coterie info: facts about this build and this machine.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "apps/commit.h"
#include "bench/attention.h"
#include "coterie/mechanism.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "verbs.h"

namespace coterie::cli {
namespace {

template <std::size_t... index>
std::vector<std::string> mechanism_names(std::index_sequence<index...>) {
  return {mechanism_name(Mechanism(std::in_place_index<index>))...};
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

void print_row(const char* what, const std::string& value) {
  fmt::print("{:<12}{}\n", what, value);
}

void print_devices() {
  const std::vector<CudaDevice> devices = cuda_devices();
  if (devices.empty()) print_row("devices", "no CUDA device");
  for (const CudaDevice& device : devices) {
    print_row("device", fmt::format("{}, sm_{}{}, {} multiprocessors, {:.0f} GiB", device.name,
                                    device.major, device.minor, device.multiprocessors,
                                    static_cast<double>(device.memory_bytes) / (1 << 30)));
  }
}

// The attentions that have GPU kernels, whether or not there is a GPU.
std::vector<std::string> attentions_on_cuda() {
  std::vector<std::string> names;
  for (const char* spec : {"full", "local(window=8)", "strided(stride=2)", "oracle-top",
                           "clustered(clusters=2)", "i-clustered(clusters=2)", "lsh",
                           "routing(clusters=2,window=8)", "cast(clusters=2,size=8)"}) {
    const bench::Entry entry = bench::make_entry(spec, false);
    const bench::Problem problem{.N = 64, .dtype = DType::bf16, .device = Device::cuda};
    const bool runs = bench::refusal(entry, problem).empty();
    if (runs) names.push_back(mechanism_name(entry.spec.groups[0].mechanism));
  }
  return names;
}

void print_info() {
  const BuildInfo build = build_info();
  std::vector<std::string> isas;
  for (const CpuIsa isa : supported_cpu_isas()) isas.push_back(cpu_isa_name(isa));
  print_row("coterie", build.version);
  print_row("commit", kCommit[0] == '\0' ? "unknown" : kCommit);
  print_row("compiler", fmt::format("{}, {}{}", build.compiler, build.build_type,
                                    build.asserts ? ", asserts" : ""));
  print_row("cuda", build.cuda_toolkit);
  print_row("cpu", cpu_model());
  print_row("isa", fmt::format("{} (in use: {})", joined(isas), cpu_isa_name(cpu_isa())));
  print_row("threads", std::to_string(threads()));
  print_devices();
  constexpr auto indices = std::make_index_sequence<std::variant_size_v<Mechanism>>();
  print_row("attention", joined(mechanism_names(indices)));
  const std::vector<std::string> on_cuda = attentions_on_cuda();
  print_row("on cuda", on_cuda.empty() ? "none" : joined(on_cuda));
}

}  // namespace

void add_info(CLI::App& program) {
  CLI::App* verb = program.add_subcommand("info", "Print version, build, CPU, devices, attentions");
  verb->callback(print_info);
}

}  // namespace coterie::cli
