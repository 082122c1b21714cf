// SPDX-License-Identifier: MIT
#define USE_C10D_GLOO
#include "train/ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/core.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <numeric>
#include <string_view>
#include <thread>
#include <utility>

#include "coterie/error.h"
#include "train/nccl.h"

namespace coterie::train {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePointer = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;

// Keys of the store: the message of the first rank that failed, and how many ranks know it.
constexpr const char* kFailure = "failure";
constexpr const char* kHeard = "heard";

std::int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

bool serves_store(const Place& place) { return place.rank == 0 && !place.agent; }

StorePointer make_store(const Place& place, const RankOptions& options, bool serves) {
  c10d::TCPStoreOptions wanted;
  wanted.port = static_cast<std::uint16_t>(place.port);
  wanted.isServer = serves;
  wanted.waitWorkers = false;
  wanted.timeout = options.timeout;
  try {
    const auto store = c10::make_intrusive<c10d::TCPStore>(place.address, wanted);
    // Keys of an earlier attempt stay in an agent's store.
    return c10::make_intrusive<c10d::PrefixStore>(fmt::format("coterie/{}", place.restarts), store);
  } catch (const std::exception& error) {
    const std::string_view message = error.what();
    throw Error(fmt::format("[ranks] rank {} of {} cannot {} {}:{} within {} s: {}", place.rank,
                            place.size, wanted.isServer ? "listen at" : "reach rank 0 at",
                            place.address, place.port, options.timeout.count(),
                            message.substr(0, message.find('\n'))));
  }
}

// A group of ranks of this store: Gloo for tensors on the CPU, NCCL for those on a GPU.
Group make_group(const StorePointer& parent, const std::string& name, std::int64_t rank,
                 std::int64_t size, const RankOptions& options) {
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, parent);
  const int own = static_cast<int>(rank), all = static_cast<int>(size);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, own, all);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                    c10::make_intrusive<c10d::ProcessGroupGloo>(
                        c10::make_intrusive<c10d::PrefixStore>("cpu", store), own, all,
                        c10d::ProcessGroupGloo::Options::create_default(options.timeout)));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  if (options.gpu) {
    group->setBackend(
        c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL,
        make_nccl(c10::make_intrusive<c10d::PrefixStore>("gpu", store), own, all, options.timeout));
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  }
  group->setGroupName(name);
  return group;
}

}  // namespace

struct Ranks::Groups {
  StorePointer store;
  std::atomic<bool> failed{false};  // this rank, or it knows of another
  Group all;                        // every rank
  Group context;                    // those that share this rank's sequences, if several
  Group data;  // those with the same positions of other sequences, if there is `context`
  torch_api::SequenceRanks sequence;
  std::int64_t texts = 0;  // shared so far
  at::Tensor vote;
  c10::intrusive_ptr<c10d::Work> voting;
  std::mutex mutex;  // gradients are summed by autograd's threads
  std::map<std::string, Traffic> traffic;

  void count(const std::string& what, std::int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    Traffic& own = traffic[what];
    ++own.calls;
    own.bytes += bytes;
  }

  // Bytes to other ranks only.
  at::Tensor exchange(const at::Tensor& bytes, const torch_api::SequenceRanks::Sizes& to,
                      const torch_api::SequenceRanks::Sizes& from) {
    count("sequences", bytes.numel() - to[static_cast<std::size_t>(sequence.rank)]);
    at::Tensor input = bytes;
    at::Tensor got =
        at::empty({std::accumulate(from.begin(), from.end(), std::int64_t{0})}, bytes.options());
    std::vector<std::int64_t> input_sizes = to, got_sizes = from;
    context->alltoall_base(got, input, got_sizes, input_sizes)->wait();
    return got;
  }
};

Ranks::Ranks(const Place& place, const RankOptions& options)
    : place_(place), options_(options), groups_(std::make_shared<Groups>()) {
  if (place.size % options.context != 0) {
    throw Error(fmt::format(
        "[train] expected a number of ranks that --train.context divides; got {} ranks and {}",
        place.size, options.context));
  }
  groups_->store = make_store(place, options, serves_store(place));
  groups_->all = make_group(groups_->store, "all", place.rank, place.size, options);
  if (options.other_failed) watch();
  if (options.context == 1) return;
  const std::int64_t inside = place.rank % options.context;
  groups_->context = make_group(groups_->store, fmt::format("context{}", data_rank()), inside,
                                options.context, options);
  groups_->data =
      make_group(groups_->store, fmt::format("data{}", inside), data_rank(), data_size(), options);
  groups_->sequence = {
      inside, options.context,
      [groups = groups_.get()](const auto& bytes, const auto& to, const auto& from) {
        return groups->exchange(bytes, to, from);
      }};
}

