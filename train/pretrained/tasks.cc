// SPDX-License-Identifier: MIT
#include "train/pretrained/tasks.h"

#include <ATen/Context.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "coterie/error.h"
#include "train/pretrained/data.h"
#include "train/pretrained/scores.h"

namespace coterie::train {
namespace {

std::size_t whole(std::int64_t number) { return static_cast<std::size_t>(number); }

std::vector<LabelledText> chosen_of(const std::vector<LabelledText>& rows, std::int64_t count) {
  std::vector<LabelledText> chosen;
  for (const std::size_t place : spaced(rows.size(), whole(count))) chosen.push_back(rows[place]);
  return chosen;
}

// Neighbours of `rows` (with equal labels, unless `mean_labels`) joined until they have `tokens`.
std::vector<LabelledText> joined(const std::vector<LabelledText>& rows, std::size_t tokens,
                                 bool mean_labels, const WordPieceTokenizer& tokenizer) {
  if (tokens == 0) return rows;
  std::vector<LabelledText> out, sorted = rows;
  // By label: scores of neighbours are then nearly equal.
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.label < b.label; });
  LabelledText open;
  std::size_t parts = 0, size = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const LabelledText& row = sorted[i];
    if (parts > 0 && !mean_labels && row.label != open.label) parts = 0;  // too short: left out
    if (parts == 0) {
      open = row;
      size = 0;
    } else {
      open.first += " " + row.first;
      open.second += row.second.empty() ? "" : " " + row.second;
      open.label += mean_labels ? row.label : 0.0;
    }
    ++parts;
    // Inputs of their own (sts-b): both must be long enough.
    const std::size_t first = tokenizer.encode(row.first).size(),
                      second = row.second.empty() ? 0 : tokenizer.encode(row.second).size();
    size += mean_labels ? std::min(first, second) : first + second;
    if (size < tokens) continue;
    if (mean_labels) open.label /= static_cast<double>(parts);
    out.push_back(open);
    parts = 0;
  }
  if (out.empty()) {
    throw Error(
        fmt::format("[approximate] expected texts that can be joined to {} tokens; got {} "
                    "texts, too few (lower --join)",
                    tokens, rows.size()));
  }
  return out;
}

std::string limit_note(std::size_t used, std::size_t all, const std::string& what) {
  return used == all ? fmt::format("{} {}", used, what)
                     : fmt::format("{} of {} {}, evenly spaced", used, all, what);
}

// Embeddings of all inputs of one attention.
class EmbeddingTask : public EncoderTask {
 public:
  void take(const std::vector<std::size_t>& inputs, const at::Tensor& /*rows*/,
            const EncoderBatch& /*batch*/, const at::Tensor& embeddings) override {
    if (!all_.defined()) {
      all_ = at::empty({static_cast<std::int64_t>(inputs_.size()), embeddings.size(1)}, at::kFloat);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      all_[static_cast<std::int64_t>(inputs[i])].copy_(embeddings[static_cast<std::int64_t>(i)]);
    }
    stale_ = true;
  }

 protected:
  // Embeddings of unit length, (inputs, E), f64.
  at::Tensor directions() const {
    const at::Tensor rows = all_.to(at::kDouble);
    return rows / rows.norm(2, {1}, /*keepdim=*/true).clamp_min(1e-12);
  }
  bool fresh() const {  // whether rows were taken since the last call
    const bool was = stale_;
    stale_ = false;
    return was;
  }
  at::Tensor all_;

 private:
  mutable bool stale_ = true;
};

// No labels: agreement with full attention and times only.
class TextTask final : public EmbeddingTask {
 public:
  TextTask(const EncoderTaskOptions& options, const PretrainedEncoder& encoder) {
    inputs_ = text_inputs(options, encoder, whole(options.limit == 0 ? 4 : options.limit));
    units_ = inputs_.size();
    notes_ = {fmt::format("{} pieces of text of {} tokens", units_, options.length)};
  }
  std::vector<std::string> score_names() const override { return {}; }
  std::vector<double> scores(const std::vector<std::size_t>& /*units*/) const override {
    return {};
  }
};

