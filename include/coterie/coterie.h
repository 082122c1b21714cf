// SPDX-License-Identifier: MIT
// Everything the core library offers.
#pragma once

#include "coterie/attention.h"
#include "coterie/block.h"
#include "coterie/choice.h"
#include "coterie/error.h"
#include "coterie/input_list.h"
#include "coterie/inputs.h"
#include "coterie/kmeans.h"
#include "coterie/layer.h"
#include "coterie/mechanism.h"
#include "coterie/params.h"
#include "coterie/passes.h"
#include "coterie/positions.h"
#include "coterie/quality.h"
#include "coterie/random.h"
#include "coterie/result.h"
#include "coterie/routing.h"
#include "coterie/runtime.h"
#include "coterie/spec.h"
#include "coterie/tensor.h"
#include "coterie/view.h"
