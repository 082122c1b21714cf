// SPDX-License-Identifier: MIT
// Mel-frequency cepstra of sound (Davis and Mermelstein 1980), 13 for each frame of 10 ms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace coterie::train {

constexpr std::int64_t kCepstra = 13, kSpeechFeatures = 3 * kCepstra;

// (frames, 13) of samples (n) at `rate` per second: windows of 25 ms, 26 mel bands up to half of
// the rate. Sound shorter than a window is filled up with zeros to one frame.
at::Tensor cepstra(const at::Tensor& samples, std::int64_t rate);

// (frames, 39) of cepstra: themselves, their slopes, and the slopes of these, over two frames to
// each side; every column then has mean 0 and variance 1.
at::Tensor speech_features(const at::Tensor& cepstra);

}  // namespace coterie::train