// Threads of the groups may wait for ranks that are gone: the process ends without destroying them.
Ranks::~Ranks() { new std::shared_ptr<Groups>(std::move(groups_)); }

const torch_api::SequenceRanks* Ranks::sequence() const {
  return groups_->context ? &groups_->sequence : nullptr;
}

std::string Ranks::from_first(const std::string& text) {
  const std::string key = fmt::format("text{}", groups_->texts++);
  if (first()) groups_->store->set(key, bytes_of(text));
  return first() ? text : text_of(groups_->store->get(key));
}

void Ranks::sum(const at::Tensor& tensor, const char* what) {
  groups_->count(what, bytes_of(tensor));
  Tensors tensors = {tensor.detach()};
  groups_->all->allreduce(tensors)->wait();
}

namespace {

void broadcast_in(const Group& group, const at::Tensor& tensor, std::int64_t from) {
  Tensors tensors = {tensor.detach()};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  group->broadcast(tensors, options)->wait();
}

}  // namespace

void Ranks::broadcast(const at::Tensor& tensor, std::int64_t from, const char* what) {
  groups_->count(what, rank() == from ? bytes_of(tensor) : 0);
  broadcast_in(groups_->all, tensor, from);
}

void Ranks::broadcast_data(const at::Tensor& tensor, std::int64_t from, const char* what) {
  groups_->count(what, data_rank() == from ? bytes_of(tensor) : 0);
  broadcast_in(groups_->data ? groups_->data : groups_->all, tensor, from);
}

void Ranks::to_first(const at::Tensor& tensor, std::int64_t from, const char* what) {
  Tensors tensors = {tensor};
  const bool sends = rank() == from;
  groups_->count(what, sends ? bytes_of(tensor) : 0);
  const auto work = sends ? groups_->all->send(tensors, 0, 0)
                          : groups_->all->recv(tensors, static_cast<int>(from), 0);
  work->wait();
}

void Ranks::barrier() {
  const at::Tensor one = at::full({1}, 1, at::kInt);
  sum(one, "barrier");
}

void Ranks::start_vote(bool yes) {
  groups_->vote = at::full({1}, yes ? 1 : 0, at::kInt);
  groups_->count("votes", bytes_of(groups_->vote));
  Tensors tensors = {groups_->vote};
  groups_->voting = groups_->all->allreduce(tensors);
}

bool Ranks::finish_vote() {
  groups_->voting->wait();
  return groups_->vote.item<int>() > 0;
}

std::map<std::string, Traffic> Ranks::traffic() const {
  const std::lock_guard<std::mutex> lock(groups_->mutex);
  return groups_->traffic;
}

