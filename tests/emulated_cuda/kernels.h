// Operators for tensors on emulated devices: they run the CPU's kernels on the same memory, in the order of streams.
#pragma once

#include "device.h"

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace emulated {

using at::Tensor;
using torch::jit::Stack;

const c10::DispatchKeySet CUDA_KEYS(c10::DispatchKey::CUDA);

// A range of bytes that an operation reads or writes.
struct Use {
  Block* block;
  size_t begin, end;
  bool writes;
};

// Returns the block that contains a tensor; null if the tensor is neither on a device nor in pinned memory. The caller
// holds the order's lock.
inline Block* block_of(const Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() == &release) return static_cast<Block*>(data.get_context());
  return tensor.is_cpu() ? pinned_block(data.get()) : nullptr;
}

inline size_t span_of(const Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

inline void use(std::vector<Use>& uses, const Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  std::lock_guard<std::mutex> held(order().lock);
  if (auto* block = block_of(tensor)) {
    const size_t begin = static_cast<const char*>(tensor.const_data_ptr()) - block->data;
    uses.push_back({block, begin, begin + span_of(tensor), writes});
  }
}

// Issues an operation on the current stream of a device and returns its number. The caller holds the order's lock.
inline int64_t issue_on_current_stream(const std::string& op, int64_t device, const std::vector<Use>& uses, int64_t where) {
  const int stream = stream_number(device);
  const int64_t number = order().issue(stream);
  // An operation that reads and writes the same bytes does not race with itself: both accesses are on one stream.
  for (const auto& one : uses) order().record_access(*one.block, {stream, number, one.writes, one.begin, one.end, op, where});
  return number;
}

inline void record_operation(const std::string& op, int64_t device, const std::vector<Use>& uses) {
  const int64_t where = site();
  std::lock_guard<std::mutex> held(order().lock);
  issue_on_current_stream(op, device, uses, where);
}

// Issues an operation and makes the host wait for it, because the host needs the result.
inline void wait_for_result(const std::string& op, int64_t device, const std::vector<Use>& uses) {
  const int64_t where = site();
  {
    std::lock_guard<std::mutex> held(order().lock);
    issue_on_current_stream(op, device, uses, where);
    record_sync(op, static_cast<int>(device), current_streams[device], where);
    order().host_waits(order().now(stream_number(device)));
  }
  check_sync_mode();
}

// Returns a CPU tensor that shares the memory of a device's tensor.
inline Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto cpu_tensor = at::from_blob(tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr, tensor.sizes(), tensor.strides(),
                            [](void*) {}, tensor.options().device(c10::kCPU).requires_grad(false), Device(c10::kCPU));
  if (tensor.is_conj()) cpu_tensor._set_conj(true);
  if (tensor.is_neg()) cpu_tensor._set_neg(true);
  return cpu_tensor;
}

inline Tensor empty_on(int64_t device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  c10::DeviceGuard guard(Device(c10::kCUDA, static_cast<DeviceIndex>(device)));
  return Tensor(at::detail::empty_strided_generic(sizes, strides, &device_memory, CUDA_KEYS, dtype));
}

// Copies a result of a CPU kernel into a new tensor on a device.
inline Tensor on_device(const Tensor& result, int64_t device) {
  if (!result.defined()) return result;
  const auto dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  auto made = empty_on(device, dense.sizes(), dense.strides(), dense.scalar_type());
  if (made.numel()) std::memcpy(made.data_ptr(), dense.const_data_ptr(), span_of(dense));
  if (result.is_conj()) made._set_conj(true);
  if (result.is_neg()) made._set_neg(true);
  return made;
}

// Creating tensors

inline Device requested_device(std::optional<Device> device) {
  const Device found(c10::kCUDA, device ? index_of(*device) : current);
  check_index(found.index());
  return found;
}

inline Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
                    std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(requested_device(device));
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, CUDA_KEYS, c10::dtype_or_default(dtype), format));
}

inline Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_on(requested_device(device).index(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype));
}

// Copying

