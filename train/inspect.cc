// SPDX-License-Identifier: MIT
#include "train/inspect.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/xlogy.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "coterie/error.h"
#include "coterie/torch/centroids.h"
#include "train/eval_mode.h"
#include "train/evaluate.h"

namespace coterie::train {

namespace {

using torch_api::AttentionDetails;
using torch_api::AttentionRecord;

constexpr std::int64_t kLongest = 512;  // tokens of an inspected row

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().to(at::kCPU, at::kFloat) : tensor;
}

AttentionRecord on_cpu(AttentionRecord record) {
  torch_api::AttentionOptions& options = record.options;
  for (at::Tensor* tensor :
       {&record.q, &record.k, &record.v, &options.centroids, &options.gate, &options.logit_scale}) {
    *tensor = on_cpu(*tensor);
  }
  for (at::Tensor* tensor : {&options.q_lengths, &options.k_lengths, &options.cu_seqlens_q,
                             &options.cu_seqlens_k, &options.mask}) {
    if (tensor->defined()) *tensor = tensor->to(at::kCPU);
  }
  return record;
}

}  // namespace

at::Tensor cluster_members(const AttentionRecord& record) {
  const Mechanism mechanism = resolve(record.mechanism, record.options.causal);
  const bool grouped = std::holds_alternative<ClusteredParams>(mechanism) ||
                       std::holds_alternative<ImprovedClusteredParams>(mechanism);
  const auto* const routing = std::get_if<RoutingParams>(&mechanism);
  const bool cast = std::holds_alternative<CastParams>(mechanism);
  if (!grouped && !routing && !cast) return {};
  if (routing) {
    const at::Tensor labels =
        torch_api::nearest_centroids(record.q, record.options.centroids, record.options.q_lengths);
    return labels.unsqueeze(-1) == at::arange(routing->clusters, at::kInt);
  }
  const AttentionDetails details =
      torch_api::attention_details(record.q, record.k, record.v, mechanism, record.options);
  if (grouped) {
    const std::int64_t clusters = details.get("offsets").size(-1) - 1;
    return details.get("labels").unsqueeze(-1) == at::arange(clusters, at::kInt);
  }
  // Lists (C, size) of tokens, -1 where there is none: these mark a column that is cut off.
  const at::Tensor lists = details.get("members");
  const std::int64_t N = record.q.size(2);
  const at::Tensor places = lists.where(lists >= 0, N).to(at::kLong);
  at::Tensor members = at::zeros({lists.size(0), lists.size(1), lists.size(2), N + 1}, at::kBool);
  members.scatter_(3, places, true);
  return members.narrow(3, 0, N).transpose(2, 3);
}

namespace {

void report_sizes(const at::Tensor& members_BHNC, std::vector<HeadReport>& heads) {
  const at::Tensor sizes = members_BHNC.sum(2, /*keepdim=*/false, at::kDouble)
                               .expand({-1, static_cast<std::int64_t>(heads.size()), -1});
  const at::Tensor sorted = std::get<0>(sizes.sort(-1, /*descending=*/true)).mean(0);
  const at::Tensor empty = (sizes == 0).to(at::kDouble).sum(-1).mean(0);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const at::Tensor own = sorted[static_cast<std::int64_t>(h)].contiguous();
    heads[h].sizes.assign(own.const_data_ptr<double>(), own.const_data_ptr<double>() + own.numel());
    heads[h].empty = empty[static_cast<std::int64_t>(h)].item<double>();
  }
}

// Over the last dimension, in nats.
at::Tensor entropy_of(const at::Tensor& p) { return -at::xlogy(p, p).sum(-1); }

// Rows that sum to 1; rows of zeros stay.
at::Tensor made_to_sum_to_one(const at::Tensor& rows) {
  const at::Tensor sum = rows.sum(-1, /*keepdim=*/true);
  return rows / sum.where(sum > 0, at::ones_like(sum));
}

// Queries with nonzero weights.
at::Tensor attending(const at::Tensor& rows) { return rows.sum(-1) > 0; }

double mean_where(const at::Tensor& values, const at::Tensor& counted, double otherwise) {
  const at::Tensor chosen = values.masked_select(counted);
  return chosen.numel() == 0 ? otherwise : chosen.to(at::kDouble).mean().item<double>();
}

