// SPDX-License-Identifier: MIT
#include "bench_saved.h"

#include <cstring>

#include "coterie/error.h"
#include "formats/safetensors.h"

namespace coterie::cli {
namespace {

DType dtype_of(const std::string& path, const std::string& name) {
  if (name == "F32") return DType::f32;
  if (name == "F64") return DType::f64;
  if (name == "BF16") return DType::bf16;
  if (name == "F16") return DType::f16;
  throw Error("[bench] expected tensors of F32, F64, BF16 or F16 in " + path + "; got " + name);
}

// (B, heads, N, D); heads of one sequence may come without B.
HostTensor take(const std::string& path, const train::SafeTensors& file, const std::string& name) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) {
    throw Error("[bench] expected tensors q, k and v in " + path + "; " + name + " is missing");
  }
  const train::StoredTensor& stored = found->second;
  std::vector<std::int64_t> shape = stored.shape;
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  if (shape.size() != 4) {
    throw Error("[bench] expected " + name +
                " of shape (batch, heads, tokens, dim) or (heads, "
                "tokens, dim) in " +
                path + "; got " + std::to_string(shape.size()) + " dimensions");
  }
  for (const std::int64_t size : shape) {
    if (size < 1) throw Error("[bench] " + name + " in " + path + " is empty");
  }
  HostTensor tensor(dtype_of(path, stored.dtype), shape);
  std::memcpy(tensor.data<char>(), stored.bytes.data(), stored.bytes.size());
  return tensor;
}

}  // namespace

void use_saved_rows(const std::string& path, bench::Problem& problem) {
  const train::SafeTensors file = train::read_safetensors(path);
  const auto rows = std::make_shared<bench::SavedRows>(
      bench::SavedRows{take(path, file, "q"), take(path, file, "k"), take(path, file, "v")});
  const TensorView &q = rows->q, &k = rows->k, &v = rows->v;
  for (const TensorView& other : {k, v}) {
    const bool fits = other.size(0) == q.size(0) && other.size(1) == k.size(1) &&
                      other.size(2) == q.size(2) && other.size(3) == q.size(3);
    if (!fits) {
      throw Error("[bench] expected k and v with the batch, tokens and dim of q in " + path +
                  "; got q " + describe(q) + ", k " + describe(k) + " and v " + describe(v));
    }
  }
  problem.B = q.size(0);
  problem.heads = q.size(1);
  problem.kv_heads = k.size(1);
  problem.N = q.size(2);
  problem.D = q.size(3);
  problem.data = bench::DataKind::saved;
  problem.saved = rows;
}

}  // namespace coterie::cli
