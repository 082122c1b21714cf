// SPDX-License-Identifier: MIT
// Recorded speech with transcripts, from the files in which it is published:
//
//   AN4    etc/an4_{train,test}.fileids and .transcription, feat/**.mfc; every tenth speaker of the
//          training part is held out for validation
//   FSDD   DIGIT_SPEAKER_NUMBER.wav, 16 bit, one channel; numbers 0 to 4 are for testing, 5 to 9
//          for validation; the transcript is the digit's name
//
// Symbols of transcripts are counted from 1: A to Z and the blank between words, or the phones of
// etc/an4.dic in alphabetical order, of each word's first pronunciation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "train/config.h"
#include "train/task.h"

namespace coterie::train {

struct Utterance {
  at::Tensor features;                // (frames, kSpeechFeatures), float
  std::vector<std::int64_t> symbols;  // the transcript
};

struct Speech {
  std::vector<Utterance> parts[3];  // by Split
  DataFacts facts;
  std::int64_t symbols = 0;  // different ones
  std::int64_t space = 0;    // the one between words; 0: there is none

  const std::vector<Utterance>& operator[](Split split) const {
    return parts[static_cast<std::size_t>(split)];
  }
};

// The speech of config.data; throws an Error that names the file that is missing or malformed.
Speech read_speech(const Config& config);

}  // namespace coterie::train