GroupReport report_group(const AttentionRecord& record, const at::Tensor& rows_BHNS) {
  GroupReport report{.layer = record.layer,
                     .group = record.group,
                     .attention = to_string(record.mechanism),
                     .heads = std::vector<HeadReport>(static_cast<std::size_t>(record.q.size(1)))};
  const at::Tensor full_BHNS = full_rows(record);
  const at::Tensor kept_BHN = at::minimum(full_BHNS, rows_BHNS).sum(-1);
  const at::Tensor entropy_BHN = entropy_of(made_to_sum_to_one(rows_BHNS));
  const at::Tensor asked_BHN = attending(full_BHNS), weighs_BHN = attending(rows_BHNS);
  for (std::size_t h = 0; h < report.heads.size(); ++h) {
    const auto head = static_cast<std::int64_t>(h);
    report.heads[h].mass = mean_where(kept_BHN.select(1, head), asked_BHN.select(1, head), 1);
    report.heads[h].entropy =
        mean_where(entropy_BHN.select(1, head), weighs_BHN.select(1, head), 0);
  }
  const at::Tensor members = cluster_members(record);
  if (members.defined()) report_sizes(members, report.heads);
  return report;
}

// Head by head: the mechanism's name and weights (B, N, S) that sum to 1.
struct Head {
  std::string mechanism;
  at::Tensor weights_BNS, weighs_BN;
};

struct Moments {
  std::int64_t count = 0;
  double sum = 0, squares = 0;

  void add(const at::Tensor& values) {
    const at::Tensor exact = values.to(at::kDouble);
    count += exact.numel();
    sum += exact.sum().item<double>();
    squares += exact.square().sum().item<double>();
  }
  double mean() const { return sum / static_cast<double>(count); }
  double deviation() const {
    return std::sqrt(std::max(0.0, squares / static_cast<double>(count) - mean() * mean()));
  }
};

// JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2 of the rows that are nonzero in both.
at::Tensor divergence_of(const Head& a, const Head& b) {
  const at::Tensor mixed = entropy_of((a.weights_BNS + b.weights_BNS) / 2);
  const at::Tensor own = (entropy_of(a.weights_BNS) + entropy_of(b.weights_BNS)) / 2;
  return (mixed - own).masked_select(a.weighs_BN & b.weighs_BN);
}

// Over all pairs of different heads of a layer, by their mechanisms in the order of the heads.
void add_divergences(std::int64_t layer, const std::vector<Head>& heads,
                     std::vector<Divergence>& divergences) {
  std::vector<std::string> names;
  for (const Head& head : heads) {
    if (std::find(names.begin(), names.end(), head.mechanism) == names.end()) {
      names.push_back(head.mechanism);
    }
  }
  for (auto a = names.begin(); a != names.end(); ++a) {
    for (auto b = a; b != names.end(); ++b) {
      Moments moments;
      for (std::size_t i = 0; i < heads.size(); ++i) {
        for (std::size_t j = a == b ? i + 1 : 0; j < heads.size(); ++j) {
          if (heads[i].mechanism != *a || heads[j].mechanism != *b) continue;
          moments.add(divergence_of(heads[i], heads[j]));
        }
      }
      if (moments.count == 0) continue;
      divergences.push_back({.layer = layer,
                             .a = *a,
                             .b = *b,
                             .mean = moments.mean(),
                             .deviation = moments.deviation()});
    }
  }
}

void add_heads(const AttentionRecord& record, const at::Tensor& rows_BHNS,
               std::vector<Head>& heads) {
  const at::Tensor weights = made_to_sum_to_one(rows_BHNS), weighs = attending(rows_BHNS);
  for (std::int64_t head = 0; head < rows_BHNS.size(1); ++head) {
    heads.push_back(
        {mechanism_name(record.mechanism), weights.select(1, head), weighs.select(1, head)});
  }
}

// Uses the model's specs, without the values that resolve() fills in.
void name_groups(const std::vector<AttentionSpec>& specs, std::vector<GroupReport>& groups) {
  for (GroupReport& group : groups) {
    const std::size_t layer = specs.size() == 1 ? 0 : static_cast<std::size_t>(group.layer);
    const HeadGroup& spec = specs.at(layer).groups.at(static_cast<std::size_t>(group.group));
    group.attention = to_string(spec.mechanism);
  }
}

// Colours (C, 3), 0 to 255: hues at golden angles, in three brightnesses.
at::Tensor palette(std::int64_t colours) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < colours; ++i) {
    const double hue = 6 * std::fmod(static_cast<double>(i) * 0.618034, 1.0);
    const double bright = 255 * (1 - 0.2 * static_cast<double>(i % 3));
    for (const double shift : {0.0, 4.0, 2.0}) {  // red, green, blue
      const double away = std::fabs(std::fmod(hue + shift, 6.0) - 3);
      values.push_back(bright * std::clamp(away - 1, 0.15, 1.0));
    }
  }
  return at::tensor(values, at::kDouble).view({-1, 3});
}

