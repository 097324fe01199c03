"""Removes what DeepSpeed leaves behind in the process and on the module."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_GROUP_ATTRIBUTES = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)
"""The attributes of `deepspeed.utils.groups` that hold the process groups that DeepSpeed creates."""

_RENAMED_FUNCTIONS = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}
"""Maps each attribute of DeepSpeed's backend that holds a torch function to the function's newer name."""

_HOOK_ATTRIBUTES = [name for name in nn.Module().__dict__ if "_hooks" in name]
"""The attributes in which a module keeps hooks."""

_LATE_ATTRIBUTES = {"applied_pre_backward_ref_cnt", "grad_accum"}
"""Attributes that DeepSpeed adds only in the first steps. It then also adds attributes that begin with ``ds_``."""


@contextmanager
def communication(deepspeed: Any, device: torch.device, local_rank: int) -> Iterator[None]:
    """Let DeepSpeed communicate over the default process group within this context. Does not communicate afterwards.

    Args:
        deepspeed: the package `deepspeed`.
        device: device of this rank.
        local_rank: local rank of this process.
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    accelerator = deepspeed.accelerator.real_accelerator
    with ExitStack() as undo:
        for owner, name in ((comm, "cdb"), (accelerator, "ds_accelerator"), (nn.functional, "linear")):
            undo.callback(setattr, owner, name, getattr(owner, name))
        # DeepSpeed's shared-memory collectives would have to be compiled, so they are disabled and gloo's are used.
        undo.callback(deepspeed.ops.__compatible_ops__.update, dict(deepspeed.ops.__compatible_ops__))
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed takes the local rank only from LOCAL_RANK, and uses the value as the device index.
        undo.callback(_set_variable, "LOCAL_RANK", os.environ.get("LOCAL_RANK"))
        index: int | None = device.index
        if index is not None:
            os.environ["LOCAL_RANK"] = str(index)
        else:
            os.environ.setdefault("LOCAL_RANK", str(local_rank))
        _choose_accelerator(accelerator, device)
        for name in _GROUP_ATTRIBUTES:
            undo.callback(_restore_group, groups, name, getattr(groups, name))
        is_new = comm.cdb is None
        deepspeed.init_distributed()
        if is_new:  # the functions' older names emit a deprecation warning
            for attribute, name in _RENAMED_FUNCTIONS.items():
                setattr(comm.cdb, attribute, getattr(dist, name, getattr(comm.cdb, attribute)))
        yield


def _restore_group(groups: Any, name: str, before: Any) -> None:
    group = getattr(groups, name)
    if group is not None and group is not before and dist.is_initialized():
        dist.destroy_process_group(group)
    setattr(groups, name, before)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _choose_accelerator(real_accelerator: Any, device: torch.device) -> None:
    # DeepSpeed chooses its accelerator once per process. A process forked later keeps this choice, but may see other
    # devices.
    if real_accelerator.get_accelerator().device_name() != device.type:
        module = importlib.import_module(f"deepspeed.accelerator.{device.type}_accelerator")
        real_accelerator.ds_accelerator = getattr(module, f"{device.type.upper()}_Accelerator")()


class ModuleSnapshot:
    """Records a module's attributes and hooks, so that additions by DeepSpeed can be removed.

    Args:
        module: the module before DeepSpeed's engine is built.
    """

    def __init__(self, module: nn.Module) -> None:
        self._stores = [(child, child._parameters) for child in module.modules()]
        self._before = [(read, set(read())) for read in _dicts_of(module)]
        self._added: list[tuple[Callable[[], dict[Any, Any]], set[Any]]] = []

    def record_additions(self) -> None:
        """Record the attributes and hooks added so far as DeepSpeed's. Later additions are assumed to be the user's."""
        self._added = [(read, set(read()) - names) for read, names in self._before]

    def undo(self) -> None:
        """Restore the module's attributes, hooks and parameter dicts."""
        if not self._added:
            self.record_additions()
        for child, store in self._stores:
            if child._parameters is not store:
                # dict.items bypasses DeepSpeed's dict class, whose reads gather parameters.
                current = dict(dict.items(child._parameters))
                store.clear()
                store.update(current)
                child.__dict__["_parameters"] = store
        for read, names in self._added:
            late = {name for name in read() if str(name).startswith("ds_") or name in _LATE_ATTRIBUTES}
            for name in names | late:
                read().pop(name, None)


def _dicts_of(module: nn.Module) -> Iterator[Callable[[], dict[Any, Any]]]:
    """Yield functions that return the dicts in which modules and parameters hold attributes, and modules hold hooks."""
    for holder in (*module.modules(), *module.parameters()):
        yield partial(getattr, holder, "__dict__")
    for child in module.modules():
        yield from (partial(child.__dict__.__getitem__, name) for name in _HOOK_ATTRIBUTES)


def forget_root(root: nn.Module) -> None:
    """Remove a module and its submodules from the two places of DeepSpeed's where stage 3 leaves them.

    One is the stack of running forwards, the other the cache of a method.
    """
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    stack = parameter_offload.FWD_MODULE_STACK
    modules = set(map(id, root.modules()))
    stack[:] = [module for module in stack if id(module) not in modules]
    # Another decorator hides the cache of this method. The cache's keys keep the module and its engine alive.
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    method = coordinator._PartitionedParameterCoordinator__params_to_release
    wrapped = inspect.getclosurevars(method).nonlocals.values() if inspect.isfunction(method) else ()
    for part in (method, *wrapped):
        if hasattr(part, "cache_clear"):
            part.cache_clear()
