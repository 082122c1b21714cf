// SPDX-License-Identifier: MIT
#include "train/profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <unordered_map>

#include "train/readback.h"

namespace coterie::train {
namespace {

using ::torch::autograd::profiler::KinetoEvent;

// Kinds of Kineto's events on a GPU; the others are ranges that span several of them.
constexpr std::uint8_t kGpuCopy = 3, kGpuFill = 4, kGpuKernel = 5;
constexpr std::uint8_t kOperation = 0, kScope = 1;

struct Pattern {
  const char* text;
  const char* part;
};

// The first that occurs in a name counts.
constexpr Pattern kPatterns[] = {
    {"rotate_", "rotary positions"},
    {"add_norm", "layer norm"},
    {"gelu_rows", "GELU"},
    {"add_slices", "sums"},
    {"add_statistics", "centroids"},
    {"add_parts", "centroids"},
    {"take_mean", "centroids"},
    {"move_", "centroids"},
    {"add_differences", "centroids"},
    {"add_gradients", "centroids"},
    {"coterie::", "attention"},
    {"AttentionFunction", "attention"},
    {"flash", "attention"},
    {"fmha", "attention"},
    {"sdpa", "attention"},
    {"cudnn", "attention"},
    {"scaled_dot_product", "attention"},
    {"gemm", "matrix products"},
    {"nvjet", "matrix products"},
    {"cutlass", "matrix products"},
    {"splitK", "matrix products"},
    {"aten::mm", "matrix products"},
    {"aten::addmm", "matrix products"},
    {"aten::bmm", "matrix products"},
    {"ayer_norm", "layer norm"},
    {"ayerNorm", "layer norm"},
    {"GammaBeta", "layer norm"},
    {"elu", "GELU"},
    {"multi_tensor_apply", "optimiser"},
    {"oft", "loss"},  // softmax
    {"SoftMax", "loss"},
    {"nll_loss", "loss"},
    {"cross_entropy", "loss"},
    {"mbedding", "embedding"},
    {"copy", "casts and copies"},
    {"Memcpy", "casts and copies"},
    {"CatArray", "casts and copies"},
    {"Memset", "zeros"},
    {"FillFunctor", "zeros"},
    {"reduce_kernel", "sums"},
    {"aten::sum", "sums"},
    {"elementwise", "other elementwise"},
};

struct Span {
  std::int64_t first = 0, last = 0;
};

bool contains(const std::vector<Span>& spans, std::int64_t time) {
  return std::any_of(spans.begin(), spans.end(),
                     [time](const Span& span) { return span.first <= time && time <= span.last; });
}

// What the host did, to find the part of kernels whose names do not tell.
struct HostSide {
  std::vector<Span> optimizer;
  std::unordered_map<std::uint64_t, std::int64_t> start;  // of an operation by correlation

  explicit HostSide(const std::vector<KinetoEvent>& events) {
    for (const KinetoEvent& event : events) {
      if (event.deviceType() != c10::DeviceType::CPU) continue;
      const auto first = static_cast<std::int64_t>(event.startNs());
      if (event.activityType() == kOperation) start[event.correlationId()] = first;
      if (event.name() == "optimizer") {
        optimizer.push_back({first, static_cast<std::int64_t>(event.endNs())});
      }
    }
  }

  bool in_optimizer(const KinetoEvent& event) const {
    const auto found = start.find(event.linkedCorrelationId());
    return found != start.end() && contains(optimizer, found->second);
  }
};

// Sums over all steps, by name.
struct Totals {
  struct Total {
    std::int64_t ns = 0, calls = 0;
  };
  std::map<std::string, Total> parts, kernels;

  void add(const std::string& part, const std::string& name, std::int64_t ns) {
    for (Total* total : {&parts[part], &kernels[name]}) {
      total->ns += ns;
      total->calls += 1;
    }
  }