Picture picture_of(const ImageAnswers& shape, std::int64_t channels, const at::Tensor& values) {
  const at::Tensor bytes = values.round().clamp(0, 255).to(at::kByte).contiguous();
  return {shape.height, shape.width, channels,
          std::string(reinterpret_cast<const char*>(bytes.const_data_ptr<std::uint8_t>()),
                      static_cast<std::size_t>(bytes.numel()))};
}

// Of tokens with members (N, C); tokens are values by pixel and channel.
Picture coloured(const ImageAnswers& shape, const at::Tensor& members_NC) {
  const at::Tensor weights =
      members_NC.to(at::kDouble).view({-1, shape.channels, members_NC.size(1)}).sum(1);
  const at::Tensor sum = weights.sum(1, /*keepdim=*/true).clamp_min(1);
  return picture_of(shape, 3, weights.matmul(palette(weights.size(1))) / sum);
}

// The largest number of rows, up to `rows`, for which the validation data has a batch.
std::int64_t available_rows(const Task& task, std::int64_t rows) {
  while (rows > 1 && task.batches(Split::valid, rows) < 1) --rows;
  return rows;
}

}  // namespace

Inspection inspect_records(const std::vector<AttentionRecord>& records) {
  const at::NoGradGuard no_grad;
  Inspection inspection;
  std::vector<Head> heads;  // of the layer
  for (std::size_t r = 0; r < records.size(); ++r) {
    const AttentionRecord record = on_cpu(records[r]);
    const at::Tensor rows = attention_rows(record);
    inspection.groups.push_back(report_group(record, rows));
    add_heads(record, rows, heads);
    if (r + 1 < records.size() && records[r + 1].layer == record.layer) continue;
    add_divergences(record.layer, heads, inspection.divergences);
    heads.clear();
  }
  return inspection;
}

Inspection inspect(const torch_api::Model& model, const Task& task, std::int64_t rows,
                   std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model);
  const c10::Device device = model->parameters().front().device();
  const Batch batch = to_device(task.batch(Split::valid, 0, available_rows(task, rows)), device);
  std::vector<AttentionRecord> records;
  torch_api::PassContext context;
  if (batch.lengths.defined()) context.lengths = batch.lengths.clamp_max(kLongest);
  context.seed = seed;
  context.records = &records;
  const std::int64_t length = std::min(batch.tokens.size(1), kLongest);
  model->forward(batch.tokens.narrow(1, 0, length), context);
  Inspection inspection = inspect_records(records);
  name_groups(model->transformer()->options().attention, inspection.groups);
  return inspection;
}

Picture cluster_picture(const torch_api::Model& model, const Task& task, std::int64_t rows,
                        std::uint64_t seed) {
  const std::optional<ImageAnswers> shape = task.image();
  if (!shape) {
    throw Error("[inspect] expected a task whose tokens are an image, images or pathfinder; got " +
                task.name());
  }
  const at::NoGradGuard no_grad;
  const EvalMode eval_mode(model);
  const c10::Device device = model->parameters().front().device();
  const Batch batch = task.batch(Split::valid, 0, available_rows(task, rows));
  std::vector<AttentionRecord> records;
  torch_api::PassContext context;
  context.seed = seed;
  context.records = &records;
  model->forward(batch.tokens.to(device), context);
  std::vector<at::Tensor> members;
  for (const AttentionRecord& record : records) {
    const at::Tensor own = cluster_members(on_cpu(record));
    if (own.defined()) members.push_back(own.select(1, 0));
  }
  if (members.empty())
    throw Error("[inspect] expected attention with clusters; the model has none");
  std::vector<Picture> pictures;
  const double brightest = 255.0 / static_cast<double>(task.vocabulary() - 1);
  for (std::int64_t row = 0; row < batch.tokens.size(0); ++row) {
    pictures.push_back(picture_of(*shape, shape->channels, batch.tokens[row] * brightest));
    for (const at::Tensor& own : members) pictures.push_back(coloured(*shape, own[row]));
  }
  constexpr std::int64_t kScale = 4;
  return contact_sheet(pictures, static_cast<std::int64_t>(members.size()) + 1, kScale);
}

}  // namespace coterie::train
