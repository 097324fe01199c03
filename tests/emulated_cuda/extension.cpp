// CUDA emulated in host memory, for builds of torch without CUDA: the interface for Python.
#include "nccl.h"

#include <ATen/native/Resize.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

namespace py = pybind11;

namespace emulated {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Torch has already created its hooks, of a class without CUDA, and never replaces them, so an object of our class is
// constructed in their place.
void become_cuda() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : operators_with_cpu_kernels())
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

void set_site_function(py::function where) {
  static auto* get_site = new py::function;
  *get_site = std::move(where);
  site = []() -> int64_t {
    if (count == 0) return -1;
    py::gil_scoped_acquire held;
    py::error_scope kept;  // memory may be freed while a Python error is set
    try {
      return (*get_site)().cast<int64_t>();
    } catch (py::error_already_set&) {
      return -1;
    }
  };
}

// Marks the devices as unused, so that the first use calls torch.cuda's initialisation.
void forget_use() {
  initialised = false;
  torch::utils::set_requires_device_init(DeviceType::CUDA, true);
}

// Starts autograd's threads, one per device. Fails if an earlier backward has already started fewer threads.
void start_autograd() {
  py::gil_scoped_release released;
  std::exception_ptr failed;
  std::thread([&] {  // a new thread is not affected by the caller's autograd modes
    try {
      auto leaf = empty_on(count - 1, {}, {}, c10::kFloat).set_requires_grad(true);
      torch::autograd::backward({leaf.mul(1)}, {});
    } catch (...) {
      failed = std::current_exception();
    }
  }).join();
  if (failed) std::rethrow_exception(failed);
}

void start(const std::vector<int64_t>& devices, int64_t memory) {
  TORCH_CHECK(devices.size() <= MAX_DEVICES, "at most ", MAX_DEVICES, " devices");
  capacity = memory, sync_mode = 0, current = 0;
  forget_use();
  {
    std::lock_guard<std::mutex> held(order().lock);
    run += 1;
    statistics.fill({});
    std::copy(devices.begin(), devices.end(), physical.begin());
  }
  current_streams.fill(0);
  count = static_cast<int>(devices.size());
}

void stop() {
  std::lock_guard<std::mutex> held(order().lock);
  order().close();
  count = 0, sync_mode = 0, initialised = false;
}

py::list take_findings() {
  std::vector<Finding> taken;
  {
    std::lock_guard<std::mutex> held(order().lock);
    taken.swap(order().findings);
  }
  py::list all;
  for (const auto& one : taken) {
    py::dict each;
    each["kind"] = one.kind, each["op"] = one.op, each["device"] = one.device, each["stream"] = one.stream;
    each["site"] = one.site, each["writes"] = one.writes, each["bytes"] = one.bytes;
    each["other_op"] = one.other_op, each["other_device"] = one.other_device, each["other_stream"] = one.other_stream, each["other_site"] = one.other_site;
    each["other_writes"] = one.other_writes, each["pinned"] = one.pinned, each["waited"] = one.waited;
    all.append(each);
  }
  return all;
}

py::dict memory_of(int64_t device) {
  std::lock_guard<std::mutex> held(order().lock);
  const auto& one = statistics.at(device);
  py::dict found;
  found["current"] = one.current, found["peak"] = one.peak, found["blocks"] = one.blocks, found["refused"] = one.refused;
  return found;
}

}  // namespace emulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, emulated::Timer)
}

namespace {

// Defines the class ProcessGroupNCCL for torch.distributed.
void define_nccl(py::module& m) {
  using emulated::Nccl;
  py::module::import("torch.distributed");  // registers the base class
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "ProcessGroupNCCL", py::dynamic_attr())
      .def(py::init([](const py::object& store, int rank, int size, const py::object& options) {
        auto distributed = py::module::import("torch._C._distributed_c10d");
        auto gloo = distributed.attr("ProcessGroupGloo")(store, rank, size, options.attr("_timeout"));
        auto made = c10::make_intrusive<Nccl>(rank, size, gloo.cast<c10::intrusive_ptr<c10d::Backend>>());
        return made;
      }));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  become_cuda();
  define_nccl(m);
  m.def("set_site_function", &set_site_function);
  m.def("start_autograd", &start_autograd);
  m.def("start", &start);
  m.def("forget_use", &forget_use);
  m.def("stop", &stop);
  m.def("take_findings", &take_findings);
  m.def("memory_of", &memory_of);
  m.def("forget_peak", [](int64_t device) {
    std::lock_guard<std::mutex> held(order().lock);
    statistics.at(device).peak = statistics.at(device).current;
  });
  m.def("count", [] { return count.load(); });
  m.def("initialise", [] { initialised = true; });
  m.def("current_device", [] { return static_cast<int64_t>(current); });
  m.def("set_device", [](int64_t index) { Guard().setDevice(Device(DeviceType::CUDA, static_cast<DeviceIndex>(index))); });
  m.def("current_stream", [](int64_t device) { return current_streams.at(device); });
  m.def("set_stream", [](int64_t device, int64_t stream) { current_streams.at(device) = stream; });
  m.def("synchronize", [](int64_t device) { Guard().synchronizeDevice(static_cast<DeviceIndex>(device)); });
  m.def("default_generator", [](int64_t device) { return default_generator(device); });
  m.def("sync_mode", [] { return sync_mode.load(); });
  m.def("set_sync_mode", [](int mode) { sync_mode = mode; });
  m.def("resize_storage", [](const c10::Storage& storage, int64_t size) {
    c10::DeviceGuard guard(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), static_cast<size_t>(size));
  });
}
