// SPDX-License-Identifier: MIT
// Steps of a transformer block: checks, then the back end.
#include "coterie/block.h"

#include "core/block_rows.h"
#include "core/check.h"
#include "core/parallel.h"
#include "cpu/engine/block.h"
#include "cuda/api/entry.h"
#include "ops/call.h"

namespace coterie {
namespace {

using Sizes = std::vector<std::int64_t>;

bool is_narrow(DType dtype) { return is_floating(dtype) && dtype != DType::f64; }

void check_matrix(const char* op, const char* name, const TensorView& tensor, DType dtype) {
  COTERIE_CHECK(tensor.rank == 2 && tensor.size(1) > 0 && tensor.size(1) % 4 == 0, op, "expected ",
                name, " of shape (rows, width) with a width that is a multiple of 4; got ",
                describe(tensor));
  ops::check_dense(op, name, tensor, dtype, {tensor.size(0), tensor.size(1)}, tensor.device);
}

void check_norm_width(const char* op, const TensorView& x) {
  COTERIE_CHECK(x.size(1) <= kMaxNormWidth, op, "expected a width of at most ", kMaxNormWidth,
                "; got ", x.size(1));
}

// `tensor` may be absent.
void check_optional(const char* op, const char* name, const TensorView& tensor, DType dtype,
                    const Sizes& sizes, Device device) {
  if (tensor.present()) ops::check_dense(op, name, tensor, dtype, sizes, device);
}

void check_workspace(const char* op, const Workspace& workspace, std::int64_t bytes) {
  COTERIE_CHECK(workspace.bytes >= bytes && (bytes == 0 || workspace.data != nullptr), op,
                "expected a workspace of ", bytes, " bytes; got ", workspace.bytes);
}

}  // namespace

void add_norm(const AddNorm& in, const AddNormResult& result, const Workspace& workspace) {
  const char* op = "add_norm";
  check_matrix(op, "x", in.x, DType::f32);
  check_norm_width(op, in.x);
  const Device device = in.x.device;
  const Sizes shape = {in.x.size(0), in.x.size(1)}, row = {in.x.size(1)}, column = {in.x.size(0)};
  COTERIE_CHECK(is_narrow(result.out.dtype), op, "expected out of type f32, bf16 or f16; got ",
                describe(result.out));
  COTERIE_CHECK(in.branch.present() == result.y.present(), op,
                "expected y exactly if there is a branch");
  COTERIE_CHECK(in.branch.present() || !in.branch_bias.present(), op,
                "branch_bias is only used with a branch");
  check_optional(op, "branch", in.branch, result.out.dtype, shape, device);
  check_optional(op, "branch_bias", in.branch_bias, DType::f32, row, device);
  ops::check_dense(op, "gain", in.gain, DType::f32, row, device);
  ops::check_dense(op, "bias", in.bias, DType::f32, row, device);
  check_optional(op, "y", result.y, DType::f32, shape, device);
  ops::check_dense(op, "out", result.out, result.out.dtype, shape, device);
  ops::check_dense(op, "mean", result.mean, DType::f32, column, device);
  ops::check_dense(op, "scale", result.scale, DType::f32, column, device);
  if (in.x.count() == 0) return;
  if (device == Device::cuda) return cuda::add_norm(in, result, workspace);
  const CallThreads threads;
  cpu::add_norm(in, result);
}

std::int64_t add_norm_workspace_bytes(const ConstTensorView& y) {
  return norm_slices(y.size(0)) * 3 * y.size(1) * static_cast<std::int64_t>(sizeof(float));
}

void add_norm_backward(const AddNormBackward& in, const AddNormGradients& gradients,
                       const Workspace& workspace) {
  const char* op = "add_norm_backward";
  check_matrix(op, "y", in.y, DType::f32);
  check_norm_width(op, in.y);
  const Device device = in.y.device;
  const Sizes shape = {in.y.size(0), in.y.size(1)}, row = {in.y.size(1)}, column = {in.y.size(0)};
  COTERIE_CHECK(is_narrow(in.grad_out.dtype), op,
                "expected grad_out of type f32, bf16 or f16; got ", describe(in.grad_out));
  ops::check_dense(op, "mean", in.mean, DType::f32, column, device);
  ops::check_dense(op, "scale", in.scale, DType::f32, column, device);
  ops::check_dense(op, "gain", in.gain, DType::f32, row, device);
  check_optional(op, "grad_y", in.grad_y, DType::f32, shape, device);
  ops::check_dense(op, "grad_out", in.grad_out, in.grad_out.dtype, shape, device);
  ops::check_dense(op, "dx", gradients.dx, DType::f32, shape, device);
  check_optional(op, "dbranch", gradients.dbranch, in.grad_out.dtype, shape, device);
  check_optional(op, "dbranch_bias", gradients.dbranch_bias, DType::f32, row, device);
  check_optional(op, "dgain", gradients.dgain, DType::f32, row, device);
  check_optional(op, "dbias", gradients.dbias, DType::f32, row, device);
  check_workspace(op, workspace, add_norm_workspace_bytes(in.y));
  if (device == Device::cuda && in.y.count() > 0) {
    return cuda::add_norm_backward(in, gradients, workspace);
  }
  COTERIE_CHECK(in.y.count() > 0, op, "expected at least one row; got none");
  const CallThreads threads;
  cpu::add_norm_backward(in, gradients, static_cast<float*>(workspace.data));
}

void bias_gelu(const ConstTensorView& x, const ConstTensorView& bias, const TensorView& out,
               const Workspace& workspace) {
  const char* op = "bias_gelu";
  COTERIE_CHECK(is_narrow(x.dtype), op, "expected x of type f32, bf16 or f16; got ", describe(x));
  check_matrix(op, "x", x, x.dtype);
  check_optional(op, "bias", bias, DType::f32, {x.size(1)}, x.device);
  ops::check_dense(op, "out", out, x.dtype, {x.size(0), x.size(1)}, x.device);
  if (x.count() == 0) return;
  if (x.device == Device::cuda) return cuda::bias_gelu(x, bias, out, workspace);
  const CallThreads threads;
  cpu::bias_gelu(x, bias, out);
}

std::int64_t bias_gelu_workspace_bytes(const ConstTensorView& x) {
  return gelu_slices(x.size(0), x.size(1)) * x.size(1) * static_cast<std::int64_t>(sizeof(float));
}

void bias_gelu_backward(const ConstTensorView& x, const ConstTensorView& bias,
                        const ConstTensorView& grad_out, const TensorView& dx,
                        const TensorView& dbias, const Workspace& workspace) {
  const char* op = "bias_gelu_backward";
  COTERIE_CHECK(is_narrow(x.dtype), op, "expected x of type f32, bf16 or f16; got ", describe(x));
  check_matrix(op, "x", x, x.dtype);
  const Sizes shape = {x.size(0), x.size(1)};
  check_optional(op, "bias", bias, DType::f32, {x.size(1)}, x.device);
  ops::check_dense(op, "grad_out", grad_out, x.dtype, shape, x.device);
  ops::check_dense(op, "dx", dx, x.dtype, shape, x.device);
  check_optional(op, "dbias", dbias, DType::f32, {x.size(1)}, x.device);
  check_workspace(op, workspace, bias_gelu_workspace_bytes(x));
  COTERIE_CHECK(x.count() > 0, op, "expected at least one row; got none");
  if (x.device == Device::cuda) {
    return cuda::bias_gelu_backward(x, bias, grad_out, dx, dbias, workspace);
  }
  const CallThreads threads;
  cpu::bias_gelu_backward(x, bias, grad_out, dx, dbias, static_cast<float*>(workspace.data));
}

void sum_rows(const ConstTensorView& x, const TensorView& sums, const Workspace& workspace) {
  const char* op = "sum_rows";
  COTERIE_CHECK(is_narrow(x.dtype), op, "expected x of type f32, bf16 or f16; got ", describe(x));
  check_matrix(op, "x", x, x.dtype);
  ops::check_dense(op, "sums", sums, DType::f32, {x.size(1)}, x.device);
  check_workspace(op, workspace, bias_gelu_workspace_bytes(x));
  COTERIE_CHECK(x.count() > 0, op, "expected at least one row; got none");
  if (x.device == Device::cuda) return cuda::sum_rows(x, sums, workspace);
  const CallThreads threads;
  cpu::sum_rows(x, sums, static_cast<float*>(workspace.data));
}

}  // namespace coterie
