// SPDX-License-Identifier: MIT
// A reader for SQuAD: two linear functions of an encoder's rows say where the answer begins and
// ends. It is trained on articles 0 to 37 of the dev file and scored on the others.
#include <ATen/Context.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "coterie/error.h"
#include "train/pretrained/data.h"
#include "train/pretrained/scores.h"
#include "train/pretrained/tasks.h"

namespace coterie::train {
namespace {

constexpr std::size_t kTrainArticles = 38;
constexpr std::size_t kLongestAnswer = 30;  // tokens
constexpr std::size_t kOverlap = 128;       // tokens that two windows of a paragraph share

// A question with a window of its paragraph: [CLS] question [SEP] window [SEP].
struct SquadWindow {
  EncodedText text;
  std::size_t question = 0;
  std::size_t first = 0;                                    // token of the window's first piece
  std::vector<std::pair<std::size_t, std::size_t>> places;  // of its pieces, in bytes
  std::int64_t begin = 0, end = 0;  // tokens of the answer, both inclusive; 0: not in the window
};

class SquadTask final : public EncoderTask {
 public:
  SquadTask(const EncoderTaskOptions& options, const PretrainedEncoder& encoder)
      : tune_(options.tune), data_(read_squad(read_task_files(options.data))) {
    std::vector<std::size_t> train, test;
    for (std::size_t q = 0; q < data_.questions.size(); ++q) {
      const bool learned = data_.paragraphs[data_.questions[q].paragraph].article < kTrainArticles;
      (learned ? train : test).push_back(q);
    }
    if (train.empty() || test.empty()) {
      throw Error(
          fmt::format("[approximate] expected SQuAD with more than {} articles, the first {} "
                      "to train on; got {} and {} questions",
                      kTrainArticles, kTrainArticles, train.size(), test.size()));
    }
    join_contexts(static_cast<std::size_t>(options.join), encoder);
    const auto length = static_cast<std::size_t>(options.length);
    const std::size_t all_train = train.size(), all_test = test.size();
    for (const std::size_t place :
         spaced(train.size(), static_cast<std::size_t>(options.train_limit))) {
      add_windows(train[place], length, /*learned=*/true, encoder, train_);
    }
    std::vector<std::size_t> asked;
    for (const std::size_t place : spaced(test.size(), static_cast<std::size_t>(options.limit))) {
      asked.push_back(test[place]);
      add_windows(test[place], length, /*learned=*/false, encoder, windows_);
    }
    std::erase_if(train_, [](const SquadWindow& window) { return window.end == 0; });
    for (SquadWindow& window : windows_) inputs_.push_back(std::move(window.text));
    asked_ = asked;
    units_ = asked.size();
    best_.resize(data_.questions.size());
    notes_ = {fmt::format("trained on part of SQuAD dev, tested on held-out dev articles: {} of {} "
                          "questions of articles 0-37, {} of {} of the others; not a SQuAD score",
                          options.train_limit == 0
                              ? all_train
                              : std::min(all_train, static_cast<std::size_t>(options.train_limit)),
                          all_train, units_, all_test),
              tune_.encoder ? "encoder and reader trained with full attention"
                            : "reader trained with full attention, the encoder as it is"};
    if (options.join > 0) {
      notes_.push_back(fmt::format("paragraphs joined with those after them to at least {} tokens",
                                   options.join));
    }
  }

  void fit(PretrainedEncoder& encoder, const RunTextsOptions& /*run*/) override {
    const c10::Device device = encoder.model->parameters().front().device();
    at::manual_seed(tune_.seed);
    weight_ = (at::randn({encoder.model->options().dim, 2}) * 0.02).to(device).requires_grad_();
    bias_ = at::zeros({2}, device).requires_grad_();
    std::vector<EncodedText> texts;
    texts.reserve(train_.size());
    for (const SquadWindow& window : train_) texts.push_back(window.text);
    tune(encoder, {weight_, bias_}, texts, tune_,
         [&](const std::vector<std::size_t>& chosen, const at::Tensor& rows,
             const EncoderBatch& batch) {
           std::vector<std::int64_t> begins, ends;
           for (const std::size_t window : chosen) {
             begins.push_back(train_[window].begin);
             ends.push_back(train_[window].end);
           }
           const at::Tensor logits = logits_of(rows, batch);
           return at::cross_entropy_loss(logits.select(2, 0), at::tensor(begins).to(device)) +
                  at::cross_entropy_loss(logits.select(2, 1), at::tensor(ends).to(device));
         });
    weight_ = weight_.detach();
    bias_ = bias_.detach();
  }

  void take(const std::vector<std::size_t>& inputs, const at::Tensor& rows,
            const EncoderBatch& batch, const at::Tensor& /*embeddings*/) override {
    const at::Tensor logits = logits_of(rows.to(at::kFloat), batch).cpu().contiguous();
    const auto N = static_cast<std::size_t>(logits.size(1));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const float* const values = logits[static_cast<std::int64_t>(i)].const_data_ptr<float>();
      take_answer(windows_[inputs[i]], {values, 2 * N});
    }
  }

