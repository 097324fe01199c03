// The emulated devices: the current device, streams, events, memory, generators, and torch's hooks for CUDA.
#pragma once

#include "order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>

namespace emulated {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr int MAX_DEVICES = 64;
inline std::atomic<int> count{0};  // number of devices; 0 while the emulation is off
inline std::atomic<bool> initialised{false};
inline std::atomic<int> sync_mode{0};  // 1: warn of host syncs, 2: raise
inline std::atomic<int64_t> capacity{0};
inline std::array<int64_t, MAX_DEVICES> physical{};  // by index: the index among the machine's devices
inline thread_local DeviceIndex current = 0;
inline thread_local std::array<int64_t, MAX_DEVICES> current_streams{};

// Returns the host's current place in the Python code, as a number that `Sites` decodes; -1 if it is unknown.
inline std::function<int64_t()> site = [] { return int64_t{-1}; };

inline DeviceIndex index_of(Device device) { return device.index() < 0 ? current : device.index(); }

inline void check_index(int64_t index) {
  TORCH_CHECK(count > 0, "The emulation of CUDA is off: a tensor was used, or a function called, after the end of its `with` block.");
  TORCH_CHECK(index < count, "CUDA error: invalid device ordinal: ", index, ", and there are ", count.load());
}

inline int stream_number(int64_t device) { return order().number_of(static_cast<int>(device), current_streams[device]); }

inline void record_sync(const std::string& what, int device, int64_t stream, int64_t where) {
  Finding finding;
  finding.kind = "sync", finding.op = what, finding.device = device, finding.stream = stream, finding.site = where, finding.waited = true;
  order().findings.push_back(finding);
}

// Warns or raises, according to torch.cuda.set_sync_debug_mode.
inline void check_sync_mode() {
  TORCH_CHECK(sync_mode < 2, "called a synchronizing CUDA operation");
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

// Memory

struct Statistics {
  int64_t current = 0, peak = 0, blocks = 0, refused = 0;
};
inline std::array<Statistics, MAX_DEVICES> statistics;
inline int64_t run = 0;  // number of times the emulation was switched on; protected by the order's lock

inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& all = order();
  std::vector<Access> uses;
  {
    std::lock_guard<std::mutex> held(all.lock);
    uses = all.unfinished(*block);
  }
  const int64_t where = uses.empty() ? -1 : site();
  {
    std::lock_guard<std::mutex> held(all.lock);
    all.freed(*block, std::move(uses), where);
    if (block->run == run) {
      statistics[block->device].current -= static_cast<int64_t>(block->size);
      statistics[block->device].blocks -= 1;
    }
  }
  std::free(block->data);
  delete block;
}

inline char* aligned(size_t size) { return static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64)); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    check_index(current);
    if (size == 0) return {nullptr, Device(DeviceType::CUDA, current)};
    auto& all = order();
    auto& usage = statistics[current];
    auto block = std::make_unique<Block>();
    {
      std::lock_guard<std::mutex> held(all.lock);
      if (capacity > 0 && usage.current + static_cast<int64_t>(size) > capacity) {
        usage.refused += 1;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes on emulated GPU ",
                         static_cast<int>(current), ", which holds ", usage.current, " of ", capacity.load(), " bytes.");
      }
      usage.current += static_cast<int64_t>(size);
      usage.blocks += 1;
      usage.peak = std::max(usage.peak, usage.current);
      block->run = run;
      block->owner = stream_number(current);
      all.allocated_on(block->owner);
    }
    block->data = aligned(size), block->size = size, block->device = current;
    auto* data = block->data;
    return {data, block.release(), &release, Device(DeviceType::CUDA, current)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
inline DeviceMemory device_memory;

inline std::map<const char*, Block*> pinned_blocks;  // protected by the order's lock

inline void release_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> held(order().lock);
    order().forget_within(block->data, block->size);
    pinned_blocks.erase(block->data);
  }
  std::free(block->data);
  delete block;
}

