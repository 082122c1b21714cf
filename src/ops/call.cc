// SPDX-License-Identifier: MIT
#include "ops/call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "core/check.h"
#include "core/descriptor.h"
#include "core/items.h"
#include "coterie/runtime.h"

namespace coterie::ops {

namespace {

std::string text_of(const std::vector<std::int64_t>& sizes) {
  std::ostringstream text;
  text << '(';
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) text << (dim ? ", " : "") << sizes[dim];
  text << ')';
  return text.str();
}

void check_device(const char* op, const char* name, const TensorView& tensor, Device device) {
  COTERIE_CHECK(tensor.device == device, op, "expected ", name, " on ", describe(device),
                "; got it on ", describe(tensor.device));
}

bool same_view(const TensorView& a, const TensorView& b) {
  bool same = a.data == b.data && a.dtype == b.dtype && a.rank == b.rank;
  for (int dim = 0; same && dim < a.rank; ++dim)
    same = a.size(dim) == b.size(dim) && (a.size(dim) == 1 || a.stride(dim) == b.stride(dim));
  return same;
}

// Index lists hold int32.
void check_counts(const AttentionCall& call) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  COTERIE_CHECK(call.N <= kMost && call.S <= kMost, call.op, "expected at most ", kMost,
                " rows; got ", call.N, " queries and ", call.S, " keys");
}

// Checks q, k, v, heads, lengths and scale.
AttentionCall make_base_call(const char* op, const AttentionInputs& inputs, bool shared) {
  const TensorView &q = inputs.q, &v = inputs.v;
  check_rows(op, "q", q, 4, q.device);
  COTERIE_CHECK(is_floating(q.dtype), op, "expected q of type f32, f64, bf16 or f16; got ",
                dtype_name(q.dtype));
  check_rows(op, "v", v, 4, q.device);
  check_dtype(op, "v", v, q.dtype);
  AttentionCall call;
  call.op = op;
  call.inputs = inputs;
  if (shared) {
    COTERIE_CHECK(!inputs.k.present() || same_view(inputs.k, q), op,
                  "expected no k, or k = q, because the queries are the keys; got another k");
    call.k = q;
  } else {
    check_rows(op, "k", inputs.k, 4, q.device);
    check_dtype(op, "k", inputs.k, q.dtype);
    call.k = inputs.k;
  }
  call.B = q.size(0);
  call.H = q.size(1);
  call.N = q.size(2);
  call.Dk = q.size(3);
  call.S = v.size(2);
  call.Dv = v.size(3);
  call.value_heads = v.size(1);
  call.key_heads = shared ? call.H : call.value_heads;
  COTERIE_CHECK(call.H >= 1 && call.Dk >= 1 && call.Dv >= 1, op,
                "expected at least one head and one element per row; got q ", describe(q),
                " and v ", describe(v));
  check_shape(op, "k", call.k, {call.B, call.key_heads, call.S, call.Dk});
  check_shape(op, "v", v, {call.B, call.value_heads, call.S, call.Dv});
  COTERIE_CHECK(call.value_heads >= 1 && call.H % call.value_heads == 0, op,
                "expected the number of query heads to be a multiple of the number of key/value "
                "heads; got ",
                call.H, " and ", call.value_heads);
  COTERIE_CHECK(std::isfinite(inputs.scale), op, "expected a finite scale; got ", inputs.scale);
  call.scale = inputs.scale != 0 ? inputs.scale : 1.0 / std::sqrt(static_cast<double>(call.Dk));
  call.causal = inputs.causal;
  COTERIE_CHECK(inputs.dropout >= 0 && inputs.dropout < 1, op,
                "expected a dropout probability from 0 to below 1; got ", inputs.dropout);
  call.dropout = make_dropout(inputs.dropout_seed, inputs.dropout);
  call.dropout.part = inputs.part;
  call.dropout.heads = call.H;
  const CallPart& part = inputs.part;
  COTERIE_CHECK(part.first_item >= 0 && part.head_part >= 0 && part.head_part < part.head_parts, op,
                "expected a first item of at least 0 and a part of the heads below their number; "
                "got item ",
                part.first_item, " and part ", part.head_part, " of ", part.head_parts);
  for (const Sequences* sequences : {&inputs.q_sequences, &inputs.k_sequences})
    for (const TensorView* ints : {&sequences->lengths, &sequences->cu_seqlens})
      if (ints->present()) check_device(op, "lengths and cu_seqlens", *ints, q.device);
  call.device = q.device;
  if (call.device == Device::cpu) {
    const std::vector<Item> items = make_items(op, call.inputs);
    call.items = ItemList(items.data(), static_cast<std::int64_t>(items.size()));
  } else {
    check_items(op, call.inputs);
  }
  call.item_total = item_count(inputs.q_sequences, call.B);
  check_counts(call);
  return call;
}

