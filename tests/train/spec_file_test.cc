// SPDX-License-Identifier: MIT
// Files of specs per layer, and the option that reads them.
#include "formats/spec_file.h"

#include <gtest/gtest.h>

#include "coterie/error.h"
#include "formats/files.h"
#include "tests/support/tensors.h"
#include "tests/train/temporary_folder.h"
#include "train/options.h"

namespace coterie::train {
namespace {

class SpecFile : public ::testing::Test {
 protected:
  std::string written(const std::string& text) {
    write_file(path, text);
    return path;
  }
  TemporaryFolder folder;
  std::string path = folder.path("specs.json");
};

constexpr const char* kThree =
    R"json({"coterie_specs": 1, "about": {"target": 0.01}, "layers": [
  {"name": "a", "spec": "full"}, {"spec": "2*full+2*local(window=8)"}, {"spec": "full"}]})json";

TEST_F(SpecFile, SetsTheAttentionOfLayers) {
  EXPECT_TRUE(is_spec_file(path));
  EXPECT_FALSE(is_spec_file("i-clustered(clusters=3)"));
  const std::vector<std::string> wanted = {"full", "2*full+2*local(window=8)", "full"};
  EXPECT_EQ(read_spec_file(written(kThree)), wanted);
  Config config;
  config.model.layers = 3;
  config.attention_at = {{"0", "local(window=3)"}};
  set_attention(config, path);
  EXPECT_EQ(config.attention, "full");
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(config.attention_at, (Pairs{{"1", wanted[1]}}));
  set_attention(config, "local(window=4)");
  EXPECT_EQ(config.attention, "local(window=4)");
  EXPECT_TRUE(config.attention_at.empty());
  config.model.layers = 2;
  EXPECT_NE(test::error_of([&] { set_attention(config, path); }).find("specs of 2 layers; got 3"),
            std::string::npos);
}

TEST_F(SpecFile, RefusesOtherFiles) {
  for (const char* const wrong :
       {"", "{", "[]", "1", "{\"coterie_specs\": 2, \"layers\": [{\"spec\": \"full\"}]}",
        "{\"coterie_specs\": 1}", "{\"coterie_specs\": 1, \"layers\": []}",
        "{\"coterie_specs\": 1, \"layers\": {\"spec\": \"full\"}}",
        "{\"coterie_specs\": 1, \"layers\": [\"full\"]}",
        "{\"coterie_specs\": 1, \"layers\": [{\"spec\": 1}]}",
        "{\"coterie_specs\": 1, \"layers\": [{\"spec\": \"nonsense\"}]}"}) {
    written(wrong);
    EXPECT_THROW(read_spec_file(path), Error) << wrong;
  }
  EXPECT_NE(test::error_of([&] { read_spec_file(path); }).find("nonsense"), std::string::npos);
  EXPECT_THROW(read_spec_file(folder.path("missing.json")), Error);
}

}  // namespace
}  // namespace coterie::train
