// SPDX-License-Identifier: MIT
// The report: reading logs, page contents, and that nothing in a log can break the page.
#include "report/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "coterie/error.h"
#include "report/data.h"
#include "report/groups.h"
#include "report/plot.h"
#include "report/text.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

const char* const kSteps =
    R"({"kind":"step","step":10,"loss":2.0,"tokens_per_s":1000,"seconds":1,"memory_bytes":1048576}
{"kind":"eval","step":10,"split":"valid","metric":0.5,"strata":{"distance 9-16":0.1,"distance 1":0.9}}
{"kind":"step","step":20,"loss":0.5,"tokens_per_s":3000,"seconds":2,"memory_bytes":2097152}
{"kind":"eval","step":20,"split":"valid","metric":0.75,"strata":{"distance 9-16":0.6,"distance 1":0.9}}
)";
const char* const kEnd =
    R"({"kind":"end","step":20,"reason":"steps","seconds":2.5,"peak_memory_bytes":3145728}
)";

std::string header(const std::string& task, const std::string& attention, int length,
                   const std::string& metric = "accuracy") {
  return R"({"kind":"run","task":")" + task + R"(","attention":")" + attention +
         R"(","config":"length = )" + std::to_string(length) +
         R"(\n","machine":{"cpu":"a cpu","threads":2},"parameters":12345,"metric":")" + metric +
         R"(","baselines":[{"name":"a guess","value":0.125}],"seed":7,"date":"2026-01-02T03:04"})" +
         "\n";
}

class ReportTest : public testing::Test {
 protected:
  std::string write_run(const std::string& name, const std::string& log) {
    std::filesystem::create_directories(folder_.path(name));
    std::ofstream(folder_.path(name) + "/log.jsonl") << log;
    return folder_.path(name);
  }
  std::string write_bench(const std::string& lines) {
    std::ofstream(folder_.path("bench.jsonl")) << lines;
    return folder_.path("bench.jsonl");
  }
  // The page of all runs written so far.
  std::string page(const std::string& bench = "") {
    return make_report({.runs = {folder_.path()}, .bench = bench, .title = "A title"});
  }

  TemporaryFolder folder_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

TEST_F(ReportTest, ReadsTheLinesOfALog) {
  const auto run = read_run(write_run("a", header("recall", "full", 64) + kSteps + kEnd));
  ASSERT_TRUE(run);
  EXPECT_EQ(run->parameters, 12345);
  EXPECT_EQ(run->result(), 0.75);
  EXPECT_EQ(run->seconds(), 2.5);
  EXPECT_EQ(run->seconds_at(15), 1);
  EXPECT_EQ(run->peak_memory_bytes(), 3145728);
  EXPECT_EQ(run->tokens_per_s(), 3000);
  ASSERT_EQ(run->evaluations.back().strata.size(), 2u);
  EXPECT_EQ(run->evaluations.back().strata[0].first, "distance 1");  // by number, not by letter
  EXPECT_EQ(config_value(*run, "length"), "64");
}

TEST_F(ReportTest, PrefersTestScoresAndTheBetterDirection) {
  const std::string lines =
      R"({"kind":"eval","step":1,"split":"valid","metric":3.0}
{"kind":"eval","step":2,"split":"valid","metric":2.0}
{"kind":"eval","step":3,"split":"valid","metric":2.5}
)";
  const std::string test = R"({"kind":"eval","step":3,"split":"test","metric":2.6})";
  const std::string head = header("bytes", "full", 64, "bits per byte");
  EXPECT_EQ(read_run(write_run("a", head + lines))->result(), 2.0);
  EXPECT_EQ(read_run(write_run("b", head + lines + test))->result(), 2.6);
}

TEST_F(ReportTest, CountsBrokenLinesAndKeepsTheRest) {
  const auto run = read_run(write_run(
      "a", header("copy", "full", 64) + "not json\n[1]\n" + kSteps + "{\"kind\":\"step\",\"st"));
  ASSERT_TRUE(run);
  EXPECT_EQ(run->unreadable, 3);
  EXPECT_EQ(run->steps.size(), 2u);
  EXPECT_TRUE(contains(page(), "3 lines of the log could not be read"));
}

TEST_F(ReportTest, FieldsOfTheWrongTypeAreMissing) {
  write_run("a", header("copy", "full", 64) +
                     R"({"kind":"step","step":"ten","loss":"low","seconds":null}
{"kind":"eval","step":1,"split":5,"metric":"good","strata":[1,2]}
{"kind":"clusters","layers":[{"layer":"x","heads":[{"sizes":["a",null,3],"mass":null}]}]}
{"kind":"clusters","layers":7}
{"kind":12}
{"kind":"end"}
)");
  EXPECT_TRUE(contains(page(), "nothing has been evaluated yet"));
}