inline void copy_between(const Tensor& to, const Tensor& from, bool non_blocking) {
  const bool to_device = to.is_cuda();
  const auto& device_tensor = to_device ? to : from;
  const auto& host_tensor = to_device ? from : to;
  const int64_t device = device_tensor.get_device();
  const int64_t where = site();
  // As on a real device, copies between different dtypes or layouts go through a buffer in pageable memory.
  const bool plain = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
                     to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  std::vector<Use> uses;
  use(uses, from, false);
  use(uses, to, true);
  Finding copy;
  copy.kind = "copy", copy.op = to_device ? "to the device" : "to the host", copy.device = static_cast<int>(device), copy.site = where;
  copy.bytes = static_cast<int64_t>(to.nbytes()), copy.stream = current_streams[device];
  {
    std::lock_guard<std::mutex> held(order().lock);
    copy.pinned = block_of(host_tensor) != nullptr;
    copy.waited = !(non_blocking && copy.pinned && plain);
    const int64_t number = issue_on_current_stream("copy_", device, uses, where);
    const int stream = stream_number(device);
    if (copy.pinned) {
      auto* bytes = static_cast<char*>(const_cast<void*>(host_tensor.const_data_ptr()));
      const size_t size = span_of(host_tensor);
      order().deliver_within(bytes, size);
      if (!to_device) order().check_within(bytes, size);
      if (!copy.waited && to_device) order().add_copy_from_pinned({stream, number, bytes, std::vector<char>(bytes, bytes + size), where});
      if (!copy.waited && !to_device) {
        const auto* source = static_cast<const char*>(from.const_data_ptr());
        order().add_copy_to_pinned({stream, number, bytes, std::vector<char>(source, source + size)});
        std::memset(bytes, 0xFF, size);  // all bits are set until the host has waited for the data
      }
    }
    if (copy.waited) order().host_waits(order().now(stream));
    order().findings.push_back(copy);
  }
  if (copy.waited) check_sync_mode();
  if (copy.waited || to_device) host(to).copy_(host(from));
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (self.is_cuda() && source.is_cuda()) {
    const auto device = source.get_device(), other = self.get_device();
    std::vector<Use> uses;
    use(uses, source, false);
    use(uses, self, true);
    const int64_t where = site();
    {
      std::lock_guard<std::mutex> held(order().lock);
      const int from = stream_number(device), to = stream_number(other);
      if (device != other) order().wait(from, order().now(to));  // the copy is ordered on the streams of both devices
      issue_on_current_stream("copy_", device, uses, where);
      if (device != other) order().wait(to, order().now(from));
    }
    host(self).copy_(host(source));
  } else {
    const auto expanded = source.sizes() == self.sizes() ? source : source.expand_as(self);
    copy_between(self, expanded, non_blocking);
  }
  return self;
}

inline at::Scalar item(const Tensor& self) {
  std::vector<Use> uses;
  use(uses, self, false);
  wait_for_result("item", self.get_device(), uses);
  return host(self).item();
}

// Attention is composed of other operations, since the CPU lacks the fused kernels of real devices.
inline int64_t attention_kernel(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

inline void record_stream(Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// Views of the same storage

inline Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
// The CPU's implementations also work for devices, since the storage's own allocator provides the memory.
inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
inline Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor& set_whole_storage(Tensor& self, c10::Storage source) { return at::native::set_(self, std::move(source)); }
inline Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, &device_memory, true));
  return self.set_(storage, 0, {0}, {});
}

// All other operations

// Returns whether the host needs an operator's result, or the result's size, before it can continue.
inline bool host_must_know(const c10::FunctionSchema& schema, const Stack& stack, size_t begin) {
  static const std::set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::unique_dim_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero"};
  if (names.count(schema.name())) return true;
  if (schema.name().rfind("aten::index", 0) != 0 && schema.name() != "aten::_index_put_impl_") return false;
  for (size_t i = begin; i < stack.size(); ++i)
    if (stack[i].isOptionalTensorList())
      for (const std::optional<Tensor>& index : stack[i].toOptionalTensorVector())
        if (index && index->defined() && (index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte)) return true;
  return false;
}