namespace {

// Whether an exception comes from the connection to another rank.
bool is_lost_rank(std::string_view message) {
  constexpr std::array<std::string_view, 9> kSigns = {
      "gloo", "Connection",  "onnection reset", "imed out", "timeout",
      "NCCL", "Broken pipe", "Socket",          "peer"};
  return std::any_of(kSigns.begin(), kSigns.end(), [&](std::string_view sign) {
    return message.find(sign) != std::string_view::npos;
  });
}

// The message of the rank that failed first, if it left one. It may be about to.
std::string message_of_failed(c10d::Store& store) {
  constexpr int kTries = 40;
  constexpr std::chrono::milliseconds kPause{50};
  for (int i = 0; i < kTries; ++i) {
    if (store.check({kFailure})) return text_of(store.get(kFailure));
    std::this_thread::sleep_for(kPause);
  }
  return "";
}

std::string stopped_because_of(const std::string& other, const Place& place) {
  return fmt::format("[ranks] rank {} of {} stopped because of {}", place.rank, place.size, other);
}

// The rank that serves the store stays until all others have read the message.
void wait_for_listeners(c10d::Store& store, const Place& place) {
  constexpr int kTries = 60;
  constexpr std::chrono::milliseconds kPause{50};
  store.add(kHeard, 1);
  for (int i = 0; serves_store(place) && i < kTries && store.add(kHeard, 0) < place.size; ++i) {
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

// A rank that waits for a failed one in a collective may not notice that it is gone, or only after
// the timeout. A connection of its own: calls that wait occupy the other.
void Ranks::watch() {
  const StorePointer store = make_store(place_, options_, /*serves=*/false);
  std::thread([store, groups = groups_, place = place_, failed = options_.other_failed] {
    constexpr std::chrono::milliseconds kPause{300};
    try {
      while (!store->check({kFailure})) std::this_thread::sleep_for(kPause);
      if (groups->failed.exchange(true)) return;  // it says so itself
      const std::string message = stopped_because_of(text_of(store->get(kFailure)), place);
      wait_for_listeners(*store, place);
      failed(message);
    } catch (const std::exception&) {  // the store is gone; the groups will notice
    }
  }).detach();
}

std::string Ranks::explain(const std::exception& error) {
  std::string message = error.what();
  message = message.substr(0, message.find("\nException raised from"));  // torch appends a trace
  const bool lost = dynamic_cast<const Error*>(&error) == nullptr && is_lost_rank(message);
  std::string other;
  groups_->failed = true;
  try {
    if (lost) {
      other = message_of_failed(*groups_->store);
    } else {
      groups_->store->set(kFailure, bytes_of(fmt::format("rank {}: {}", rank(), message)));
    }
    if (!lost || !other.empty()) wait_for_listeners(*groups_->store, place_);
  } catch (const std::exception&) {  // the store was in the rank that is gone
  }
  if (!lost) return fmt::format("{} (rank {} of {})", message, rank(), size());
  if (!other.empty()) return stopped_because_of(other, place_);
  return fmt::format(
      "[ranks] rank {} of {} lost another rank, which was killed, crashed or did not answer within "
      "{} s; continue from the last checkpoint with --resume: {}",
      rank(), size(), options_.timeout.count(), message.substr(0, message.find('\n')));
}

namespace {

// Sums instead of means: losses are already divided by the targets of all ranks.
class SumHook : public c10d::CppCommHookInterface<Group> {
 public:
  SumHook(const Group& group, std::function<void(std::int64_t bytes)> count)
      : CppCommHookInterface(group), count_(std::move(count)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    count_(bytes_of(bucket.getBuffer()));
    Tensors tensors = {bucket.getBufferRef()};
    return state_->allreduce(tensors)->getFuture();
  }

 private:
  std::function<void(std::int64_t)> count_;
};

// The reducer would assign buckets again after the first backward pass, by the order in which
// gradients became ready; sums of more than two ranks would then change their order.
class FixedReducer : public c10d::Reducer {
 public:
  FixedReducer(const Tensors& parameters, std::vector<std::vector<std::size_t>> buckets,
               const Group& group)
      : Reducer(parameters, std::move(buckets), group, std::vector<bool>(parameters.size(), false),
                c10d::kDefaultBucketBytesCap, /*find_unused_parameters=*/false,
                /*gradient_as_bucket_view=*/false, /*param_names=*/{},
                c10d::kDefaultFirstBucketBytes, /*skip_all_reduce_unused_params=*/false,
                /*use_python_reducer=*/false, /*bucket_bytes_cap_list=*/{}) {
    has_rebuilt_bucket_ = true;
  }
};

// Buckets of consecutive parameters, the last ones first: their gradients are ready first.
std::vector<std::vector<std::size_t>> make_buckets(const Tensors& parameters) {
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {c10d::kDefaultFirstBucketBytes, c10d::kDefaultBucketBytesCap},
      std::vector<bool>(parameters.size(), false)));
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

}  // namespace

struct GradientSums::State {
  FixedReducer reducer;

  State(const Tensors& parameters, const Group& group)
      : reducer(parameters, make_buckets(parameters), group) {}
};

GradientSums::GradientSums(Ranks& ranks, const Tensors& parameters)
    : state_(std::make_unique<State>(parameters, ranks.groups_->all)) {
  state_->reducer.register_comm_hook(std::make_unique<SumHook>(
      ranks.groups_->all,
      [groups = ranks.groups_](std::int64_t bytes) { groups->count("gradients", bytes); }));
}

GradientSums::~GradientSums() = default;

void GradientSums::before_last_backward() { state_->reducer.prepare_for_backward({}); }

}  // namespace coterie::train