void refuse(const AttentionCall& call, const char* name, const TensorView& tensor) {
  COTERIE_CHECK(!tensor.present(), call.op, name, " is not used by this operation; got ",
                describe(tensor));
}

// "routing, cast": mechanisms with this field in their state, or with a gradient of it.
std::string users_of(StateField field, bool gradients) {
  std::string names;
  for (const Descriptor& each : descriptors())
    for (const auto& own : each.state(each.defaults.mechanism, {}))
      if (own.field == field && (own.differentiable || !gradients))
        names += (names.empty() ? "" : ", ") + std::string(each.name);
  return names;
}

CallSizes<std::int64_t> sizes_of(const AttentionCall& call) {
  return {call.B,  call.H,         call.N,           call.S,           call.Dk,
          call.Dv, call.key_heads, call.value_heads, call.num_items(), call.device == Device::cuda};
}

// A tensor of the mechanism's state, or its gradient, with its name in messages.
struct StateView {
  StateField field;
  const char* name;
  const TensorView& tensor;
};

// Checks tensors against the descriptor: of its shape, or absent where it has no such field.
void check_state(const Mechanism& mechanism, const AttentionCall& call,
                 const std::vector<StateView>& views, bool gradients) {
  const DType accumulator = accumulator_dtype(call.inputs.q.dtype);
  const StateTensors<std::int64_t> fields =
      descriptor_of(mechanism).state(mechanism, sizes_of(call));
  for (const StateView& view : views) {
    const auto own = std::find_if(fields.begin(), fields.end(), [&](const auto& field) {
      return field.field == view.field && (field.differentiable || !gradients);
    });
    if (own == fields.end())
      COTERIE_CHECK(!view.tensor.present(), call.op, view.name, " is only used by ",
                    users_of(view.field, gradients), "; got ", describe(view.tensor));
    else if (view.tensor.present() || (own->required && !gradients))
      check_dense(call.op, gradients ? view.name : own->name, view.tensor, accumulator, own->sizes,
                  call.device);
  }
}

void check_mask(const Descriptor& mechanism, const AttentionCall& call) {
  const TensorView& mask = call.inputs.mask;
  if (!mask.present()) return;
  COTERIE_CHECK(mechanism.takes_mask, call.op,
                "a mask is not supported, because queries of a cluster share their keys; got one. "
                "Use lengths or cu_seqlens for padding");
  check_device(call.op, "mask", mask, call.device);
  check_dtype(call.op, "mask", mask, DType::u8);
  check_shape(call.op, "mask", mask, {call.B, call.H, call.N, call.S});
}

// For mechanisms in which a token is both query and key.
void check_self_attention(const AttentionCall& call) {
  for (const Item& item : call.items)
    COTERIE_CHECK(item.q.length == item.k.length, call.op,
                  "expected as many keys as queries in every sequence; got ", item.q.length,
                  " queries and ", item.k.length, " keys");
}

}  // namespace

void check_shape(const char* op, const char* name, const TensorView& tensor,
                 const std::vector<std::int64_t>& sizes) {
  bool equal = tensor.rank == static_cast<int>(sizes.size());
  for (int dim = 0; equal && dim < tensor.rank; ++dim)
    equal = tensor.size(dim) == sizes[static_cast<std::size_t>(dim)];
  COTERIE_CHECK(equal, op, "expected ", name, " of shape ", text_of(sizes), "; got ",
                describe(tensor));
}

void check_dtype(const char* op, const char* name, const TensorView& tensor, DType dtype) {
  COTERIE_CHECK(tensor.dtype == dtype, op, "expected ", name, " of type ", dtype_name(dtype),
                "; got ", describe(tensor));
}

void check_cpu(const char* op, const char* name, const TensorView& tensor) {
  check_device(op, name, tensor, Device::cpu);
}

void check_rows(const char* op, const char* name, const TensorView& tensor, int rank,
                Device device) {
  COTERIE_CHECK(tensor.rank == rank, op, "expected ", name, " with ", rank, " dimensions; got ",
                describe(tensor));
  check_device(op, name, tensor, device);
  COTERIE_CHECK(tensor.size(rank - 1) <= 1 || tensor.stride(rank - 1) == 1, op, "expected ", name,
                " with a contiguous last dimension; got stride ", tensor.stride(rank - 1));
  COTERIE_CHECK(tensor.data || tensor.count() == 0, op, "expected ", name,
                " to have memory; got a null pointer");
}

