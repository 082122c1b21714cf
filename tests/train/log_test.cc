// SPDX-License-Identifier: MIT
#include "train/log.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "coterie/error.h"
#include "formats/files.h"
#include "temporary_folder.h"

namespace coterie::train {
namespace {

TEST(Log, ANewLogReplacesAnOldOne) {
  const TemporaryFolder folder;
  const std::string path = folder.path("log.jsonl");
  std::ofstream(path) << "old\n";
  const Log log(path, Log::kNew);
  log.write({{"kind", "step"}, {"step", 1}});
  EXPECT_EQ(read_file(path), "{\"kind\":\"step\",\"step\":1}\n");
}

TEST(Log, AResumedLogDropsLaterStepsEndsAndBrokenLines) {
  const TemporaryFolder folder;
  const std::string path = folder.path("log.jsonl");
  std::ofstream(path) << "{\"kind\":\"run\",\"seed\":1}\n{\"kind\":\"step\",\"step\":1}\n"
                      << "{\"kind\":\"eval\",\"step\":2}\n{\"kind\":\"end\",\"step\":2}\n"
                      << "{\"kind\":\"step\",\"step\":3}\n{\"kind\":\"step\",\"st";
  const Log log(path, 2);
  log.write({{"kind", "step"}, {"step", 3}, {"again", true}});
  EXPECT_EQ(read_file(path),
            "{\"kind\":\"run\",\"seed\":1}\n{\"kind\":\"step\",\"step\":1}\n"
            "{\"kind\":\"eval\",\"step\":2}\n{\"again\":true,\"kind\":\"step\",\"step\":3}\n");
}

TEST(Log, LinesThatAreNoObjectsOfALogAreDropped) {
  const TemporaryFolder folder;
  const std::string path = folder.path("log.jsonl");
  std::ofstream(path) << "[1]\n{\"kind\":3}\n{\"kind\":\"step\",\"step\":\"x\"}\n";
  const Log log(path, 2);
  EXPECT_EQ(read_file(path), "");
}

TEST(Log, AFolderThatIsNotThereIsAnError) {
  const TemporaryFolder folder;
  EXPECT_THROW(Log(folder.path("no/such/log.jsonl"), Log::kNew), Error);
}

}  // namespace
}  // namespace coterie::train
