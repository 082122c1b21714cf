// SPDX-License-Identifier: MIT
#include "train/place.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "coterie/error.h"

namespace coterie::train {
namespace {

using Variables = std::map<std::string, std::string>;

std::optional<Place> place_of(const Variables& variables) {
  return find_place([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal_of(const Variables& variables) {
  try {
    place_of(variables);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Place, AloneWithoutVariables) {
  EXPECT_FALSE(place_of({}));
  EXPECT_FALSE(place_of({{"LOCAL_RANK", "0"}, {"MASTER_ADDR", "a"}}));
}

TEST(Place, OfTorchrun) {
  const auto place = place_of({{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node0"},
                               {"MASTER_PORT", "29500"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                               {"TORCHELASTIC_RESTART_COUNT", "2"},
                               {"TORCHELASTIC_MAX_RESTARTS", "3"}});
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 5);
  EXPECT_EQ(place->size, 8);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->local_size, 4);
  EXPECT_EQ(place->address, "node0");
  EXPECT_EQ(place->port, 29500);
  EXPECT_TRUE(place->agent);
  EXPECT_EQ(place->restarts, 2);
  EXPECT_TRUE(place->restarts_allowed);
}

TEST(Place, ByHand) {
  const auto place = place_of(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(place);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->local_size, 2);
  EXPECT_FALSE(place->agent);
  EXPECT_FALSE(place->restarts_allowed);
}

TEST(Place, OfSlurm) {
  const Variables step = {{"SLURM_PROCID", "9"},
                          {"SLURM_STEP_NUM_TASKS", "16"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_STEP_TASKS_PER_NODE", "8(x2)"},
                          {"SLURM_STEP_NODELIST", "gpu[003-004]"},
                          {"SLURM_JOB_ID", "123456"},
                          {"SLURM_RESTART_COUNT", "1"}};
  const auto place = place_of(step);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->rank, 9);
  EXPECT_EQ(place->size, 16);
  EXPECT_EQ(place->local_rank, 1);
  EXPECT_EQ(place->local_size, 8);
  EXPECT_EQ(place->address, "gpu003");
  EXPECT_EQ(place->port, 20000 + 123456 % 20000);
  EXPECT_EQ(place->restarts, 1);
  Variables named = step;
  named["MASTER_ADDR"] = "login";
  named["MASTER_PORT"] = "4711";
  EXPECT_EQ(place_of(named)->address, "login");
  EXPECT_EQ(place_of(named)->port, 4711);
  // torchrun inside of a job: its variables count.
  named["RANK"] = "0";
  named["WORLD_SIZE"] = "2";
  EXPECT_EQ(place_of(named)->size, 2);
}

// A batch script has SLURM_PROCID and the job's number of tasks, but is one process.
TEST(Place, ABatchScriptIsAlone) {
  EXPECT_FALSE(place_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}));
  EXPECT_FALSE(place_of({{"SLURM_PROCID", "0"},
                         {"SLURM_STEP_NUM_TASKS", "1"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_STEP_NODELIST", "a"}}));
}

TEST(Place, RefusesWhatMakesNoSense) {
  EXPECT_NE(refusal_of({{"RANK", "0"}}).find("WORLD_SIZE is not set"), std::string::npos);
  EXPECT_NE(refusal_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR is not set"),
            std::string::npos);
  const Variables good = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(refusal_of(good), "");
  for (const auto& [name, value] : Variables{
           {"RANK", "2"}, {"WORLD_SIZE", "0"}, {"MASTER_PORT", "port"}, {"LOCAL_RANK", "-1"}}) {
    Variables bad = good;
    bad[name] = value;
    EXPECT_NE(refusal_of(bad).find(name), std::string::npos) << name;
  }
}

TEST(Place, FirstHostOfAList) {
  EXPECT_EQ(first_host("one"), "one");
  EXPECT_EQ(first_host("one,two"), "one");
  EXPECT_EQ(first_host("gpu[003-006,9],login"), "gpu003");
  EXPECT_EQ(first_host("n[7,9]-ib,x"), "n7-ib");
  EXPECT_EQ(first_host("a,gpu[1-2]"), "a");
}

}  // namespace
}  // namespace coterie::train
