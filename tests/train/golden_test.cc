// SPDX-License-Identifier: MIT
// Stored losses of a fixed seed, to detect changes of the data, the model, its initialisation or
// the optimiser. Between instruction sets (of the core and of torch) they differ by 5e-7; the
// tolerance is 200 times that.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/runs.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

struct Golden {
  std::string task, attention;
  std::vector<double> losses;  // of steps 1, 10 and 20
};

TEST(Golden, LossesOfAFixedSeedAreAsStored) {
  constexpr double kTolerance = 1e-4;
  const std::vector<Golden> goldens = {
      {"copy", "full", {2.699755, 2.456055, 2.411848}},
      {"copy", "i-clustered(clusters=4,topk=8)", {2.697330, 2.455448, 2.412267}},
      {"recall",
       "routing(clusters=2,window=16,decay=0.999,commitment=1e-4)",
       {4.184880, 3.506335, 3.391859}},
      {"bytes", "1*full+1*local(window=8)", {5.664455, 4.822735, 4.522372}},
  };
  for (const Golden& golden : goldens) {
    SCOPED_TRACE(golden.task + " " + golden.attention);
    const TemporaryFolder folder;
    Config config = tiny_config(golden.task);
    config.attention = golden.attention;
    config.out = folder.path() + "/run";
    // The built-in text changes with the project.
    if (golden.task == "bytes") {
      config.data = folder.path() + "/text";
      std::string text;
      for (int i = 0; i < 3000; ++i) text += std::to_string(i * i) + (i % 7 == 0 ? "\n" : " ");
      write_file(config.data, text);
    }
    run(config);
    const std::vector<double> got = losses(config.out);
    ASSERT_EQ(got.size(), 20u);
    EXPECT_NEAR(got[0], golden.losses[0], kTolerance);
    EXPECT_NEAR(got[9], golden.losses[1], kTolerance);
    EXPECT_NEAR(got[19], golden.losses[2], kTolerance);
  }
}

}  // namespace
}  // namespace coterie::train
