// SPDX-License-Identifier: MIT
// Rotations of rows on the GPU against the CPU's.
#include <gtest/gtest.h>

#include <cmath>

#include "coterie/positions.h"
#include "coterie/random.h"
#include "coterie/runtime.h"
#include "tests/gpu/device_tensor.h"

namespace coterie {
namespace {

using gpu_test::DeviceTensor;

HostTensor numbers(DType dtype, std::vector<std::int64_t> sizes) {
  HostTensor tensor(dtype, std::move(sizes));
  const RandomStream stream{7, RandomUse::data, 1};
  fill(tensor, [&](std::int64_t i) {
    return 4 * random_unit(stream.at(static_cast<std::uint64_t>(i)).word[0]) - 2;
  });
  return tensor;
}

// One unit in the last place: either side may round a sum of two products the other way. In f64 the
// angles, up to 17,345, are rounded too: two units of theirs.
double unit_of(DType dtype) {
  if (dtype == DType::f64) return 17345 * std::exp2(-51);
  if (dtype == DType::f32) return std::exp2(-21);
  return dtype == DType::bf16 ? std::exp2(-7) : std::exp2(-10);
}

TEST(PositionsGpuTest, RotatesRowsAsTheCpuDoes) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (const std::int64_t N : {1, 300, 5000})
      for (const std::int64_t D : {2, 6, 64, 130})
        for (const bool inverse : {false, true}) {
          // Tokens before heads in memory, and rows of more elements than are turned.
          const HostTensor memory = numbers(dtype, {2, N, 3, D + 2});
          const DeviceTensor on_gpu(memory.view());
          const auto rows = [&](const TensorView& all) {
            return all.transposed(1, 2).narrowed(3, 1, D);
          };
          const Rotation rotation{12345, 10000.0, inverse};
          const HostTensor expected(dtype, {2, 3, N, D});
          const DeviceTensor out(expected.view());
          rotate_rows(rows(on_gpu.view()), rotation, out.view());
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          rotate_rows(rows(memory), rotation, expected);
          const std::vector<double> a = read_values(out.download()), e = read_values(expected);
          for (std::size_t i = 0; i < e.size(); ++i)
            ASSERT_NEAR(a[i], e[i], unit_of(dtype) * (1 + std::abs(e[i])))
                << dtype_name(dtype) << " N " << N << " D " << D << " element " << i;
        }
}

TEST(PositionsGpuTest, RotatesInPlaceAndTakesNoRows) {
  if (!cuda_available()) GTEST_SKIP() << "no GPU";
  const HostTensor x = numbers(DType::f32, {2, 2, 70, 64}), none(DType::f32, {2, 0, 70, 64});
  const DeviceTensor in_place(x.view()), out(x.view()), from(x.view()), empty(none.view());
  rotate_rows(from.view(), {}, out.view());
  rotate_rows(in_place.view(), {}, in_place.view());
  rotate_rows(empty.view(), {}, empty.view());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(read_values(in_place.download()), read_values(out.download()));
}

}  // namespace
}  // namespace coterie