  static std::vector<ProfileRow> rows(const std::map<std::string, Total>& totals, int steps) {
    std::vector<ProfileRow> rows;
    for (const auto& [name, total] : totals) {
      rows.push_back({name, static_cast<double>(total.ns) * 1e-6 / steps,
                      static_cast<double>(total.calls) / steps});
    }
    std::stable_sort(rows.begin(), rows.end(), [](const ProfileRow& a, const ProfileRow& b) {
      return a.milliseconds > b.milliseconds;
    });
    return rows;
  }
};

Totals gpu_totals(const std::vector<KinetoEvent>& events) {
  const HostSide host(events);
  Totals totals;
  std::int64_t first = 0, last = 0, busy = 0;
  for (const KinetoEvent& event : events) {
    const std::uint8_t kind = event.activityType();
    if (event.deviceType() == c10::DeviceType::CPU) continue;
    if (kind != kGpuCopy && kind != kGpuFill && kind != kGpuKernel) continue;
    const auto begin = static_cast<std::int64_t>(event.startNs());
    const auto end = static_cast<std::int64_t>(event.endNs());
    first = first == 0 ? begin : std::min(first, begin);
    last = std::max(last, end);
    busy += end - begin;
    const std::string name = event.name();
    totals.add(host.in_optimizer(event) ? "optimiser" : profile_part(name), name, end - begin);
  }
  // Kernels that overlap count in full each.
  totals.parts["idle"].ns = std::max<std::int64_t>(0, last - first - busy);
  return totals;
}

// Own times of the operations of each thread: their time less that of operations inside them.
Totals cpu_totals(const std::vector<KinetoEvent>& events) {
  struct Open {
    const KinetoEvent* event;
    std::int64_t own;
  };
  std::map<std::uint64_t, std::vector<const KinetoEvent*>> threads;
  for (const KinetoEvent& event : events) {
    const std::uint8_t kind = event.activityType();
    if (kind != kOperation && kind != kScope) continue;
    threads[event.startThreadId()].push_back(&event);
  }
  Totals totals;
  for (auto& [thread, own] : threads) {
    std::stable_sort(own.begin(), own.end(), [](const KinetoEvent* a, const KinetoEvent* b) {
      return a->startNs() != b->startNs() ? a->startNs() < b->startNs() : a->endNs() > b->endNs();
    });
    std::vector<Open> open;
    const auto close = [&] {
      const Open last = open.back();
      open.pop_back();
      bool optimizer = last.event->name() == "optimizer";
      for (const Open& outer : open) optimizer = optimizer || outer.event->name() == "optimizer";
      const std::string name = last.event->name();
      totals.add(optimizer ? "optimiser" : profile_part(name), name, last.own);
    };
    for (const KinetoEvent* event : own) {
      while (!open.empty() && open.back().event->endNs() <= event->startNs()) close();
      const auto duration = static_cast<std::int64_t>(event->durationNs());
      if (!open.empty()) open.back().own -= duration;
      open.push_back({event, duration});
    }
    while (!open.empty()) close();
  }
  return totals;
}

}  // namespace

std::string profile_part(const std::string& name) {
  for (const Pattern& pattern : kPatterns) {
    if (name.find(pattern.text) != std::string::npos) return pattern.part;
  }
  return "other";
}

StepProfile profile_steps(int steps, c10::Device device, const std::function<void()>& step) {
  using ::torch::profiler::impl::ActivityType;
  using ::torch::profiler::impl::ProfilerConfig;
  using ::torch::profiler::impl::ProfilerState;
  const ProfilerConfig config(ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (!device.is_cpu()) activities.insert(ActivityType::CUDA);
  ::torch::autograd::profiler::prepareProfiler(config, activities);
  ::torch::autograd::profiler::enableProfiler(config, activities);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) step();
  synchronise(device);  // kernels of the last step would be missing
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const auto result = ::torch::autograd::profiler::disableProfiler();
  const Totals totals =
      device.is_cpu() ? cpu_totals(result->events()) : gpu_totals(result->events());
  return {seconds.count() * 1e3 / steps, Totals::rows(totals.parts, steps),
          Totals::rows(totals.kernels, steps)};
}

}  // namespace coterie::train
