// SPDX-License-Identifier: MIT
// Rotations of rows: checks, then the back end.
#include "coterie/positions.h"

#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "core/parallel.h"
#include "cpu/engine/rotate.h"
#include "cuda/api/entry.h"
#include "ops/call.h"

namespace coterie {

void rotate_rows(const TensorView& x, const Rotation& rotation, const TensorView& out,
                 const Workspace& workspace) {
  const char* op = "rotate_rows";
  ops::check_rows(op, "x", x, 4, x.device);
  COTERIE_CHECK(is_floating(x.dtype), op, "expected x of type f32, f64, bf16 or f16; got ",
                describe(x));
  COTERIE_CHECK(x.size(3) >= 2 && x.size(3) % 2 == 0, op,
                "expected rows of an even number of elements; got x ", describe(x));
  COTERIE_CHECK(rotation.base > 0 && std::isfinite(rotation.base), op,
                "expected a positive, finite base; got ", rotation.base);
  ops::check_rows(op, "out", out, 4, x.device);
  ops::check_dtype(op, "out", out, x.dtype);
  ops::check_shape(op, "out", out, {x.size(0), x.size(1), x.size(2), x.size(3)});
  if (x.count() == 0) return;
  if (x.device == Device::cuda) return cuda::rotate_rows(x, rotation, out, workspace);
  constexpr std::int64_t kFew = 1 << 12;  // elements: waking threads takes longer
  const CallThreads threads(x.count() < kFew ? 1 : kMaxThreads);
  dispatch_accumulator(
      x.dtype, [&](auto tag) { cpu::rotate_rows<typename decltype(tag)::type>(x, rotation, out); });
}

}  // namespace coterie
