// Collectives on tensors of emulated devices: ordered by streams like NCCL's, and executed by gloo.
#pragma once

#include "kernels.h"

#include <ATen/core/ivalue_inl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

namespace emulated {

using c10d::OpType;
using c10d::ReduceOp;

struct StreamScope {  // makes a stream the current one of its device
  const int64_t device, before;
  StreamScope(int64_t device, int64_t stream) : device(device), before(std::exchange(current_streams[device], stream)) {}
  ~StreamScope() { current_streams[device] = before; }
};

// A started collective. Waiting for it makes the stream that is current at that time wait; the host continues.
class Collective final : public c10d::Work {
 public:
  Collective(int rank, OpType type, int64_t device, int64_t stream, std::vector<Tensor> held, std::vector<Tensor> outputs)
      : c10d::Work(rank, type), device_(device), held_(std::move(held)), outputs_(outputs) {
    {
      std::lock_guard<std::mutex> guard(order().lock);
      end_.stream = order().number_of(static_cast<int>(device), stream);
      end_.clock = order().now(end_.stream);
    }
    StreamScope scope(device, stream);
    c10::DeviceGuard guard(Device(DeviceType::CUDA, static_cast<DeviceIndex>(device)));
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<Device>{Device(DeviceType::CUDA, static_cast<DeviceIndex>(device))});
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override {
    std::lock_guard<std::mutex> guard(order().lock);
    return order().query(end_);
  }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return outputs_; }
  void synchronize() override {
    {
      std::lock_guard<std::mutex> guard(order().lock);
      order().wait(stream_number(device_), end_.clock);
    }
    held_.clear();  // from now on the order of streams protects the tensors
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const int64_t device_;
  Event end_;
  std::vector<Tensor> held_, outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// DDP's timer for the parts of a step. Time is not emulated.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

  // Releases the GIL, since gloo's threads are joined here and may need it to end.
  ~Nccl() override {
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    coalesced_.reset();
    sent_.clear();
    gloo_.reset();
  }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  void startCoalescing() override { coalesced_ = WorkPtr(); }
  WorkPtr endCoalescing() override { return coalesced_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const bool is_root = opts.rootRank == rank_;
    return run("broadcast", OpType::BROADCAST, is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors, tensors, opts, [&] {
      auto cpu_tensors = hosts(tensors);
      gloo_->broadcast(cpu_tensors, opts)->wait();
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return run("allreduce", OpType::ALLREDUCE, {}, tensors, tensors, opts, [&] { sum_each(tensors, opts); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return run("allreduce_coalesced", OpType::COALESCED, {}, tensors, tensors, opts, [&] { sum_each(tensors, opts); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const bool is_root = opts.rootRank == rank_;
    return run("reduce", OpType::REDUCE, is_root ? Tensors{} : tensors, is_root ? tensors : Tensors{}, tensors, opts, [&] {
      auto cpu_tensors = copies(tensors, opts.reduceOp);
      auto plain = opts;
      plain.reduceOp = gloo_op(opts.reduceOp);
      gloo_->reduce(cpu_tensors, plain)->wait();
      if (is_root) put(tensors, cpu_tensors, opts.reduceOp);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return run("allgather", OpType::ALLGATHER, inputs, flat(outputs), flat(outputs), opts, [&] {
      auto cpu_tensors = hosts(outputs);
      auto given = hosts(inputs);
      gloo_->allgather(cpu_tensors, given, opts)->wait();
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    return run("_allgather_base", OpType::_ALLGATHER_BASE, {input}, {output}, {output}, opts, [&] { gather_into(output, input, opts); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return run("allgather_into_tensor_coalesced", OpType::COALESCED, inputs, outputs, outputs, opts, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) gather_into(outputs[i], inputs[i], opts);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return run("gather", OpType::GATHER, inputs, flat(outputs), flat(outputs), opts, [&] {
      auto cpu_tensors = hosts(outputs);
      auto given = hosts(inputs);
      gloo_->gather(cpu_tensors, given, opts)->wait();
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    return run("scatter", OpType::SCATTER, flat(inputs), outputs, outputs, opts, [&] {
      auto cpu_tensors = hosts(outputs);
      auto given = hosts(inputs);
      gloo_->scatter(cpu_tensors, given, opts)->wait();
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    return run("reduce_scatter", OpType::REDUCE_SCATTER, flat(inputs), outputs, outputs, opts, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) {
        auto all = at::stack(hosts(inputs[i]));
        sum_slice(outputs[i], all, opts);
      }
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return run("_reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE, {input}, {output}, {output}, opts, [&] { sum_slice(output, host(input), opts); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return run("reduce_scatter_tensor_coalesced", OpType::COALESCED, inputs, outputs, outputs, opts, [&] {
      for (size_t i = 0; i < outputs.size(); ++i) sum_slice(outputs[i], host(inputs[i]), opts);
    });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& opts) override {
    return run("alltoall_base", OpType::ALLTOALL_BASE, {input}, {output}, {output}, opts, [&] {
      auto cpu_tensor = host(output), given = host(input);
      gloo_->alltoall_base(cpu_tensor, given, to, from, opts)->wait();
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto given = std::make_shared<Tensors>();
    for (const auto& one : tensors) given->push_back(host(one).clone());
    return run("send", OpType::SEND, tensors, {}, {}, c10d::BroadcastOptions(), [&] { sent_.emplace_back(gloo_->send(*given, to, tag), given); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run("recv", OpType::RECV, {}, tensors, tensors, c10d::BroadcastOptions(), [&] {
      auto cpu_tensors = hosts(tensors);
      gloo_->recv(cpu_tensors, from, tag)->wait();
    });
  }
  // As with NCCL, the host waits for a barrier.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    const int64_t device = opts.device_ids.empty() ? current : opts.device_ids[0];
    gloo_->barrier(opts)->wait();
    const int64_t where = site();
    {
      std::lock_guard<std::mutex> held(order().lock);
      record_sync("barrier", static_cast<int>(device), current_streams[device], where);
      order().host_waits(order().now(stream_number(device)));
    }
    return c10::make_intrusive<Collective>(rank_, OpType::BARRIER, device, current_streams[device], Tensors{}, Tensors{});
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int64_t, int64_t> streams_;  // by device
  std::vector<std::pair<WorkPtr, std::shared_ptr<Tensors>>> sent_;
  WorkPtr coalesced_;
  uint64_t sequence_ = 0;
  bool devices_checked_ = false;

  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
  static Tensors hosts(const Tensors& tensors) {
    Tensors cpu_tensors;
    for (const auto& one : tensors) cpu_tensors.push_back(host(one));
    return cpu_tensors;
  }
  static std::vector<Tensors> hosts(const std::vector<Tensors>& lists) {
    std::vector<Tensors> cpu_tensors;
    for (const auto& list : lists) cpu_tensors.push_back(hosts(list));
    return cpu_tensors;
  }

  // Gloo lacks averages and scaled sums. Tensors are scaled before a sum by gloo, or divided after it.
  static ReduceOp gloo_op(const ReduceOp& op) { return op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op; }
  static Tensor scaled(const Tensor& tensor, const ReduceOp& op) {
    if (op.op_ != ReduceOp::PREMUL_SUM) return tensor;
    const auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    return factor->tensor_factor.defined() ? tensor * host(factor->tensor_factor) : tensor * factor->double_factor;
  }
  Tensors copies(const Tensors& tensors, const ReduceOp& op) const {
    Tensors all;
    for (const auto& one : tensors) all.push_back(scaled(host(one), op).clone());
    return all;
  }
  void put(const Tensors& tensors, const Tensors& sums, const ReduceOp& op) const {
    for (size_t i = 0; i < tensors.size(); ++i) host(tensors[i]).copy_(op.op_ == ReduceOp::AVG ? sums[i].div(size_) : sums[i]);
  }
  void sum_each(const Tensors& tensors, const c10d::AllreduceOptions& opts) {
    c10d::AllreduceOptions plain = opts;
    plain.reduceOp = gloo_op(opts.reduceOp);
    auto sums = copies(tensors, opts.reduceOp);
    for (auto& one : sums) {
      Tensors alone{one};
      gloo_->allreduce(alone, plain)->wait();
    }
    put(tensors, sums, opts.reduceOp);
  }
  void gather_into(const Tensor& output, const Tensor& input, const c10d::AllgatherOptions& opts) {
    auto cpu_tensor = host(output), given = host(input);
    gloo_->_allgather_base(cpu_tensor, given, opts)->wait();
  }
  void sum_slice(const Tensor& output, const Tensor& input, const c10d::ReduceScatterOptions& opts) {
    c10d::AllreduceOptions plain;
    plain.timeout = opts.timeout;
    plain.reduceOp = gloo_op(opts.reduceOp);
    Tensors sum{scaled(input, opts.reduceOp).contiguous().clone()};
    gloo_->allreduce(sum, plain)->wait();
    put({output}, {sum[0].view({size_, -1}).select(0, rank_).view(output.sizes())}, opts.reduceOp);
  }

  // Issues a collective on NCCL's stream, which waits for the current stream. A synchronous collective is issued on the
  // current stream itself.
  template <typename Options, typename Execute>
  WorkPtr run(const std::string& op, OpType type, const Tensors& inputs, const Tensors& outputs, const Tensors& results, const Options& opts, Execute execute) {
    int64_t device = -1;
    std::vector<Use> uses;
    for (const auto* list : {&inputs, &outputs})
      for (const auto& one : *list) {
        TORCH_CHECK(one.is_cuda(), "No backend type associated with device type cpu (", op, " on NCCL)");
        TORCH_CHECK(one.is_non_overlapping_and_dense(), "Tensors must be contiguous (", op, " on NCCL)");
        TORCH_CHECK(device < 0 || device == one.get_device(), "Tensors of one collective are on one device (", op, " on NCCL)");
        device = one.get_device();
        use(uses, one, list == &outputs);
      }
    if (device < 0) device = current;
    bool asynchronous = true;
    if constexpr (requires { opts.asyncOp; }) asynchronous = opts.asyncOp;
    refuse_shared_device(device);
    const int64_t stream = asynchronous ? stream_of(device) : current_streams[device];
    const int64_t where = site();
    execute();
    {
      std::lock_guard<std::mutex> held(order().lock);
      order().wait(order().number_of(static_cast<int>(device), stream), order().now(stream_number(device)));
      StreamScope scope(device, stream);
      issue_on_current_stream(op, device, uses, where);
    }
    sequence_ += 1;
    Tensors held = inputs;
    held.insert(held.end(), outputs.begin(), outputs.end());
    coalesced_ = c10::make_intrusive<Collective>(rank_, type, device, stream, asynchronous ? held : Tensors{}, results);
    return coalesced_;
  }

  // Refuses two ranks on one device, as NCCL does when it creates a communicator. NCCL_HOSTID identifies the machine.
  void refuse_shared_device(int64_t device) {
    if (std::exchange(devices_checked_, true)) return;
    const char* machine = std::getenv("NCCL_HOSTID");
    auto own = at::empty({2}, at::TensorOptions(c10::kLong));
    own.data_ptr<int64_t>()[0] = static_cast<int64_t>(std::hash<std::string>()(machine ? machine : ""));
    own.data_ptr<int64_t>()[1] = physical[device];
    auto all = at::empty({2 * size_}, at::TensorOptions(c10::kLong));
    gloo_->_allgather_base(all, own)->wait();
    const auto* each = all.data_ptr<int64_t>();
    for (int i = 0; i < size_; ++i)
      TORCH_CHECK(i == rank_ || each[2 * i] != each[2 * rank_] || each[2 * i + 1] != each[2 * rank_ + 1],
                  "NCCL error: invalid usage. Duplicate GPU detected : rank ", std::min(i, rank_), " and rank ", std::max(i, rank_),
                  " both on CUDA device ", physical[device]);
  }

  int64_t stream_of(int64_t device) {
    auto& stream = streams_[device];
    if (stream == 0) stream = Guard().getNewStream(Device(DeviceType::CUDA, static_cast<DeviceIndex>(device)), 0).id();
    return stream;
  }
};

}  // namespace emulated
