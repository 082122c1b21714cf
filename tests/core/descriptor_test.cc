// SPDX-License-Identifier: MIT
#include "core/descriptor.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "cases/cases.h"

namespace coterie {
namespace {

using Numbers = std::map<std::string, std::int64_t>;

std::int64_t evaluate(const Formula& formula, const Numbers& names) {
  std::vector<std::int64_t> stack;
  std::istringstream words(formula.text());
  for (std::string word; words >> word;) {
    if (const auto name = names.find(word); name != names.end()) {
      stack.push_back(name->second);
      continue;
    }
    if (std::isdigit(static_cast<unsigned char>(word[0]))) {
      stack.push_back(std::stoll(word));
      continue;
    }
    const std::int64_t b = stack.back();
    stack.pop_back();
    std::int64_t& a = stack.back();
    if (word == "+")
      a += b;
    else if (word == "*")
      a *= b;
    else if (word == "/")
      a /= b;
    else
      a = word == "min" ? std::min(a, b) : word == "max" ? std::max(a, b) : -1;
  }
  return stack.size() == 1 ? stack[0] : -1;
}

TEST(Descriptor, FormulasAreTheShapes) {
  const Numbers names{{"B", 2},  {"H", 6},         {"N", 37},          {"S", 53},   {"Dk", 8},
                      {"Dv", 5}, {"key_heads", 3}, {"value_heads", 3}, {"items", 7}};
  const auto formula = [](const char* name) { return Formula(name); };
  for (const char* const spec : {"full",
                                 "local(window=3)",
                                 "strided(stride=2)",
                                 "oracle-top(topk=60)",
                                 "oracle-top(topk=4)",
                                 "clustered(clusters=5)",
                                 "i-clustered(clusters=5,topk=9)",
                                 "i-clustered(clusters=5,topk=99,causal=reference)",
                                 "lsh",
                                 "lsh(combine=mean)",
                                 "routing(clusters=4,window=9)",
                                 "routing(clusters=4,window=45)",
                                 "routing(clusters=4,window=9,share_qk=true)",
                                 "routing(clusters=4,membership=balanced)",
                                 "routing(clusters=4,window=9,causal=paper)",
                                 "routing(clusters=4,window=9,causal=strict)",
                                 "routing(clusters=4,window=9,causal=strict,queries_in=2)",
                                 "routing(clusters=4,window=9,causal=strict,share_qk=true)",
                                 "cast(clusters=4,size=9)",
                                 "cast(clusters=4,size=9,mode=single)",
                                 "cast(clusters=4,size=50,heads=separate)",
                                 "cast(clusters=4,size=9,activation=laplace)"}) {
    const Mechanism mechanism = resolve(AttentionSpec::parse(spec).groups[0].mechanism, false);
    const Descriptor& own = descriptor_of(mechanism);
    for (const bool on_gpu : {false, true}) {
      const CallSizes<std::int64_t> numbers{2, 6, 37, 53, 8, 5, 3, 3, 7, on_gpu};
      const CallSizes<Formula> symbols{
          formula("B"),     formula("H"),  formula("N"),         formula("S"),
          formula("Dk"),    formula("Dv"), formula("key_heads"), formula("value_heads"),
          formula("items"), on_gpu};
      const auto check = [&](const auto& shapes, const auto& formulas) {
        ASSERT_EQ(shapes.size(), formulas.size()) << spec;
        for (std::size_t t = 0; t < shapes.size(); ++t) {
          ASSERT_EQ(shapes[t].sizes.size(), formulas[t].sizes.size()) << spec;
          for (std::size_t d = 0; d < shapes[t].sizes.size(); ++d)
            EXPECT_EQ(shapes[t].sizes[d], evaluate(formulas[t].sizes[d], names))
                << spec << " " << shapes[t].name << ": " << formulas[t].sizes[d].text();
        }
      };
      check(own.saved(mechanism, numbers), own.saved_formulas(mechanism, symbols));
      check(own.state(mechanism, numbers), own.state_formulas(mechanism, symbols));
    }
  }
}

// No part of a descriptor is empty; the failure message names the part.
TEST(Descriptor, PartsAreThere) {
  std::set<std::string> names;
  for (const Descriptor& each : descriptors()) {
    EXPECT_TRUE(names.insert(each.name).second) << "name: " << each.name << " is taken";
    EXPECT_NE(each.summary, std::string()) << "summary of " << each.name;
    EXPECT_NE(each.attends, std::string()) << "attends of " << each.name;
    std::set<std::string> keys;
    for (const SpecKey& key : each.keys) {
      EXPECT_TRUE(keys.insert(key.name).second) << "key of " << each.name << ": " << key.name;
      EXPECT_NE(key.help, "") << "help of " << each.name << "'s key " << key.name;
    }
    const Mechanism& mechanism = each.defaults.mechanism;
    const SavedTensors<std::int64_t> saved = each.saved(mechanism, {});
    ASSERT_FALSE(saved.empty()) << "saved of " << each.name;
    std::set<std::string> tensors;
    bool selections_over = false;
    for (const auto& tensor : saved) {
      EXPECT_TRUE(tensors.insert(tensor.name).second) << "saved of " << each.name;
      selections_over = selections_over || tensor.kind != SavedKind::selection;
      EXPECT_TRUE(tensor.kind != SavedKind::selection || !selections_over)
          << "saved of " << each.name << ": the selection " << tensor.name << " is not first";
    }
    EXPECT_TRUE(each.positions == Positions::rotary || each.positions == Positions::none)
        << "positions of " << each.name;
  }
  EXPECT_EQ(descriptors().size(), std::variant_size_v<Mechanism>);
}

// The shared cases, which test all kernels, cover every mechanism.
TEST(Descriptor, EveryMechanismHasCases) {
  std::set<std::string> covered;
  for (const cases::Case& each : cases::all())
    covered.insert(each.spec.substr(0, each.spec.find('(')));
  for (const Descriptor& each : descriptors())
    EXPECT_TRUE(covered.count(each.name)) << "no case in cases/cases.cc uses " << each.name;
}

// With COTERIE_WRITE_DOCS=1 the test writes the table instead of comparing it.
TEST(Descriptor, TheTableOfTheDocumentIsTheirs) {
  const std::string path = std::string(COTERIE_ROOT) + "/docs/mechanisms.md";
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const std::string document = text.str(), table = mechanism_table();
  if (std::getenv("COTERIE_WRITE_DOCS")) {
    const std::size_t begin = document.find("| name |"), end = document.find("\n\n", begin) + 1;
    std::ofstream(path) << document.substr(0, begin) + table + document.substr(end);
    return;
  }
  EXPECT_NE(document.find(table), std::string::npos) << "docs/mechanisms.md should contain\n"
                                                     << table;
}

}  // namespace
}  // namespace coterie