// Similarity of pairs of sentences against people's scores.
class StsTask final : public EmbeddingTask {
 public:
  StsTask(const EncoderTaskOptions& options, const PretrainedEncoder& encoder) {
    const std::vector<LabelledText> all = read_sts_b(read_task_files(options.data));
    const std::vector<LabelledText> rows =
        joined(chosen_of(all, options.limit), whole(options.join), true, encoder.tokenizer);
    for (const LabelledText& row : rows) {
      inputs_.push_back(encoder.tokenizer.single(row.first, whole(options.length)));
      inputs_.push_back(encoder.tokenizer.single(row.second, whole(options.length)));
      wanted_.push_back(row.label);
    }
    units_ = rows.size();
    notes_ = {
        limit_note(options.limit == 0 ? all.size() : std::min(all.size(), whole(options.limit)),
                   all.size(), "pairs of the test file of STS-B")};
    if (options.join > 0) {
      notes_.push_back(
          fmt::format("pairs sorted by score and joined to {} pairs with at least {} "
                      "tokens a side; their score is the mean",
                      units_, options.join));
    }
  }
  std::vector<std::string> score_names() const override { return {"Spearman", "Pearson"}; }
  std::vector<double> scores(const std::vector<std::size_t>& units) const override {
    if (fresh()) {
      const at::Tensor pairs = directions().unflatten(0, {-1, 2});
      const at::Tensor cosine = (pairs.select(1, 0) * pairs.select(1, 1)).sum(1).contiguous();
      found_.assign(cosine.const_data_ptr<double>(), cosine.const_data_ptr<double>() + units_);
    }
    std::vector<double> found, wanted;
    for (const std::size_t unit : units) {
      found.push_back(found_[unit]);
      wanted.push_back(wanted_[unit]);
    }
    return {spearman(found, wanted), pearson(found, wanted)};
  }

 private:
  std::vector<double> wanted_;
  mutable std::vector<double> found_;
};

// The paragraph of a question among all paragraphs, by similarity.
class RetrievalTask final : public EmbeddingTask {
 public:
  RetrievalTask(const EncoderTaskOptions& options, const PretrainedEncoder& encoder) {
    const SquadData data = read_squad(read_task_files(options.data));
    const std::vector<std::size_t> asked = spaced(data.questions.size(), whole(options.limit));
    std::vector<bool> wanted(data.paragraphs.size(), options.limit == 0);
    for (const std::size_t question : asked) wanted[data.questions[question].paragraph] = true;
    // Documents: the wanted paragraphs, joined within their article.
    std::vector<std::size_t> document(data.paragraphs.size(), 0);
    std::vector<std::string> texts;
    std::size_t size = 0, article = data.paragraphs.size();
    for (std::size_t p = 0; p < data.paragraphs.size(); ++p) {
      if (!wanted[p]) continue;
      const SquadParagraph& paragraph = data.paragraphs[p];
      const bool opens =
          texts.empty() || article != paragraph.article || size >= whole(options.join);
      if (opens) {
        texts.push_back(paragraph.text);
        size = 0;
      } else {
        texts.back() += " " + paragraph.text;
      }
      if (options.join > 0) size += encoder.tokenizer.encode(paragraph.text).size();
      article = paragraph.article;
      document[p] = texts.size() - 1;
    }
    documents_ = texts.size();
    for (const std::string& text : texts) {
      inputs_.push_back(encoder.tokenizer.single(text, whole(options.length)));
    }
    for (const std::size_t question : asked) {
      inputs_.push_back(
          encoder.tokenizer.single(data.questions[question].text, whole(options.length)));
      wanted_.push_back(document[data.questions[question].paragraph]);
    }
    units_ = asked.size();
    notes_ = {limit_note(units_, data.questions.size(), "questions of the dev file of SQuAD 1.1"),
              fmt::format("{} documents to choose from{}", documents_,
                          options.join > 0 ? fmt::format(", paragraphs of an article joined to at "
                                                         "least {} tokens",
                                                         options.join)
                          : options.limit > 0 ? ", the paragraphs of these questions"
                                              : "")};
  }
  std::vector<std::string> score_names() const override { return {"recall@1", "MRR@10"}; }
  std::vector<double> scores(const std::vector<std::size_t>& units) const override {
    if (fresh()) rank();
    double first = 0, reciprocal = 0;
    for (const std::size_t unit : units) {
      if (rank_[unit] == 1) first += 1;
      if (rank_[unit] <= 10) reciprocal += 1.0 / static_cast<double>(rank_[unit]);
    }
    const auto count = static_cast<double>(std::max<std::size_t>(units.size(), 1));
    return {first / count, reciprocal / count};
  }

