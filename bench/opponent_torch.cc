// SPDX-License-Identifier: MIT
// Torch's scaled_dot_product_attention on the CPU.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/headeronly/version.h>

#include <memory>

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

at::Tensor tensor_on(const TensorView& view) {
  return at::from_blob(view.data, at::IntArrayRef(view.sizes, view.rank),
                       at::IntArrayRef(view.strides, view.rank),
                       at::TensorOptions(scalar_type(view.dtype)));
}

class Sdpa {
 public:
  Sdpa(const AttentionData& data, bool causal)
      : q_(tensor_on(data.q)),
        k_(tensor_on(data.k)),
        v_(tensor_on(data.v)),
        grad_out_(tensor_on(data.grad_out)),
        causal_(causal),
        grouped_(data.problem.heads != data.problem.kv_heads),
        dtype_(data.problem.dtype) {
    at::set_num_threads(threads());
  }

  void forward() {
    const at::NoGradGuard no_grad;
    out_ = attend();
  }

  // The graph is made by the first call, a warm-up.
  void backward() {
    if (!graph_.defined()) {
      for (const at::Tensor& leaf : {q_, k_, v_}) leaf.set_requires_grad(true);
      graph_ = attend();
    }
    ::torch::autograd::grad({graph_}, {q_, k_, v_}, {grad_out_}, /*retain_graph=*/true);
  }

  TensorView output() {
    out_ = out_.contiguous();
    return TensorView::contiguous(out_.data_ptr(), dtype_,
                                  {out_.size(0), out_.size(1), out_.size(2), out_.size(3)});
  }

 private:
  at::Tensor attend() const {
    return at::scaled_dot_product_attention(q_, k_, v_, {}, 0.0, causal_, {}, grouped_);
  }

  at::Tensor q_, k_, v_, grad_out_, out_, graph_;
  bool causal_, grouped_;
  DType dtype_;
};

}  // namespace

std::vector<Opponent> make_opponents(const AttentionData& data, bool causal) {
  const auto sdpa = std::make_shared<Sdpa>(data, causal);
  return {{.name = opponent_name(),
           .forward = [sdpa] { sdpa->forward(); },
           .backward = [sdpa] { sdpa->backward(); },
           .output = [sdpa] { return sdpa->output(); }}};
}

std::string opponent_name() { return "torch sdpa"; }

std::string opponent_description() {
  return "torch " TORCH_VERSION ": scaled_dot_product_attention on the CPU";
}

}  // namespace coterie::bench
