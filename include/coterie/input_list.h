// SPDX-License-Identifier: MIT
// The tensors of an attention call as one list, for tensor libraries that save and pass them so.
#pragma once

#include <cstddef>

#include "coterie/inputs.h"

namespace coterie {

// Places in the list. Gradients flow to those before kDifferentiable.
enum InputPlace : std::size_t {
  kQ,
  kK,
  kV,
  kCentroids,
  kGate,
  kLogitScale,
  kDifferentiable,
  kQLengths = kDifferentiable,
  kKLengths,
  kCuSeqlensQ,
  kCuSeqlensK,
  kMask,
  kInputs
};

// The inputs whose tensors are in `list`; view(list[place]) is a TensorView, absent if the tensor
// is. Scale, causal and seed have their defaults.
template <class List, class View>
AttentionInputs listed_inputs(const List& list, const View& view) {
  AttentionInputs inputs;
  inputs.q = view(list[kQ]);
  inputs.k = view(list[kK]);
  inputs.v = view(list[kV]);
  inputs.centroids = view(list[kCentroids]);
  inputs.gate = view(list[kGate]);
  inputs.logit_scale = view(list[kLogitScale]);
  inputs.q_sequences = {view(list[kQLengths]), view(list[kCuSeqlensQ])};
  inputs.k_sequences = {view(list[kKLengths]), view(list[kCuSeqlensK])};
  inputs.mask = view(list[kMask]);
  return inputs;
}

// Gradients, in the order of the tensors they belong to.
template <class List, class View>
AttentionGradients listed_gradients(const List& list, const View& view) {
  return {view(list[kQ]),         view(list[kK]),    view(list[kV]),
          view(list[kCentroids]), view(list[kGate]), view(list[kLogitScale])};
}

}  // namespace coterie
