// SPDX-License-Identifier: MIT
// All tasks; make_task in train/task.cc has their names. Each throws Error on an invalid
// config. `stored`: as in make_task; null for a new run.
#pragma once

#include <memory>

#include "train/task.h"

namespace coterie::train {

std::unique_ptr<Task> make_copy_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_recall_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_bytes_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_masked_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_tokens_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_words_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_listops_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_pathfinder_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_images_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_imdb_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_retrieval_task(const Config& config, const TaskFiles* stored);
std::unique_ptr<Task> make_speech_task(const Config& config, const TaskFiles* stored);

}  // namespace coterie::train
