// SPDX-License-Identifier: MIT
// Files with one attention spec per layer, as coterie.calibrate and coterie approximate write them:
//
//   {"coterie_specs": 1, "layers": [{"name": "encoder.layer.0", "spec": "full"}, ...], ...}
//
// "name", the layer's module in Python, is optional: layers are in order. Other keys tell how the
// specs were found.
#pragma once

#include <string>
#include <vector>

namespace coterie::train {

// Whether an option's text names such a file and is not a spec.
bool is_spec_file(const std::string& text);

// The specs of all layers, parsed and found to be well formed. Throws Error.
std::vector<std::string> read_spec_file(const std::string& path);

}  // namespace coterie::train
