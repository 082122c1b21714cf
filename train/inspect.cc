// SPDX-License-Identifier: MIT
#include "train/inspect.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/xlogy.h>

#include <algorithm>
#include <cmath>

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

// Tokens per cluster, (items, h, C); undefined where there are no clusters.
at::Tensor cluster_sizes(const AttentionRecord& record) {
  const Mechanism mechanism = resolve(record.mechanism, record.options.causal);
  const bool grouped = std::holds_alternative<ClusteredParams>(mechanism) ||
                       std::holds_alternative<ImprovedClusteredParams>(mechanism);
  const auto* const routing = std::get_if<RoutingParams>(&mechanism);
  const bool cast = std::holds_alternative<CastParams>(mechanism);
  if (!grouped && !routing && !cast) return {};
  if (routing) {
    const at::Tensor labels =
        torch_api::nearest_centroids(record.q, record.options.centroids, record.options.q_lengths);
    return (labels.unsqueeze(-1) == at::arange(routing->clusters, at::kInt)).sum(2);
  }
  const AttentionDetails details =
      torch_api::attention_details(record.q, record.k, record.v, mechanism, record.options);
  if (grouped) return details.get("offsets").diff();
  const at::Tensor sizes = (details.get("members") >= 0).sum(-1);
  return sizes.expand({-1, record.q.size(1), -1});  // one clustering may serve all heads
}

void report_sizes(const at::Tensor& sizes_BHC, std::vector<HeadReport>& heads) {
  const at::Tensor sizes = sizes_BHC.to(at::kDouble);
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
  const at::Tensor sizes = cluster_sizes(record);
  if (sizes.defined()) report_sizes(sizes, report.heads);
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

}  // namespace coterie::train
