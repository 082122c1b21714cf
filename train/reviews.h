// SPDX-License-Identifier: MIT
// Film reviews of the Large Movie Review Dataset (IMDb) as JSON lines.
#pragma once

#include <string>
#include <vector>

#include "train/corpus.h"

namespace coterie::train {

struct Review {
  std::string text;
  bool positive = false;
};

// Lines with "text" and "label" of the file whose name has ".PART.jsonl" in it; `part` is "train"
// or "test". Throws an Error that names the line that is malformed.
std::vector<Review> read_reviews(const std::vector<CorpusFile>& files, const std::string& part);

}  // namespace coterie::train