void check_dense(const char* op, const char* name, const TensorView& tensor, DType dtype,
                 const std::vector<std::int64_t>& sizes, Device device) {
  COTERIE_CHECK(tensor.present(), op, "expected ", name, " of shape ", text_of(sizes),
                "; got nothing");
  check_device(op, name, tensor, device);
  check_dtype(op, name, tensor, dtype);
  check_shape(op, name, tensor, sizes);
  COTERIE_CHECK(tensor.is_contiguous(), op, "expected ", name, " to be contiguous; got strides ",
                text_of({tensor.strides, tensor.strides + tensor.rank}));
  COTERIE_CHECK(tensor.data || tensor.count() == 0, op, "expected ", name,
                " to have memory; got a null pointer");
}

void check_saved(const AttentionCall& call, const SavedLayout& layout,
                 const std::vector<TensorView>& saved, std::size_t count) {
  COTERIE_CHECK(saved.size() >= count, call.op, "expected ", count,
                " saved tensors, as listed by attention_saved; got ", saved.size());
  for (std::size_t t = 0; t < count; ++t) {
    const TensorLayout& expected = layout.tensors[t];
    check_dense(call.op, ("saved tensor " + expected.name).c_str(), saved[t], expected.dtype,
                expected.sizes, call.device);
  }
}

void check_gradients(const Mechanism& mechanism, const AttentionCall& call,
                     const TensorView& grad_out, const AttentionGradients& gradients) {
  const DType dtype = call.inputs.q.dtype;
  const auto check = [&](const char* name, const TensorView& tensor,
                         const std::vector<std::int64_t>& sizes) {
    if (!tensor.present()) return;
    check_rows(call.op, name, tensor, 4, call.device);
    check_dtype(call.op, name, tensor, dtype);
    check_shape(call.op, name, tensor, sizes);
  };
  COTERIE_CHECK(grad_out.present(), call.op, "expected grad_out; got nothing");
  check("grad_out", grad_out, {call.B, call.H, call.N, call.Dv});
  check("dq", gradients.dq, {call.B, call.H, call.N, call.Dk});
  check("dv", gradients.dv, {call.B, call.value_heads, call.S, call.Dv});
  if (keys_are_queries(mechanism))
    COTERIE_CHECK(
        !gradients.dk.present(), call.op,
        "expected no dk, because the queries are the keys and dq is the gradient of both; got ",
        describe(gradients.dk));
  check("dk", gradients.dk, {call.B, call.key_heads, call.S, call.Dk});
  check_state(mechanism, call,
              {{StateField::centroids, "dcentroids", gradients.dcentroids},
               {StateField::gate, "dgate", gradients.dgate},
               {StateField::logit_scale, "dlogit_scale", gradients.dlogit_scale}},
              true);
  COTERIE_CHECK(!gradients.dlogit_scale.present() || call.inputs.logit_scale.present(), call.op,
                "dlogit_scale needs logit_scale; got no logit_scale");
}

AttentionCall make_call(const Mechanism& mechanism, const AttentionInputs& inputs) {
  const Descriptor& own = descriptor_of(mechanism);
  AttentionCall call = make_base_call(own.name, inputs, own.keys_are_queries(mechanism));
  call.causal = own.causality(mechanism, inputs.causal) != Causality::none;
  if (own.rows == RowForm::normalised && inputs.scale == 0) call.scale = 1.0;
  check_mask(own, call);
  check_state(mechanism, call,
              {{StateField::centroids, "centroids", inputs.centroids},
               {StateField::gate, "gate", inputs.gate},
               {StateField::logit_scale, "logit_scale", inputs.logit_scale}},
              false);
  if (own.self_attention(mechanism)) check_self_attention(call);
  return call;
}

int most_threads(const AttentionCall& call, std::int64_t keys) {
  constexpr double kWorkPerThread = 1 << 18;  // multiply-adds, about 30 us
  if (call.N > 1) return kMaxThreads;
  const double work = static_cast<double>(call.B * call.H) * static_cast<double>(keys) *
                      static_cast<double>(call.Dk + call.Dv);
  return static_cast<int>(std::clamp<double>(work / kWorkPerThread, 1, kMaxThreads));
}

SavedLayout saved_layout(const Mechanism& mechanism, const AttentionCall& call) {
  SavedLayout layout;
  const DType accumulator = accumulator_dtype(call.inputs.q.dtype);
  for (const auto& [name, kind, sizes] :
       descriptor_of(mechanism).saved(mechanism, sizes_of(call))) {
    layout.tensors.push_back({name, kind == SavedKind::value ? accumulator : DType::i32, sizes});
    if (kind == SavedKind::selection) ++layout.selection_count;
  }
  return layout;
}

AttentionCall make_part_call(const char* op, const AttentionInputs& inputs) {
  check_cpu(op, "q", inputs.q);
  AttentionCall call = make_base_call(op, inputs, false);
  refuse(call, "mask", inputs.mask);
  refuse(call, "centroids", inputs.centroids);
  refuse(call, "gate", inputs.gate);
  refuse(call, "logit_scale", inputs.logit_scale);
  return call;
}

}  // namespace coterie::ops
