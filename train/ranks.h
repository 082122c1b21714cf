// SPDX-License-Identifier: MIT
// The processes of one run (ranks) and what they tell each other, on torch's c10d: Gloo on CPUs,
// NCCL on GPUs. A run of one process does not make any of this.
//
// Ranks 0 ... C-1 share the sequences of the first part of a batch (context parallel), ranks C ...
// 2C-1 those of the second, and so on (data parallel). All functions without "own" in their comment
// are collective: every rank calls them in the same order. What goes wrong in another rank arrives
// as an exception of c10d, which explain() turns into a message.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coterie/torch/ulysses.h"
#include "train/place.h"

namespace coterie::train {

struct RankOptions {
  std::int64_t context = 1;  // C
  bool gpu = false;
  std::chrono::seconds timeout{600};  // for a rank that does not answer
  // Called on a thread of its own when another rank has failed, with a message; must end the
  // process. May be empty.
  std::function<void(const std::string& message)> other_failed{};
};

// Calls of one kind of collective, and the bytes that this rank gave to them.
struct Traffic {
  std::int64_t calls = 0, bytes = 0;
};

class Ranks {
 public:
  Ranks(const Place& place, const RankOptions& options);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  std::int64_t rank() const { return place_.rank; }
  std::int64_t size() const { return place_.size; }
  int local_size() const { return place_.local_size; }  // on this machine
  bool first() const { return place_.rank == 0; }       // writes the log and the checkpoints
  std::int64_t data_rank() const { return place_.rank / options_.context; }
  std::int64_t data_size() const { return place_.size / options_.context; }
  std::int64_t context_size() const { return options_.context; }
  const char* back_end() const { return options_.gpu ? "nccl" : "gloo"; }
  // The ranks that share this one's sequences; null if C is 1.
  const torch_api::SequenceRanks* sequence() const;

  // The text of rank 0 on every rank.
  std::string from_first(const std::string& text);
  // In place: the sum over all ranks; the tensor of rank `from`. `what` names the traffic.
  void sum(const at::Tensor& tensor, const char* what);
  void broadcast(const at::Tensor& tensor, std::int64_t from, const char* what);
  // In place: of the ranks with the same positions, one for each part of the batch.
  void broadcast_data(const at::Tensor& tensor, std::int64_t from_data_rank, const char* what);
  // Copies a tensor on the CPU from rank `from` to rank 0; only these two call it.
  void to_first(const at::Tensor& tensor, std::int64_t from, const char* what);
  void barrier();

  // Whether any rank said yes. The answer of start_vote arrives with finish_vote.
  void start_vote(bool yes);
  bool finish_vote();

  // Own: the message for an exception of this rank. Tells the other ranks about it, or says which
  // of them failed if that is its cause.
  std::string explain(const std::exception& error);

  std::map<std::string, Traffic> traffic() const;  // own

 private:
  friend class GradientSums;
  struct Groups;

  void watch();

  Place place_;
  RankOptions options_;
  std::shared_ptr<Groups> groups_;
};

// Sums the gradients of all ranks in buckets while the backward pass computes the others (c10d's
// reducer). Buckets are fixed, so a resumed run adds in the same order.
class GradientSums {
 public:
  GradientSums(Ranks& ranks, const std::vector<at::Tensor>& parameters);
  ~GradientSums();
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  // The next backward pass is the last of the step: it ends with the sums in the gradients.
  void before_last_backward();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace coterie::train