 private:
  void rank() const {
    const at::Tensor rows = directions().to(at::kFloat);
    const auto D = static_cast<std::int64_t>(documents_);
    const at::Tensor documents = rows.narrow(0, 0, D);
    rank_.resize(units_);
    for (std::size_t unit = 0; unit < units_; ++unit) {
      const at::Tensor close = documents.matmul(rows[D + static_cast<std::int64_t>(unit)]);
      const at::Tensor own = close[static_cast<std::int64_t>(wanted_[unit])];
      rank_[unit] = 1 + (close > own).sum().item<std::int64_t>();
    }
  }

  std::size_t documents_ = 0;
  std::vector<std::size_t> wanted_;
  mutable std::vector<std::int64_t> rank_;
};

enum class BinaryScore : std::uint8_t { accuracy, matthews, accuracy_and_f1 };

// A label of a text or a pair, by a linear function of its embedding.
class LabelTask final : public EmbeddingTask {
 public:
  struct Texts {
    std::vector<LabelledText> train, test;
    std::string name, test_name;
    bool pairs = false;
    BinaryScore score = BinaryScore::accuracy;
  };
  LabelTask(const Texts& texts, const EncoderTaskOptions& options, const PretrainedEncoder& encoder)
      : tune_(options.tune), score_(texts.score) {
    const auto encode = [&](const std::vector<LabelledText>& rows, std::vector<EncodedText>& out,
                            std::vector<double>& labels) {
      for (const LabelledText& row : joined(rows, whole(options.join), false, encoder.tokenizer)) {
        out.push_back(texts.pairs
                          ? encoder.tokenizer.pair(row.first, row.second, whole(options.length))
                          : encoder.tokenizer.single(row.first, whole(options.length)));
        labels.push_back(row.label);
      }
    };
    encode(chosen_of(texts.train, options.train_limit), train_, train_labels_);
    encode(chosen_of(texts.test, options.limit), inputs_, labels_);
    units_ = inputs_.size();
    const auto used = [](const std::vector<LabelledText>& rows, std::int64_t limit) {
      return limit == 0 ? rows.size() : std::min(rows.size(), whole(limit));
    };
    notes_ = {limit_note(used(texts.test, options.limit), texts.test.size(),
                         fmt::format("rows of the {} file of {}", texts.test_name, texts.name)),
              fmt::format("{} learned with full attention from {}",
                          tune_.encoder ? "encoder and head" : "head",
                          limit_note(used(texts.train, options.train_limit), texts.train.size(),
                                     "rows of the train file"))};
    if (options.join > 0) {
      notes_.push_back(
          fmt::format("texts with equal labels joined to at least {} tokens: {} and {} "
                      "inputs",
                      options.join, units_, train_.size()));
    }
  }

  void fit(PretrainedEncoder& encoder, const RunTextsOptions& run) override {
    if (!tune_.encoder) {
      probe_.fit(embeddings_of(encoder, train_, run), train_labels_);
      return;
    }
    const c10::Device device = encoder.model->parameters().front().device();
    at::manual_seed(tune_.seed);
    weight_ = (at::randn({encoder.model->options().dim}) * 0.02).to(device).requires_grad_();
    bias_ = at::zeros({1}, device).requires_grad_();
    const at::Tensor labels = at::tensor(train_labels_, at::kFloat).to(device);
    tune(encoder, {weight_, bias_}, train_, tune_,
         [&](const std::vector<std::size_t>& chosen, const at::Tensor& rows,
             const EncoderBatch& batch) {
           std::vector<std::int64_t> places(chosen.begin(), chosen.end());
           const at::Tensor wanted = labels.index_select(0, at::tensor(places).to(device));
           const at::Tensor found =
               pooled(encoder.pooling, rows, batch.lengths).matmul(weight_) + bias_;
           return at::binary_cross_entropy_with_logits(found, wanted);
         });
    weight_ = weight_.detach().cpu();
    bias_ = bias_.detach().cpu();
  }