  std::vector<std::string> score_names() const override { return {"exact match", "F1"}; }
  std::vector<double> scores(const std::vector<std::size_t>& units) const override {
    if (open_) {
      exact_.clear();
      f1_.clear();
      for (const std::size_t question : asked_) {
        const SquadQuestion& own = data_.questions[question];
        exact_.push_back(squad_exact(best_[question].text, own.answers));
        f1_.push_back(squad_f1(best_[question].text, own.answers));
        best_[question] = {};
      }
      open_ = false;
    }
    double exact = 0, f1 = 0;
    for (const std::size_t unit : units) {
      exact += exact_[unit];
      f1 += f1_[unit];
    }
    const auto count = static_cast<double>(std::max<std::size_t>(units.size(), 1));
    return {exact / count, f1 / count};
  }

 private:
  struct Answer {
    double score = -std::numeric_limits<double>::infinity();
    std::string text;
  };

  // Every paragraph followed by those after it in its article; answers keep their places.
  void join_contexts(std::size_t tokens, const PretrainedEncoder& encoder) {
    if (tokens == 0) return;
    std::vector<std::string> texts;
    std::vector<std::size_t> sizes;
    for (const SquadParagraph& paragraph : data_.paragraphs) {
      texts.push_back(paragraph.text);
      sizes.push_back(encoder.tokenizer.encode(paragraph.text).size());
    }
    for (std::size_t p = 0; p < texts.size(); ++p) {
      std::size_t size = sizes[p];
      for (std::size_t next = p + 1; size < tokens && next < texts.size() &&
                                     data_.paragraphs[next].article == data_.paragraphs[p].article;
           ++next) {
        data_.paragraphs[p].text += " " + texts[next];
        size += sizes[next];
      }
    }
  }

  void add_windows(std::size_t question, std::size_t length, bool learned,
                   const PretrainedEncoder& encoder, std::vector<SquadWindow>& windows) const {
    const SquadQuestion& own = data_.questions[question];
    const std::string& context = data_.paragraphs[own.paragraph].text;
    std::vector<std::int32_t> asked = encoder.tokenizer.encode(own.text);
    if (length < 64) throw Error("[approximate] expected --length of at least 64 for squad");
    asked.resize(std::min(asked.size(), length / 2));
    const auto pieces = encoder.tokenizer.pieces(context);
    const std::size_t size = length - asked.size() - 3;
    const std::size_t answer_end = own.answer_begin + own.answers[0].size();
    for (std::size_t from = 0;; from += size - std::min(kOverlap, size / 2)) {
      const std::size_t to = std::min(from + size, pieces.size());
      SquadWindow window;
      window.question = question;
      window.first = asked.size() + 2;
      window.text.tokens = {encoder.tokenizer.id("[CLS]")};
      window.text.tokens.insert(window.text.tokens.end(), asked.begin(), asked.end());
      window.text.tokens.push_back(encoder.tokenizer.id("[SEP]"));
      window.text.types.assign(window.text.tokens.size(), 0);
      for (std::size_t p = from; p < to; ++p) {
        const auto token = static_cast<std::int64_t>(window.text.tokens.size());
        window.text.tokens.push_back(pieces[p].token);
        window.places.emplace_back(pieces[p].begin, pieces[p].end);
        const bool inside = pieces[p].begin < answer_end && pieces[p].end > own.answer_begin;
        if (!inside) continue;
        if (window.begin == 0) window.begin = token;
        window.end = token;
      }
      window.text.tokens.push_back(encoder.tokenizer.id("[SEP]"));
      window.text.types.resize(window.text.tokens.size(), 1);
      windows.push_back(std::move(window));
      if (to == pieces.size() || learned) return;  // learns from the first window only
    }
  }

  // (B, N, 2), with padding excluded.
  at::Tensor logits_of(const at::Tensor& rows, const EncoderBatch& batch) const {
    const at::Tensor logits = rows.matmul(weight_) + bias_;
    const at::Tensor padding = (batch.types == 0).unsqueeze(2);  // and the question
    return logits.masked_fill(padding, -1e4);
  }

  // logits: begin and end of each token.
  void take_answer(const SquadWindow& window, std::span<const float> logits) {
    open_ = true;
    const SquadQuestion& own = data_.questions[window.question];
    Answer& best = best_[window.question];
    for (std::size_t begin = 0; begin < window.places.size(); ++begin) {
      const double from = logits[2 * (window.first + begin)];
      const std::size_t last = std::min(begin + kLongestAnswer, window.places.size());
      for (std::size_t end = begin; end < last; ++end) {
        const double score = from + logits[2 * (window.first + end) + 1];
        if (score <= best.score) continue;
        best.score = score;
        best.text = data_.paragraphs[own.paragraph].text.substr(
            window.places[begin].first, window.places[end].second - window.places[begin].first);
      }
    }
  }

  TuneOptions tune_;
  SquadData data_;
  std::vector<SquadWindow> train_, windows_;
  std::vector<std::size_t> asked_;  // question of each unit
  at::Tensor weight_, bias_;
  mutable std::vector<Answer> best_;  // by question
  mutable std::vector<double> exact_, f1_;
  mutable bool open_ = false;
};

}  // namespace

std::unique_ptr<EncoderTask> make_squad_task(const EncoderTaskOptions& options,
                                             const PretrainedEncoder& encoder) {
  return std::make_unique<SquadTask>(options, encoder);
}

}  // namespace coterie::train
