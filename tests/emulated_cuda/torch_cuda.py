"""Provides the parts of torch.cuda that a build without CUDA lacks, while CUDA is emulated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from emulated_cuda.patches import Patches

# The emulation replaces or uses these names in torch.cuda. Another version of torch may lack some of them.
_NEEDED_NAMES = (
    *("_cudart", "_device_count_nvml", "_exchange_device", "_lazy_init", "_maybe_exchange_device", "_queued_calls"),
    *("_utils", "get_device_properties", "graphs", "memory", "nccl", "nvtx", "streams"),
)
# The emulation assigns these names in torch.cuda, or torch does so during the emulation. They are restored on exit.
_RESTORED_NAMES = (
    "_initialized",
    "_cached_device_count",
    "_lazy_seed_tracker",
    "_is_in_bad_fork",
    "default_generators",
)


@dataclass(frozen=True)
class DeviceProperties:
    """The result of `torch.cuda.get_device_properties`."""

    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    uuid: str = ""


class Stream(torch.Stream):
    """`torch.cuda.Stream` of an emulated device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        """Create a stream, or wrap the existing stream with ``stream_id``, ``device_index`` and ``device_type``."""
        torch.cuda.init()
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, torch.device("cuda", index), priority=max(-3, min(priority, 0)))

    @property
    def cuda_stream(self) -> int:
        """The handle that CUDA libraries take. The default stream has the handle 0."""
        return self.stream_id

    @property
    def priority(self) -> int:
        """Return 0, because priorities are not emulated."""
        return 0

    def wait_event(self, event: torch.Event) -> None:
        """Make later work on this stream wait for the event."""
        event.wait(self)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record ``event``, or a new event if it is None, and return the event."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Any:
        """Make this the current stream."""
        self._contexts.append(torch.cuda.stream(self))  # type: ignore[arg-type]
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the previous current stream."""
        self._contexts.pop().__exit__(*error)

    @property
    def _contexts(self) -> list[Any]:
        contexts: list[Any] = self.__dict__.setdefault("contexts", [])
        return contexts

    def __repr__(self) -> str:
        """Return a text with the device and the handle."""
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(torch.Event):
    """`torch.cuda.Event` of an emulated device."""

    _recorded_at: int | None = None

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        """Create an event that has not been recorded."""
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record the event on a stream, by default the current one."""
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self._recorded_at = perf_counter_ns()

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return the milliseconds between two recordings, measured on the host, which runs all operators."""
        assert isinstance(end_event, Event)
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) / 1e6

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make later work on a stream, by default the current one, wait for the event."""
        super().wait(torch.cuda.current_stream() if stream is None else stream)


def check_torch_version() -> None:
    """Raise an error if this version of torch lacks names that the emulation needs.

    Raises:
        ConfigurationError: the message lists the missing names.
    """
    missing = [name for name in (*_NEEDED_NAMES, *_RESTORED_NAMES) if not hasattr(torch.cuda, name)]
    if missing:
        raise ConfigurationError(
            f"The emulation of CUDA does not fit torch {torch.__version__}: torch.cuda has no {', '.join(missing)}.",
            "the emulation replaces private names of torch.cuda, which change between versions.",
            "use a version of torch from the documentation of emulated_cuda, or a newer drivetrain.",
        )