// Returns the block that contains an address of pinned memory. The caller holds the order's lock.
inline Block* pinned_block(const void* address) {
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(address));
  if (after == pinned_blocks.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return address < block->data + block->size ? block : nullptr;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, Device(DeviceType::CPU)};
    auto* block = new Block{aligned(size), size, -1, -1, {}, {}, 0};
    std::lock_guard<std::mutex> held(order().lock);
    pinned_blocks[block->data] = block;
    return {block->data, block, &release_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
inline PinnedMemory pinned_memory;

// Torch's C++ interface to devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    if (count > 0) check_index(device.index());  // destructors may still set the device when the emulation is off
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  static c10::Stream stream(DeviceIndex index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, index), id);
  }
  c10::Stream getStream(Device device) const noexcept override { return stream(index_of(device), current_streams[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int) const override {
    check_index(index_of(device));
    return stream(index_of(device), ++streams_made());
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(next.device_index(), std::exchange(current_streams[next.device_index()], next.id()));
  }
  void* getStreamNativeHandle(const c10::Stream one) const override { return reinterpret_cast<void*>(one.id()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(count.load()); }

  static int number(const c10::Stream& one) { return order().number_of(one.device_index(), one.id()); }
  void record(void** event, const c10::Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> held(order().lock);
    if (*event == nullptr) *event = new Event;
    auto* made = static_cast<Event*>(*event);
    made->stream = number(on), made->clock = order().now(made->stream), made->queried = false;
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event == nullptr) return;
    std::lock_guard<std::mutex> held(order().lock);
    order().wait(number(waiting), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::lock_guard<std::mutex> held(order().lock);
    return order().query(*static_cast<Event*>(event));
  }
  bool queryStream(const c10::Stream& one) const override {
    std::lock_guard<std::mutex> held(order().lock);
    return order().query(number(one));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeStream(const c10::Stream& one) const override {
    check_sync_mode();
    const int64_t where = site();
    std::lock_guard<std::mutex> held(order().lock);
    record_sync("Stream.synchronize", one.device_index(), one.id(), where);
    order().host_waits(order().now(number(one)));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const int64_t where = site();
    std::lock_guard<std::mutex> held(order().lock);
    const auto* waited = static_cast<Event*>(event);
    const auto [device, stream] = order().name_of(waited->stream);
    record_sync("Event.synchronize", device, stream, where);
    order().host_waits(waited->clock);
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    const int64_t where = site();
    std::lock_guard<std::mutex> held(order().lock);
    record_sync("synchronize", index, current_streams[index], where);
    order().host_waits_for_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    if (data.get_deleter() != &release) return;
    std::lock_guard<std::mutex> held(order().lock);
    static_cast<Block*>(data.get_context())->recorded.insert(number(on));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }  // time is not emulated

 private:
  static std::atomic<int64_t>& streams_made() {
    static std::atomic<int64_t> made{0};
    return made;
  }
};

// A generator with a seed, an offset, and a state of 16 bytes, like CUDA's. Each operation draws different numbers.
struct Generator final : c10::GeneratorImpl {
  Generator(DeviceIndex index, uint64_t seed)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), seed_(seed) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    std::memcpy(&seed_, words, 8);
    std::memcpy(&offset_, words + 1, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, c10::ScalarType::Byte);
    auto* bytes = static_cast<char*>(state.data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index(), seed_);
    made->offset_ = offset_;
    return made;
  }
  // Returns a CPU generator for the next operation to draw from.
  at::Generator next() {
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ULL + (offset_ += 4);
    mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9ULL;
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 29));
  }

 private:
  uint64_t seed_, offset_ = 0;
};

inline at::Generator& default_generator(int64_t index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < MAX_DEVICES; ++i) made->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i), c10::default_rng_seed_val));
    return made;
  }();
  return all->at(index < 0 ? current : index);
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return count > 0; }
  bool isBuilt() const override { return count > 0; }
  bool isAvailable() const override { return count > 0; }
  int getNumGPUs() const override { return count; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(count.load()); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(DeviceType::CUDA, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = current;
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool hasPrimaryContext(DeviceIndex) const override { return initialised; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index, c10::default_rng_seed_val);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(order().lock);
    return pinned_block(data) != nullptr;
  }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};

}  // namespace emulated
