// SPDX-License-Identifier: MIT
// Logs as tables and as TensorBoard's event files.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>

#include "coterie/error.h"
#include "formats/event_file.h"
#include "formats/files.h"
#include "report/log_table.h"
#include "tests/train/temporary_folder.h"

namespace coterie::train {
namespace {

const char* const kLog =
    R"({"kind":"run","task":"tokens","metric":"perplexity","date":"2026-01-02T03:04:05Z"}
{"grad_norm":0.25,"kind":"step","loss":2.5,"lr":0.001,"memory_bytes":1048576,"seconds":1.5,"step":10,"tokens_per_s":1000}
{"accuracy":0.5,"kind":"eval","loss":1.0,"metric":2.75,"seconds":0.5,"split":"valid","step":10,"strata":{"a, \"b\"":3.5}}
{"kind":"clusters","step":10,"layers":[{"layer":0,"group":1,"heads":[{"mass":0.5,"empty":1},{"mass":0.25,"empty":0}]}]}
{"grad_norm":null,"kind":"step","loss":2.0,"lr":0.001,"memory_bytes":1048576,"new":7,"seconds":3,"step":20,"tokens_per_s":1000.125}
{"kind":"end","step":20,"reason":"steps","seconds":3}
not JSON
)";
constexpr double kStart = 1767323045;  // of its date

LogTable table_of(const std::string& log) {
  const TemporaryFolder folder;
  write_file(folder.path("log.jsonl"), log);
  return read_log_table(folder.path());
}

TEST(LogTable, IsCsv) {
  EXPECT_EQ(log_csv(table_of(kLog)),
            "kind,step,split,loss,metric,accuracy,lr,grad_norm,tokens_per_s,seconds,memory_bytes,"
            "\"strata.a, \"\"b\"\"\",new\n"
            "step,10,,2.5,,,0.001,0.25,1000,1.5,1048576,,\n"
            "eval,10,valid,1,2.75,0.5,,,,0.5,,3.5,\n"
            "step,20,,2,,,0.001,,1000.125,3,1048576,,7\n");
}

TEST(LogTable, IsScalars) {
  std::map<std::string, std::vector<double>> values;  // step, time, value, step, ...
  for (const ScalarEvent& event : log_events(table_of(kLog))) {
    for (const double value :
         {static_cast<double>(event.step), event.time - kStart, static_cast<double>(event.value)}) {
      values[event.tag].push_back(value);
    }
  }
  EXPECT_EQ(values["train/loss"], std::vector<double>({10, 1.5, 2.5, 20, 3, 2}));
  EXPECT_EQ(values["train/grad_norm"], std::vector<double>({10, 1.5, 0.25}));
  EXPECT_EQ(values["valid/perplexity"], std::vector<double>({10, 1.5, 2.75}));
  EXPECT_EQ(values["valid/accuracy"], std::vector<double>({10, 1.5, 0.5}));
  EXPECT_EQ(values["valid/strata.a, \"b\""], std::vector<double>({10, 1.5, 3.5}));
  EXPECT_EQ(values["clusters/layer0.group1.mass"], std::vector<double>({10, 1.5, 0.375}));
  EXPECT_EQ(values["clusters/layer0.group1.empty"], std::vector<double>({10, 1.5, 0.5}));
  EXPECT_FALSE(values.contains("valid/metric"));
}

TEST(LogTable, NeedsSteps) {
  EXPECT_THROW(table_of("{\"kind\":\"run\"}\n"), Error);
  EXPECT_THROW(table_of(""), Error);
  EXPECT_THROW(read_log_table("/no/such/folder"), Error);
}

// RFC 3720, section B.4.
TEST(Crc32c, HasKnownValues) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

std::uint64_t number_at(const std::string& bytes, std::size_t place, std::size_t size) {
  std::uint64_t number = 0;
  std::memcpy(&number, bytes.data() + place, size);
  return number;
}

// The data of each record, after its checksums are checked.
std::vector<std::string> records_of(const std::string& content) {
  std::vector<std::string> records;
  for (std::size_t place = 0; place < content.size();) {
    const auto length = static_cast<std::size_t>(number_at(content, place, 8));
    EXPECT_EQ(number_at(content, place + 8, 4), masked_crc32c(content.substr(place, 8)));
    records.push_back(content.substr(place + 12, length));
    EXPECT_EQ(number_at(content, place + 12 + length, 4), masked_crc32c(records.back()));
    place += 16 + length;
  }
  return records;
}

TEST(EventFile, HasTheBytesOfTheFormat) {
  const std::string content = event_file(
      1.0, {{.time = 2.0, .step = 300, .tag = "a/b", .value = 0.5F}, {.tag = "c", .value = 1}});
  // Every event file begins like this: 24 bytes and the checksum of that number.
  EXPECT_EQ(content.substr(0, 13), std::string("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x09", 13));
  const std::vector<std::string> records = records_of(content);
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0], std::string("\x09\0\0\0\0\0\0\xf0\x3f\x1a\x0d", 11) + "brain.Event:2");
  EXPECT_EQ(records[1], std::string("\x09\0\0\0\0\0\0\0\x40"  // time 2.0
                                    "\x10\xac\x02"            // step 300
                                    "\x2a\x0c\x0a\x0a"        // a summary with a value
                                    "\x0a\x03"
                                    "a/b\x15\0\0\0\x3f",  // its tag, 0.5
                                    26));
  EXPECT_EQ(records[2].substr(9, 2), std::string("\x10\0", 2));
}

}  // namespace
}  // namespace coterie::train