@contextlib.contextmanager
def emulated_names(extension: ModuleType, devices: int, properties: DeviceProperties) -> Iterator[None]:
    """Install the emulated names in torch.cuda, and restore the former values of these names on exit."""
    cuda = torch.cuda
    # The id of the process that initialised the driver, or an empty list before that. A process that is forked
    # after the initialisation cannot use the driver.
    initialised_by: list[int] = []

    def mark_initialised() -> None:
        if not initialised_by:
            initialised_by.append(os.getpid())

    def device_count() -> int:
        mark_initialised()
        return devices

    def in_bad_fork() -> bool:
        return bool(initialised_by) and initialised_by[0] != os.getpid()

    def initialise() -> None:
        mark_initialised()
        extension.initialise()
        if devices:
            _start_autograd(extension, devices)
        cuda.default_generators = tuple(extension.default_generator(index) for index in range(devices))

    # The following functions initialise CUDA, as in torch, where the first call that names a device or requests the
    # current device does so.
    def get_device() -> int:
        cuda.init()
        return int(extension.current_device())

    def set_device(index: int) -> None:
        cuda.init()
        extension.set_device(index)

    def exchange(index: int) -> int:
        if index < 0:
            return -1
        before = get_device()
        extension.set_device(index)
        return before

    def index_of(device: Any) -> int:
        return int(cuda._utils._get_device_index(device, optional=True))

    def stream_of(index: int) -> tuple[int, int, int]:
        return extension.current_stream(index), index, _CUDA

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        extension.set_device(device_index)
        extension.set_stream(device_index, stream_id)

    def get_device_properties(device: Any = None) -> DeviceProperties:
        cuda.init()
        index = index_of(device)
        if not 0 <= index < devices:
            raise AssertionError("Invalid device id")
        return properties

    def memory_stats(index: int) -> dict[str, Any]:
        statistics = extension.memory_of(index)
        pools = _pools(statistics["current"], statistics["peak"])
        return {
            "allocated_bytes": pools,
            "active_bytes": pools,
            "reserved_bytes": pools,
            "requested_bytes": pools,
            "allocation": _pools(statistics["blocks"], statistics["blocks"]),
            "num_ooms": statistics["refused"],
            "num_alloc_retries": 0,
        }

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        cuda.init()
        return properties.total_memory - extension.memory_of(index_of(device))["current"], properties.total_memory

    storage_class: Any = torch.UntypedStorage
    resize, clone, move = storage_class.resize_, storage_class.clone, storage_class.to

    def resize_storage(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        extension.resize_storage(storage, size)
        return storage

    def clone_storage(storage: torch.UntypedStorage) -> Any:
        return clone(storage) if storage.device.type != "cuda" else _bytes_of(storage).clone().untyped_storage()

    def move_storage(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda" or storage.device == torch.device(device):
            return move(storage, device=device, non_blocking=non_blocking)
        return _bytes_of(storage).to(device, non_blocking=non_blocking).untyped_storage()

    names: dict[str, Callable[..., Any]] = {
        "_cuda_getDeviceCount": device_count,
        "_cuda_init": initialise,
        "_cuda_isInBadFork": in_bad_fork,
        "_cuda_getDevice": get_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_getCurrentStream": stream_of,
        "_cuda_getDefaultStream": lambda index: (0, index, _CUDA),
        "_cuda_getCurrentRawStream": extension.current_stream,
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: extension.synchronize(extension.current_device()),
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": extension.forget_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getArchFlags": lambda: None,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_get_sync_debug_mode": extension.sync_mode,
        "_cuda_set_sync_debug_mode": extension.set_sync_mode,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }
    with contextlib.ExitStack() as stack:
        put = Patches(stack).put
        for name, function in names.items():
            put(torch._C, name, function)
        put(torch._C, "_has_cuda", True)
        for name in _RESTORED_NAMES:
            put(cuda, name, getattr(cuda, name))
        put(cuda, "_queued_calls", list(cuda._queued_calls))
        put(cuda, "_is_in_bad_fork", in_bad_fork)
        put(cuda, "_cudart", object())  # must exist but is not used
        put(cuda, "_exchange_device", exchange)
        put(cuda, "_maybe_exchange_device", lambda index: exchange(index))  # torch.compile needs two distinct functions
        put(cuda, "_device_count_nvml", lambda: devices)
        for module in (cuda, cuda.graphs):
            put(module, "is_current_stream_capturing", lambda: False)
        put(cuda, "get_device_properties", get_device_properties)
        for module in (cuda, cuda.memory):
            put(module, "mem_get_info", mem_get_info)
        for module in (cuda, cuda.streams):
            put(module, "Stream", Stream)
            put(module, "Event", Event)
        put(cuda.nvtx, "_nvtx", _Nvtx())
        put(storage_class, "resize_", resize_storage)
        put(storage_class, "clone", clone_storage)
        put(storage_class, "to", move_storage)
        module_loading = os.environ.get("CUDA_MODULE_LOADING")
        try:
            yield
        finally:
            if module_loading is None:
                os.environ.pop("CUDA_MODULE_LOADING", None)


_CUDA = 1  # c10::DeviceType::CUDA


def _start_autograd(extension: ModuleType, devices: int) -> None:
    # In a forked process, autograd's threads would all create torch's thread pool at once, and one would abort.
    torch.set_num_threads(torch.get_num_threads())
    try:
        extension.start_autograd()
    except RuntimeError as error:
        raise ConfigurationError(
            f"emulated_cuda(devices={devices}) in a process that has already run a backward pass.",
            "autograd starts one thread per visible device at a process's first backward pass.",
            "use emulated_cuda in a separate process: drivetrain.testing.run_distributed.",
        ) from error


class _Nvtx:
    """Replaces NVTX, and ignores marks for a profiler."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pools(current: int, peak: int) -> dict[str, dict[str, int]]:
    pool = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
    return {"all": pool, "large_pool": pool, "small_pool": dict.fromkeys(pool, 0)}
