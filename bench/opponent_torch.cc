// SPDX-License-Identifier: MIT
// Torch's scaled_dot_product_attention.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/headeronly/version.h>

#include <limits>
#include <memory>

#include "bench/device.h"
#include "bench/opponent.h"
#include "coterie/error.h"
#include "coterie/runtime.h"

namespace coterie::bench {
namespace {

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return at::kFloat;
    case DType::f64:
      return at::kDouble;
    case DType::bf16:
      return at::kBFloat16;
    case DType::f16:
      return at::kHalf;
    default:
      throw Error(std::string("[bench] expected a floating-point type; got ") + dtype_name(dtype));
  }
}

at::Device torch_device(Device device) {
  return device == Device::cpu ? at::Device(at::kCPU) : at::Device(at::kCUDA, 0);
}

at::Tensor tensor_on(const TensorView& view) {
  if (!view.present()) return {};
  return at::from_blob(
      view.data, at::IntArrayRef(view.sizes, view.rank), at::IntArrayRef(view.strides, view.rank),
      at::TensorOptions(scalar_type(view.dtype)).device(torch_device(view.device)));
}

// Back ends on a GPU; the settings do not affect the CPU.
enum class Backend : std::uint8_t { any, cudnn, flash, efficient, math };

const char* backend_name(Backend backend) {
  switch (backend) {
    case Backend::cudnn:
      return "cudnn";
    case Backend::flash:
      return "flash";
    case Backend::efficient:
      return "efficient";
    case Backend::math:
      return "math";
    case Backend::any:
      break;
  }
  return "any";
}

void allow_only(Backend backend) {
  const auto allowed = [&](Backend one) { return backend == Backend::any || backend == one; };
  at::Context& context = at::globalContext();
  context.setSDPUseCuDNN(allowed(Backend::cudnn));
  context.setSDPUseFlash(allowed(Backend::flash));
  context.setSDPUseMemEfficient(allowed(Backend::efficient));
  context.setSDPUseMath(allowed(Backend::math));
}

class Sdpa {
 public:
  Sdpa(const AttentionData& data, bool causal, Backend backend)
      : q_(tensor_on(data.q)),
        k_(tensor_on(data.k)),
        v_(tensor_on(data.v)),
        grad_out_(tensor_on(data.grad_out)),
        causal_(causal),
        grouped_(data.problem.heads != data.problem.kv_heads),
        backend_(backend),
        problem_(data.problem) {
    at::set_num_threads(threads());
  }

  std::string name() const {
    const std::string name = opponent_name();
    return backend_ == Backend::any ? name : name + " (" + backend_name(backend_) + ")";
  }

  void forward() {
    const at::NoGradGuard no_grad;
    out_ = attend();
  }

  // The first call, a warm-up, builds the graph.
  void backward() {
    if (!graph_.defined()) {
      for (const at::Tensor& leaf : {q_, k_, v_}) leaf.set_requires_grad(true);
      graph_ = attend();
    }
    ::torch::autograd::grad({graph_}, {q_, k_, v_}, {grad_out_}, /*retain_graph=*/true);
  }

  TensorView output() {
    out_ = out_.contiguous();
    return TensorView::contiguous(out_.data_ptr(), problem_.dtype,
                                  {out_.size(0), out_.size(1), out_.size(2), out_.size(3)},
                                  problem_.device);
  }

 private:
  at::Tensor attend() const {
    allow_only(backend_);
    return at::scaled_dot_product_attention(q_, k_, v_, {}, 0.0, causal_, {}, grouped_);
  }

  at::Tensor q_, k_, v_, grad_out_, out_, graph_;
  bool causal_, grouped_;
  Backend backend_;
  Problem problem_;
};

// The shortest of a few runs; infinite if the back end rejects the data; only the first run if that
// is far slower than `best`.
double trial_ms(Sdpa& sdpa, Pass pass, double best) {
  constexpr double kFar = 4, kFirstMs = 100;  // a first run includes loading and planning
  Contender passes{"", {}};
  if (pass != Pass::backward) passes.stages.push_back([&] { sdpa.forward(); });
  if (pass != Pass::forward) passes.stages.push_back([&] { sdpa.backward(); });
  const Stopwatch stopwatch = device_stopwatch();
  const auto fastest_ms = [&](const TimingPlan& plan) {
    return time_interleaved({passes}, plan, {}, stopwatch)[0].total.fastest_ms;
  };
  try {
    const double first = fastest_ms({.warmups = 0, .repeats = 1, .min_repeats = 1});
    if (first > kFar * best + kFirstMs) return first;
    return fastest_ms({.warmups = 0, .repeats = 10, .min_repeats = 1, .seconds = 0.5});
  } catch (const c10::Error&) {
    return std::numeric_limits<double>::infinity();
  }
}

// The unfused back end writes all logits; it is used only if no other accepts the data.
std::shared_ptr<Sdpa> fastest_on_gpu(const AttentionData& data, bool causal, Pass pass) {
  std::shared_ptr<Sdpa> fastest;
  double best = std::numeric_limits<double>::infinity();
  for (const Backend backend :
       {Backend::cudnn, Backend::flash, Backend::efficient, Backend::math}) {
    if (fastest && backend == Backend::math) break;
    auto sdpa = std::make_shared<Sdpa>(data, causal, backend);
    const double ms = trial_ms(*sdpa, pass, best);
    if (ms >= best) continue;
    best = ms;
    fastest = std::move(sdpa);
  }
  if (!fastest) throw Error("[bench] expected a back end of torch for these data; got none");
  return fastest;
}

}  // namespace

std::vector<Opponent> make_opponents(const AttentionData& data, bool causal, Pass pass) {
  const bool on_gpu = data.problem.device == Device::cuda;
  if (on_gpu && !at::hasCUDA()) return {};
  const std::shared_ptr<Sdpa> sdpa = on_gpu ? fastest_on_gpu(data, causal, pass)
                                            : std::make_shared<Sdpa>(data, causal, Backend::any);
  return {{.name = sdpa->name(),
           .forward = [sdpa] { sdpa->forward(); },
           .backward = [sdpa] { sdpa->backward(); },
           .output = [sdpa] { return sdpa->output(); },
           .set_threads = [](int count) { at::set_num_threads(count); }}};
}

std::optional<MatrixProduct> make_matrix_product(DType dtype) {
  if (!at::hasCUDA()) return std::nullopt;
  constexpr std::int64_t kSize = 8192;
  const auto options = at::TensorOptions(scalar_type(dtype)).device(torch_device(Device::cuda));
  const at::Tensor a = at::randn({kSize, kSize}, options), b = at::randn({kSize, kSize}, options);
  return MatrixProduct{[a, b] { at::matmul(a, b); }, 2.0 * kSize * kSize * kSize};
}

std::string opponent_name() { return "torch sdpa"; }

std::string opponent_description(Device device) {
  return std::string("torch " TORCH_VERSION ": scaled_dot_product_attention on the ") +
         (device == Device::cpu ? "CPU" : "GPU, its fastest back end");
}

}  // namespace coterie::bench
