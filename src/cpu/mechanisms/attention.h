// SPDX-License-Identifier: MIT
// The CPU back end: four functions per mechanism, for calls checked by src/ops and parameters from
// resolve(). `saved` contains the tensors of attention_saved in order.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "coterie/attention.h"

namespace coterie::cpu {

template <class Params>
std::int64_t workspace_bytes(const Params& params, const AttentionCall& call);

template <class Params>
void select(const Params& params, const AttentionCall& call, const std::vector<TensorView>& saved,
            const Workspace& workspace);

template <class Params>
void attend(const Params& params, const AttentionCall& call, const AttentionResult& result,
            const Workspace& workspace);

template <class Params>
void backward(const Params& params, const AttentionCall& call, const AttentionResult& result,
              const TensorView& grad_out, const AttentionGradients& gradients,
              const Workspace& workspace);

// Full, local and strided share one definition; the others have their own.
#define COTERIE_DECLARE(Params)                                                                 \
  template <>                                                                                   \
  std::int64_t workspace_bytes(const Params&, const AttentionCall&);                            \
  template <>                                                                                   \
  void select(const Params&, const AttentionCall&, const std::vector<TensorView>&,              \
              const Workspace&);                                                                \
  template <>                                                                                   \
  void attend(const Params&, const AttentionCall&, const AttentionResult&, const Workspace&);   \
  template <>                                                                                   \
  void backward(const Params&, const AttentionCall&, const AttentionResult&, const TensorView&, \
                const AttentionGradients&, const Workspace&);
COTERIE_DECLARE(OracleTopParams)
COTERIE_DECLARE(ClusteredParams)
COTERIE_DECLARE(ImprovedClusteredParams)
COTERIE_DECLARE(LshParams)
COTERIE_DECLARE(RoutingParams)
COTERIE_DECLARE(CastParams)
#undef COTERIE_DECLARE

}  // namespace coterie::cpu
