// SPDX-License-Identifier: MIT
// The part of coterie export that needs torch.
#pragma once

#include <string>

namespace coterie::cli {

// `run`: a run's folder or a checkpoint. `attention` replaces that of all layers, if it is not
// empty.
void export_huggingface(const std::string& run, const std::string& attention,
                        const std::string& out);
extern const bool kExportsHuggingFace;  // false in a program built without torch

}  // namespace coterie::cli