// Runs one call of an operator with the CPU's kernel.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), begin_(stack->size() - schema_.arguments().size()),
        arguments_(stack->begin() + begin_, stack->end()), name_(short_name(schema_.name())) {}

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "The emulation of CUDA has no ", schema_.name(),
                                ": the emulation runs the CPU's kernels, and the CPU has none for this operator.");
    find_device();
    for (const auto& index : from_host_) record_index_copy(index);
    const bool host_waits = host_must_know(schema_, stack_, begin_);
    for (size_t i = 0; i < arguments_.size(); ++i) replace_argument(i);
    seed_host();
    if (host_waits) wait_for_result(name_, device_, uses_);
    redispatch();
    for (auto& [original, cpu_tensor] : resized_)
      if (cpu_tensor.sizes() != original.sizes()) {
        original.resize_(cpu_tensor.sizes());
        host(original).copy_(cpu_tensor);
        use(uses_, original, true);
      }
    const size_t first = stack_.size() - schema_.returns().size();
    for (size_t i = 0; i < schema_.returns().size(); ++i) convert_results(stack_[first + i], schema_.returns()[i]);
    if (!host_waits && !uses_.empty()) record_operation(name_, device_, uses_);
  }

 private:
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const size_t begin_;
  const std::vector<c10::IValue> arguments_;
  const std::string name_;
  int64_t device_ = -1;
  bool uses_default_generator_ = false;
  std::vector<Use> uses_;
  std::vector<Tensor> from_host_;  // indices in host memory
  std::vector<std::pair<Tensor, Tensor>> resized_;  // empty outputs, which the kernel may resize, each with the CPU tensor that the kernel gets

  static std::string short_name(const std::string& full) { return full.substr(full.find("::") + 2); }

  static std::vector<Tensor> tensors_of(const c10::IValue& value) {
    if (value.isTensor()) return {value.toTensor()};
    if (value.isTensorList()) return value.toTensorVector();
    std::vector<Tensor> found;
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
        if (one) found.push_back(*one);
    return found;
  }

  // Finds the device of all tensors. As with real kernels, only scalars and indices may be on the host.
  void find_device() {
    bool elsewhere = false;
    for (const auto& value : arguments_) {
      for (const auto& tensor : tensors_of(value)) {
        if (!tensor.defined()) continue;
        if (!tensor.is_cuda()) {
          if (value.isOptionalTensorList()) from_host_.push_back(tensor);
          else elsewhere |= tensor.dim() > 0;
          continue;
        }
        TORCH_CHECK(device_ < 0 || device_ == tensor.get_device(), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                    device_, " and cuda:", static_cast<int>(tensor.get_device()), "! (", name_, ")");
        device_ = tensor.get_device();
      }
      if (device_ < 0 && value.isDevice() && value.toDevice().is_cuda()) device_ = index_of(value.toDevice());
    }
    if (device_ < 0) device_ = current;
    check_index(device_);
    TORCH_CHECK(!elsewhere, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device_, " and cpu! (", name_, ")");
  }

  // Records the copy of an index from host memory to the device, for which the host waits.
  void record_index_copy(const Tensor& index) {
    Finding copy;
    copy.kind = "copy", copy.op = "to the device", copy.device = static_cast<int>(device_), copy.stream = current_streams[device_];
    copy.bytes = static_cast<int64_t>(index.nbytes()), copy.waited = true, copy.site = site();
    {
      std::lock_guard<std::mutex> held(order().lock);
      copy.pinned = block_of(index) != nullptr;
      order().host_waits(order().now(stream_number(device_)));
      order().findings.push_back(copy);
    }
    check_sync_mode();
  }

  Tensor host_argument(const Tensor& tensor, bool writes) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    use(uses_, tensor, writes);
    if (!writes || tensor.numel()) return host(tensor);
    auto cpu_tensor = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU).requires_grad(false));
    resized_.emplace_back(tensor, cpu_tensor);
    return cpu_tensor;
  }

  void replace_argument(size_t i) {
    const auto* alias = schema_.arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    const auto& value = arguments_[i];
    auto& slot = stack_[begin_ + i];
    if (value.isTensor()) {
      slot = host_argument(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<Tensor> cpu_tensors;
      for (const auto& one : value.toTensorVector()) cpu_tensors.push_back(host_argument(one, writes));
      slot = cpu_tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> cpu_tensors;
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector())
        cpu_tensors.push_back(one ? std::optional<Tensor>(host_argument(*one, writes)) : one);
      slot = cpu_tensors;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      slot = Device(c10::kCPU);
    }
  }

  // Replaces a generator argument by a CPU generator that is seeded from the given or the default device generator.
  void seed_host() {
    uses_default_generator_ = op_.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_.arguments()[i].name() != "generator") continue;
      uses_default_generator_ = false;
      auto generator = arguments_[i].isNone() ? default_generator(device_) : arguments_[i].toGenerator();
      if (auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl())) {
        std::lock_guard<std::mutex> held(ours->mutex_);
        stack_[begin_ + i] = ours->next();
      }
    }
  }

  // Runs the CPU's kernel. If the kernel draws from the CPU's default generator, the state of this generator is replaced
  // for the duration of the call.
  void redispatch() {
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    if (!uses_default_generator_) return op_.redispatchBoxed(cpu, &stack_);
    auto generator = at::detail::getDefaultCPUGenerator();
    struct RestoreState {
      at::Generator& generator;
      const Tensor state = generator.get_state();
      ~RestoreState() { generator.set_state(state); }
    } restore{generator};
    generator.set_state(at::check_generator<Generator>(default_generator(device_))->next().get_state());
    op_.redispatchBoxed(cpu, &stack_);
  }

  void convert_results(c10::IValue& value, const c10::Argument& result) {
    if (value.isTensor()) {
      value = convert_result(value.toTensor(), result.alias_info(), 0);
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const auto& one : value.toTensorVector()) made.push_back(convert_result(one, result.alias_info(), made.size()));
      value = made;
    }
  }

  Tensor convert_result(const Tensor& result, const c10::AliasInfo* alias, size_t index) {
    if (!result.defined()) return result;
    if (alias == nullptr) {
      auto made = on_device(result, device_);
      use(uses_, made, true);
      return made;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* other = schema_.arguments()[i].alias_info();
      if (other == nullptr || other->beforeSets() != alias->beforeSets()) continue;
      const auto originals = tensors_of(arguments_[i]);
      if (alias->isWrite()) return originals.at(index);
      for (const auto& original : originals) {  // a view
        const int64_t offset = (static_cast<const char*>(result.const_data_ptr()) - static_cast<const char*>(original.const_data_ptr())) / static_cast<int64_t>(result.itemsize());
        return original.as_strided(result.sizes(), result.strides(), original.storage_offset() + offset);
      }
    }
    TORCH_CHECK(false, "The emulation of CUDA cannot determine of which tensor ", schema_.name(), " returns a view.");
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { HostCall(op, stack).run(); }

// Returns operators that have both a CPU kernel and a composite implementation. Real devices do not use the composite
// implementation either.
inline std::vector<std::string> operators_with_cpu_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  // Convolutions are redispatched as a whole, since the CPU chooses other internal kernels than a device would.
  std::vector<std::string> found{"convolution", "convolution_backward"};
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    bool views = false;
    for (const auto& result : op->schema().returns()) views |= result.alias_info() != nullptr && !result.alias_info()->isWrite();
    if (!views) found.push_back(name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name));
  }
  return found;
}

}  // namespace emulated

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated::fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &emulated::empty);
  m.impl("empty_strided", &emulated::empty_strided);
  m.impl("copy_", &emulated::copy_);
  m.impl("_local_scalar_dense", &emulated::item);
  m.impl("_fused_sdp_choice", &emulated::attention_kernel);
  m.impl("record_stream", &emulated::record_stream);
  m.impl("as_strided", &emulated::as_strided);
  m.impl("view", &emulated::view);
  m.impl("_reshape_alias", &emulated::reshape_alias);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &emulated::resize_);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("set_.source_Storage", &emulated::set_whole_storage);
  m.impl("set_", &emulated::set_nothing);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &emulated::set_storage);
}
