// SPDX-License-Identifier: MIT
#include "torch/src/bridge.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "coterie/error.h"
#include "tests/support/tensors.h"

namespace coterie::torch_api {
namespace {

TEST(Bridge, TypesGoThereAndBack) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64,
                            DType::u64, DType::u8}) {
    EXPECT_EQ(dtype_of(scalar_type_of(dtype)), dtype);
  }
  EXPECT_EQ(dtype_of(at::kBool), DType::u8);
  EXPECT_THROW(dtype_of(at::kComplexFloat), Error);
}

TEST(Bridge, ViewsShareMemoryAndStrides) {
  const at::Tensor x = at::zeros({2, 5, 3, 8}, at::kBFloat16).transpose(1, 2).slice(2, 1);
  const TensorView v = view(x);
  EXPECT_EQ(v.data, x.data_ptr());
  EXPECT_EQ(describe(v), "bf16 (2, 3, 4, 8)");
  EXPECT_EQ(v.stride(1), 8);
  EXPECT_EQ(v.stride(2), 24);
  EXPECT_FALSE(view(at::Tensor()).present());
  EXPECT_THROW(view(at::zeros({1, 1, 1, 1, 1, 1})), Error);
  EXPECT_THROW(view(at::zeros({2, 2}).to_sparse()), Error);
}

// The memory of a lazily negated view has the opposite sign; lazy zeros have no memory.
TEST(Bridge, ViewsRefuseTensorsWhoseValuesAreNotInMemory) {
  const at::Tensor negated = at::_neg_view(at::ones({2, 3}));
  const at::Tensor zeros = at::_efficientzerotensor({2, 3});
  EXPECT_EQ(test::error_of([&] { view(negated); }),
            "[torch] expected tensors whose memory holds their values; got a lazily negated view: "
            "call resolve_neg()");
  EXPECT_EQ(test::error_of([&] { view(zeros); }),
            "[torch] expected tensors whose memory holds their values; got a lazy zero tensor: "
            "call clone()");
  EXPECT_THROW(view(at::zeros({2}, at::kComplexFloat).conj()), Error);
  for (const at::Tensor& tensor : {negated, zeros}) {
    EXPECT_TRUE(at::equal(with_contiguous_rows(tensor), tensor));
    EXPECT_TRUE(view(with_contiguous_rows(tensor)).present());
  }
}

TEST(Bridge, ScratchIsAlignedForTheCore) {
  const Scratch scratch(100, at::zeros({1}));
  EXPECT_EQ(scratch.workspace().bytes, 100);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scratch.workspace().data) % 64, 0u);
  EXPECT_EQ(scratch.workspace().stream, nullptr);
}

TEST(Bridge, ScratchHasTheCurrentStreamOfTheDevice) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Tensor x = at::zeros({4}, at::kCUDA);
  EXPECT_EQ(view(x).device, Device::cuda);
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  const c10::Stream stream = cuda.getStreamFromGlobalPool(x.device());
  const c10::StreamGuard guard(stream);
  EXPECT_EQ(Scratch(64, x).workspace().stream, stream.native_handle());
}

}  // namespace
}  // namespace coterie::torch_api