  std::vector<std::string> score_names() const override {
    if (score_ == BinaryScore::matthews) return {"Matthews"};
    if (score_ == BinaryScore::accuracy_and_f1) return {"accuracy", "F1"};
    return {"accuracy"};
  }
  std::vector<double> scores(const std::vector<std::size_t>& units) const override {
    if (fresh()) {
      const at::Tensor found =
          (tune_.encoder ? (all_.matmul(weight_) + bias_).to(at::kDouble) : probe_.scores(all_))
              .contiguous();
      found_.assign(found.const_data_ptr<double>(), found.const_data_ptr<double>() + units_);
    }
    BinaryCounts counts;
    for (const std::size_t unit : units) counts.add(found_[unit] > 0, labels_[unit] == 1);
    if (score_ == BinaryScore::matthews) return {counts.matthews()};
    if (score_ == BinaryScore::accuracy_and_f1) return {counts.accuracy(), counts.f1()};
    return {counts.accuracy()};
  }

 private:
  TuneOptions tune_;
  BinaryScore score_;
  std::vector<EncodedText> train_;
  std::vector<double> train_labels_, labels_;
  LinearProbe probe_;
  at::Tensor weight_, bias_;  // with tune_.encoder
  mutable std::vector<double> found_;
};

std::unique_ptr<EncoderTask> make_imdb(const EncoderTaskOptions& options,
                                       const PretrainedEncoder& encoder) {
  const std::vector<CorpusFile> files = read_task_files(options.data);
  return std::make_unique<LabelTask>(LabelTask::Texts{.train = read_imdb(files, "train"),
                                                      .test = read_imdb(files, "test"),
                                                      .name = "IMDb reviews",
                                                      .test_name = "test"},
                                     options, encoder);
}

std::unique_ptr<EncoderTask> make_glue(const EncoderTaskOptions& options,
                                       const PretrainedEncoder& encoder) {
  GlueData data = read_glue(read_task_files(options.data), options.glue);
  return std::make_unique<LabelTask>(
      LabelTask::Texts{.train = std::move(data.train),
                       .test = std::move(data.test),
                       .name = options.glue,
                       .test_name = data.test_name,
                       .pairs = data.pairs,
                       .score = options.glue == "CoLA"   ? BinaryScore::matthews
                                : options.glue == "MRPC" ? BinaryScore::accuracy_and_f1
                                                         : BinaryScore::accuracy},
      options, encoder);
}

template <class Task>
std::unique_ptr<EncoderTask> make_simple(const EncoderTaskOptions& options,
                                         const PretrainedEncoder& encoder) {
  return std::make_unique<Task>(options, encoder);
}

using MakeEncoderTask = std::unique_ptr<EncoderTask> (*)(const EncoderTaskOptions&,
                                                         const PretrainedEncoder&);
constexpr std::pair<const char*, MakeEncoderTask> kEncoderTasks[] = {
    {"text", make_simple<TextTask>},
    {"sts-b", make_simple<StsTask>},
    {"squad-retrieval", make_simple<RetrievalTask>},
    {"imdb-probe", make_imdb},
    {"glue", make_glue},
    {"squad", make_squad_task}};

}  // namespace

std::vector<std::string> encoder_task_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : kEncoderTasks) names.emplace_back(name);
  return names;
}

std::vector<std::string> glue_task_names() { return {"SST-2", "CoLA", "RTE", "MRPC", "WNLI"}; }

std::unique_ptr<EncoderTask> make_encoder_task(const EncoderTaskOptions& options,
                                               const PretrainedEncoder& encoder) {
  for (const auto& [name, make] : kEncoderTasks) {
    if (options.name == name) return make(options, encoder);
  }
  throw Error("[approximate] expected a known task; got \"" + options.name + '"');
}

std::vector<EncodedText> text_inputs(const EncoderTaskOptions& options,
                                     const PretrainedEncoder& encoder, std::size_t count) {
  // As much text as is needed: every token has at least one byte, and words of many bytes are rare.
  std::string text;
  for (const CorpusFile& file : read_task_files(options.data)) text += file.text + "\n";
  const std::size_t length = whole(options.length), bytes = 16 * length;
  const std::size_t places =
      std::max<std::size_t>(text.size() / std::max<std::size_t>(bytes, 1), 1);
  std::vector<EncodedText> inputs;
  for (const std::size_t place : spaced(places, count)) {
    EncodedText input = encoder.tokenizer.single(
        std::string_view(text).substr(place * bytes, places == 1 ? text.size() : bytes), length);
    if (input.tokens.size() == length) inputs.push_back(std::move(input));
  }
  if (inputs.empty()) {
    throw Error(
        fmt::format("[approximate] expected text of at least {} tokens; got {} bytes of "
                    "text, which is too short (give more --data, or a smaller --length)",
                    length, text.size()));
  }
  return inputs;
}

}  // namespace coterie::train