TEST_F(ReportTest, ARunWithoutItsEndIsShownAsSuch) {
  write_run("a", header("copy", "full", 64) + kSteps);
  write_run("b", header("copy", "local(window=8)", 64) + kSteps +
                     R"({"kind":"end","step":20,"reason":"interrupted","seconds":2})" + "\n");
  const std::string html = page();
  EXPECT_TRUE(contains(html, "unfinished"));
  EXPECT_TRUE(contains(html, "interrupted"));
  EXPECT_TRUE(contains(html, "2 of 2 runs did not finish"));
}

TEST_F(ReportTest, ALogThatDoesNotSayWhatWasRunIsNamed) {
  write_run("a", header("copy", "full", 64) + kSteps + kEnd);
  write_run("broken", kSteps);
  EXPECT_TRUE(contains(page(), "broken: the log has no line of kind"));
}

TEST_F(ReportTest, WarnsOfRunsThatCannotBeCompared) {
  const std::string more =
      R"({"kind":"step","step":300,"loss":0.5,"tokens_per_s":3000,"seconds":2,"memory_bytes":1})"
      "\n";
  write_run("a", header("copy", "full", 64) + kSteps + kEnd);
  write_run("b", header("copy", "local(window=8)", 64) + kSteps + kEnd);
  EXPECT_FALSE(contains(page(), "Not comparable"));
  write_run("c", header("copy", "local(window=4)", 64) + kSteps + more + kEnd);
  EXPECT_TRUE(contains(page(), "trained for 20, 300 steps"));
  std::string leaking = header("copy", "routing(clusters=2,window=4,causal=paper)", 64);
  leaking.replace(leaking.rfind('}'), 1,
                  R"(,"leaks":true,"data":{"checksum":"xxh3:1","bytes":9}})");
  write_run("d", leaking + kSteps + kEnd);
  for (const char* part : {"sees the future", "some with heads that see the future",
                           "on different data", "<th", "seed"}) {
    EXPECT_TRUE(contains(page(), part)) << part;
  }
}

TEST_F(ReportTest, TheScoreAtTheEndCounts) {
  const std::string last = R"({"kind":"final","step":20,"split":"valid","metric":0.6,"share":1.0})"
                           "\n";
  const auto run = read_run(write_run("a", header("copy", "full", 64) + kSteps + last + kEnd));
  EXPECT_EQ(run->result(), 0.6);
  EXPECT_TRUE(contains(page(), "from all validation data at the end of the run"));
}

TEST_F(ReportTest, RefusesLogsOfWhichNoneIsARun) {
  write_run("broken", kSteps);
  EXPECT_THROW(page(), Error);
}

TEST_F(ReportTest, CollapsedHeadsAreRed) {
  const std::string clusters =
      R"x({"kind":"clusters","step":20,"layers":[{"layer":0,"group":0,)x"
      R"x("attention":"routing(clusters=2,window=4)","heads":[)x"
      R"x({"sizes":[62,2],"empty":0,"mass":0.5},{"sizes":[33,31],"empty":0,"mass":0.5},)x"
      R"x({"sizes":[40,24],"empty":0,"mass":0.001}]}]})x"
      "\n";
  write_run("a", header("bytes", "routing(clusters=2,window=4)", 64) + kSteps + clusters + kEnd);
  EXPECT_EQ(count_of(page(), "<figure class=\"collapsed\">"), 2u);
  EXPECT_TRUE(contains(page(), "3, 2 collapsed"));
}

TEST_F(ReportTest, RefusesFoldersWithoutRuns) {
  EXPECT_THROW(page(), Error);  // an empty folder
  EXPECT_THROW(make_report({.runs = {folder_.path("nowhere")}, .bench = {}}), Error);
  EXPECT_THROW(make_report({}), Error);
  write_run("a", header("copy", "full", 64));
  EXPECT_THROW(page(folder_.path("no-bench")), Error);
}

