// SPDX-License-Identifier: MIT
// All tasks; make_task in train/task.cc has their names. Each throws Error on an invalid config.
#pragma once

#include <memory>

#include "train/task.h"

namespace coterie::train {

std::unique_ptr<Task> make_copy_task(const Config& config);
std::unique_ptr<Task> make_recall_task(const Config& config);
std::unique_ptr<Task> make_bytes_task(const Config& config);
std::unique_ptr<Task> make_tokens_task(const Config& config);
std::unique_ptr<Task> make_words_task(const Config& config);

}  // namespace coterie::train
