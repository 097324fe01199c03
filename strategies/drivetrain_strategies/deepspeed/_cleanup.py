"""What DeepSpeed leaves behind in the process and on the module, and how it goes away again (E-12)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import ConfigurationError

_GROUPS = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)
"""Process groups that it makes beside the default one, in `deepspeed.utils.groups`."""

_RENAMED = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}
"""What its backend keeps of torch's functions, and their newer names."""

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_LATER = {"applied_pre_backward_ref_cnt", "_hp_grad", "grad_accum"}
"""Attributes that come only with the first steps; so does whatever begins with ``ds_``."""


class World:
    """DeepSpeed's view of the processes, over the default process group that is there.

    Args:
        deepspeed: the package.
        device: where this rank computes.
        local_rank: which rank of its node this is.
    """

    def __init__(self, deepspeed: Any, device: torch.device, local_rank: int) -> None:
        from deepspeed.comm import comm
        from deepspeed.utils import groups

        self._comm, self._groups, self._ops = comm, groups, deepspeed.ops
        self._accelerator = deepspeed.accelerator.real_accelerator
        self._backend = comm.cdb
        self._chosen = self._accelerator.ds_accelerator
        self._before = {name: getattr(groups, name) for name in _GROUPS}
        self._linear = nn.functional.linear
        # Its collectives over shared memory have to be compiled; gloo's do as well (E-10).
        self._compatible = deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm")
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # It reads this at every turn, takes it from nowhere else, and takes the device of that index.
        self._local_rank = os.environ.get("LOCAL_RANK")
        index: int | None = device.index
        if index is not None:
            os.environ["LOCAL_RANK"] = str(index)
        else:
            os.environ.setdefault("LOCAL_RANK", str(local_rank))
        self._choose_accelerator(device)
        deepspeed.init_distributed()
        if self._backend is None:  # by the names that torch does not warn of
            for attribute, name in _RENAMED.items():
                setattr(comm.cdb, attribute, getattr(dist, name, getattr(comm.cdb, attribute)))

    def _choose_accelerator(self, device: torch.device) -> None:
        chosen = self._accelerator.get_accelerator().device_name()
        if chosen == device.type:
            return
        # It chooses once in a process, and a process that was forked since may see other devices.
        if device.type == "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
        elif device.type == "cuda" and "DS_ACCELERATOR" not in os.environ:
            from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
        else:
            raise ConfigurationError(
                f"DeepSpeed computes on {chosen!r}, the run on {device}.",
                "it chose its accelerator by itself, or by DS_ACCELERATOR.",
                f"set DS_ACCELERATOR={device.type}, or ask for another accelerator.",
            )
        self._accelerator.ds_accelerator = Accelerator()

    def close(self) -> None:
        """Let go of its process groups, its accelerator and its patches. Talks to nobody."""
        for name, before in self._before.items():
            group = getattr(self._groups, name)
            if group is not None and group is not before:
                if dist.is_initialized():
                    dist.destroy_process_group(group)
                setattr(self._groups, name, before)
        self._comm.cdb = self._backend
        self._accelerator.ds_accelerator = self._chosen
        if self._compatible is not None:
            self._ops.__compatible_ops__["deepspeed_shm_comm"] = self._compatible
        nn.functional.linear = self._linear
        if self._local_rank is None:
            os.environ.pop("LOCAL_RANK", None)
        else:
            os.environ["LOCAL_RANK"] = self._local_rank


class ModuleTraces:
    """Remembers a module as it was, to take off it what DeepSpeed puts there.

    Args:
        module: before DeepSpeed sees it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._children = [(child, set(child.__dict__), _hooks_of(child)) for child in module.modules()]
        self._parameters = [(parameter, set(parameter.__dict__)) for parameter in module.parameters()]
        self._stores = [(child, child._parameters) for child in module.modules()]
        self._noted = False
        self._added: list[tuple[Any, list[str]]] = []
        self._added_hooks: list[tuple[nn.Module, str, Any]] = []

    def note(self) -> None:
        """Remember what came since: that, and not what the user sets later, is DeepSpeed's."""
        self._noted = True
        for child, before, hooks in self._children:
            self._added.append((child, [name for name in child.__dict__ if name not in before]))
            for name, keys in hooks.items():
                self._added_hooks += [(child, name, key) for key in child.__dict__[name] if key not in keys]
        for parameter, before in self._parameters:
            self._added.append((parameter, [name for name in parameter.__dict__ if name not in before]))

    def undo(self) -> None:
        """Make the module's attributes, hooks and dicts what they were."""
        if not self._noted:
            self.note()
        for child, store in self._stores:
            if child._parameters is not store:
                # Raw: reading through theirs gathers.
                current = dict(dict.items(child._parameters))
                store.clear()
                store.update(current)
                child.__dict__["_parameters"] = store
        for child, name, key in self._added_hooks:
            child.__dict__[name].pop(key, None)
        for holder, names in self._added:
            own = holder.__dict__
            late = [name for name in own if name.startswith("ds_") or name in _LATER]
            for name in {*names, *late}:
                own.pop(name, None)


def forget_root(root: nn.Module) -> None:
    """Take a module off the stack of those whose forward is under way, on which stage 3 leaves it."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    own = set(map(id, root.modules()))
    stack[:] = [module for module in stack if id(module) not in own]


def _hooks_of(child: nn.Module) -> dict[str, set[Any]]:
    return {name: set(child.__dict__[name]) for name in _HOOKS}