TEST_F(ReportTest, EscapesEverythingFromFiles) {
  const std::string evil = "<script>alert('1')</script>&";
  std::string line = header("copy", evil, 64, evil);
  line.replace(line.find("a guess"), 7, evil);
  line.replace(line.find("a cpu"), 5, evil);
  line.replace(line.find("2026"), 4, evil);
  line.replace(line.find("\"copy\""), 6, "\"" + evil + "\"");
  line.replace(line.find("length = 64"), 11, evil);
  write_run("a<b",
            line +
                R"({"kind":"eval","step":1,"split":"valid","metric":1,"strata":{"<i>":1,"<b>":2}}
{"kind":"clusters","layers":[{"layer":0,"attention":"<u>","heads":[{"sizes":[1],"mass":1}]}]}
{"kind":"end","reason":"<em>"}
)");
  const std::string bench = write_bench(R"({"kind":"run","cpu":"<script>","pass":"<script>"}
{"kind":"measurement","attention":"<script>","against":"<script>","N":4,"speed":2,"error":0}
)");
  const std::string html =
      make_report({.runs = {folder_.path()}, .bench = bench, .title = "<script>"});
  for (const char* const tag : {"<script", "<u>", "<em>", "<i>", "a<b"}) {
    EXPECT_FALSE(contains(html, tag)) << tag;
  }
  EXPECT_TRUE(contains(html, "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&amp;"));
}

TEST_F(ReportTest, HasASectionPerTaskAndTheCommonOnes) {
  write_run("a", header("copy", "full", 64) + kSteps + kEnd);
  write_run("b", header("recall", "full", 64) + kSteps + kEnd);
  const std::string html = page();
  for (const char* const title : {"Summary", "copy", "recall, bidirectional", "Speed and error",
                                  "Cluster health", "Runs and machines"}) {
    EXPECT_TRUE(contains(html, std::string("<h2>") + title + "</h2>")) << title;
  }
  EXPECT_TRUE(contains(html, "No bench record was given"));
  EXPECT_TRUE(contains(html, "No run logged its clusters"));
  EXPECT_TRUE(contains(html, "Accuracy by distance"));
  EXPECT_TRUE(contains(html, "12\u202f345"));  // parameters
  EXPECT_FALSE(contains(html, "http"));        // no external resources
}

TEST_F(ReportTest, RunsOfOtherMetricsOrSymbolsAreApart) {
  write_run("a", header("images", "full", 64) + kSteps + kEnd);
  write_run("b", header("images", "full", 64, "bits per dimension") + kSteps + kEnd);
  write_run("c", header("speech", "full", 64, "error rate") + kSteps + kEnd);
  std::string phones = header("speech", "full", 64, "error rate");
  const std::string length = R"(length = 64\n)";
  phones.replace(phones.find(length), length.size(),
                 length + R"([speech]\nsymbols = \"phones\"\njoin = 8\n)");
  write_run("d", phones + kSteps + kEnd);
  const std::string html = page();
  for (const char* const title :
       {"images", "images, value by value", "speech", "speech, phones, 8 joined"}) {
    EXPECT_TRUE(contains(html, std::string("<h2>") + title + "</h2>")) << title;
  }
}

TEST_F(ReportTest, TheSummaryRanksResults) {
  const std::string better = R"({"kind":"eval","step":30,"split":"valid","metric":0.994})"
                             "\n";
  write_run("a", header("copy", "clustered(clusters=8)", 64) + kSteps + kEnd);
  write_run("b", header("copy", "i-clustered(clusters=8)", 64) + kSteps + better + kEnd);
  EXPECT_TRUE(contains(page(), "i-clustered&nbsp;<b>99.4\u202f%</b>, clustered&nbsp;<b>75.0"));
}

TEST_F(ReportTest, BeginsWithLongSequencesThatAreAsGoodAsFullAttention) {
  const auto end = [](int seconds) {
    return R"({"kind":"end","step":20,"reason":"steps","seconds":)" + std::to_string(seconds) +
           "}\n";
  };
  write_run("a", header("copy", "full", 64) + kSteps + kEnd);
  write_run("b", header("recall", "full", 4096) + kSteps + end(50));
  write_run("c", header("recall", "i-clustered(clusters=8)", 4096) + kSteps + end(10));
  const std::string html = page();
  EXPECT_TRUE(contains(html, "<b>5.0 times as fast</b>"));
  EXPECT_TRUE(
      contains(html, "<ul class=\"summary\"><li>With <b>4\u202f096 tokens</b>, <code>i-clustered"));
  EXPECT_LT(html.find("<h2>recall, bidirectional, long sequences</h2>"),
            html.find("<h2>copy</h2>"));
}

TEST_F(ReportTest, DrawsTheGridOfLengthsAndClusters) {
  for (const int length : {64, 128}) {
    const std::string at = std::to_string(length) + "-";
    write_run(at + "full", header("copy", "full", length) + kSteps + kEnd);
    for (const char* const clusters : {"4", "8"}) {
      const std::string spec = std::string("clustered(clusters=") + clusters + ")";
      write_run(at + clusters, header("copy", spec, length) + kSteps + kEnd);
    }
  }
  const std::string html = page();
  EXPECT_TRUE(contains(html, "Accuracy over length and clusters"));
  EXPECT_TRUE(contains(html, "within a point of full attention or better: clustered at <b>4 of 4"));
  EXPECT_EQ(count_of(html, "aria-label=\"accuracy of clustered\""), 1u);
}

std::string measurement(const std::string& attention, int N, double speed) {
  return R"({"kind":"measurement","attention":")" + attention +
         R"(","against":"full","causal":false,"N":)" + std::to_string(N) +
         R"(,"forward_ms":{"median":2},"backward_ms":null,"error":0.25,"speed":)" +
         std::to_string(speed) + R"(,"workspace_bytes":1048576,"saved_bytes":0})" + "\n";
}

TEST_F(ReportTest, ShowsSpeedErrorAndCrossoverOfBench) {
  write_run("a", header("copy", "full", 64) + kSteps + kEnd);
  const std::string local = "local(window=8)";
  const std::string bench = write_bench(
      R"({"kind":"run","cpu":"a cpu","pass":"both"})"
      "\n" +
      measurement("full", 512, 1) + measurement("full", 1024, 1) + measurement(local, 512, 0.5) +
      measurement(local, 1024, 4) + R"({"kind":"crossover","attention":")" + local +
      R"(","causal":false,"N":700.2})" + "\nbroken\n" +
      R"x({"kind":"refused","attention":"cast(clusters=2,size=4)","reason":"why not"})x");
  const std::string html = page(bench);
  EXPECT_TRUE(contains(html, "from 700 tokens"));
  EXPECT_TRUE(contains(html, "<strong>4.00×</strong>"));
  EXPECT_TRUE(contains(html, "0.2500"));
  EXPECT_TRUE(contains(html, "1 line of"));
  EXPECT_TRUE(contains(html, "<b>1 of 1</b> attentions are faster than full"));
  EXPECT_TRUE(contains(html, "Not measured: cast(clusters=2,size=4): why not"));
}

TEST_F(ReportTest, ShowsClustersPerLayerAndHead) {
  write_run(
      "a", header("copy", "clustered(clusters=3)", 64) + kSteps +
               R"x({"kind":"clusters","layers":[{"layer":1,"attention":"clustered(clusters=3)",)x" +
               R"("heads":[{"sizes":[5,3,0],"empty":1,"mass":0.5},)" +
               R"({"sizes":[4,4,0],"empty":1,"mass":0.75}]}]})" + "\n");
  const std::string html = page();
  EXPECT_TRUE(contains(html, "layer 1 · head 1"));
  EXPECT_TRUE(contains(html, "1 empty · keeps 75.0"));
  EXPECT_TRUE(contains(html, "50.0\u202f% … 75.0\u202f%"));
}

TEST(ReportGroups, NamesTellAttentionsApart) {
  EXPECT_EQ(short_names({"full", "clustered(clusters=4)", "clustered(clusters=8)"}),
            (std::vector<std::string>{"full", "clustered(4)", "clustered(8)"}));
  EXPECT_EQ(
      short_names({"routing(clusters=4,window=8)", "routing(clusters=4,membership=balanced)"}),
      (std::vector<std::string>{"routing(window=8)", "routing(balanced)"}));
  EXPECT_EQ(short_names({"2*local(window=8)+2*routing(clusters=4,window=8)", "no such thing"}),
            (std::vector<std::string>{"local + routing", "no such thing"}));
  EXPECT_EQ(attention_kind("full; 0-1: local(window=8)").family, "full + local");
}

TEST(ReportText, NumbersAreReadable) {
  EXPECT_EQ(grouped(1234567), "1\u202f234\u202f567");
  EXPECT_EQ(grouped(-1234), "-1\u202f234");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(compact(1234), "1.23k");
  EXPECT_EQ(percent_text(1), "100.0\u202f%");
  EXPECT_EQ(percent_text(0.9997), "99.97\u202f%");  // not rounded up to 100
  EXPECT_EQ(percent_text(0.99999999), "99.99\u202f%");
  EXPECT_EQ(shortened("àéî", 3), "àéî");
  EXPECT_EQ(shortened("àéîõ", 3), "àé…");
}

}  // namespace
}  // namespace coterie::train
