"""Who owns the default process group: the user, if there is one already; else this run, which takes it away again."""

from __future__ import annotations

import importlib
import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.process_groups import abort_nccl, drop_groups, set_timeout, uses_nccl
from drivetrain._distributed.watchdog import Watchdog
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError

_runs = itertools.count()
"""Numbers this process's distributed runs, so that no two of them share keys in the store."""


class ProcessGroup:
    """The default process group for one run, and the control plane beside it.

    Args:
        backend: what collectives run on; None takes gloo on the CPU and NCCL (with gloo for CPU tensors) on CUDA.
        timeout: after which a collective that a rank does not join fails.
        step_timeout: the same, once a step has been made; None leaves it at ``timeout``.
    """

    def __init__(self, backend: str | None, timeout: timedelta, step_timeout: timedelta | None = None) -> None:
        self._backend = backend
        self.timeout = timeout
        self._step_timeout = step_timeout
        self._watchdog: Watchdog | None = None
        self._owned = False
        self._control_group: Any = None
        self.control: GroupControl | None = None

    def open(self, placement: Placement, device: torch.device, store: Store | None) -> GroupControl:
        """Join the default process group, making it over ``store`` where the user has none.

        Raises:
            ConfigurationError: the user's group contradicts what was asked for, or there is no way to the others.
        """
        # Imported later, as DDP does, dynamo would keep the group's threads alive past its end, and the process may
        # abort at exit.
        importlib.import_module("torch._dynamo")
        if dist.is_initialized():
            self._check_users_group(placement, device)
            store = dist.distributed_c10d._get_default_store()
        elif store is None:
            raise ConfigurationError(
                f"Rank {placement.rank} of {placement.world_size} has no way to reach the others.",
                "neither a process group nor a store's address (MASTER_ADDR, MASTER_PORT) is there.",
                "start the processes with torchrun, or let Fit start them (launcher='auto').",
            )
        run_store = PrefixStore(f"drivetrain/run{next(_runs)}", store)
        if not dist.is_initialized():
            default = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                self._backend or default,
                store=PrefixStore("default", run_store),
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=self.timeout,
            )
            self._owned = True
        self._control_group = dist.new_group(backend="gloo", timeout=self.timeout)
        control_store = PrefixStore("control", run_store)
        rank, world_size = placement.rank, placement.world_size
        self.control = GroupControl(
            self._control_group, control_store, rank, world_size, self.timeout, then=self._after_first_step
        )
        own: Store = control_store.clone()  # type: ignore[attr-defined]
        # Where a rank has failed, the others' kernels of NCCL wait for it on, and so does who waits for a kernel.
        abort = abort_nccl if self._owned and uses_nccl() else None
        self._watchdog = Watchdog(own, rank, self.control.flight.leave, abort)
        return self.control

    def _after_first_step(self) -> None:
        """Wait less for the others from now on: what takes long, compiling and loading, is behind them."""
        if self._step_timeout is None or self._step_timeout >= self.timeout:
            return
        assert self.control is not None
        self.control.timeout = self._step_timeout
        if self._owned:
            set_timeout(self._step_timeout)

    def close(self) -> None:
        """Leave. Talks to nobody: other ranks may be gone."""
        if self._watchdog is not None:
            self._watchdog.end()
            self._watchdog = None
        if self._control_group is not None:
            group, self._control_group = self._control_group, None
            if dist.is_initialized():
                dist.destroy_process_group(group)
        if self.control is not None:
            self.control.detach()
        if self._owned and dist.is_initialized():
            if self.control is not None and self.control.failed and uses_nccl():
                drop_groups()
            else:
                dist.destroy_process_group()
        self._owned = False

    def _check_users_group(self, placement: Placement, device: torch.device) -> None:
        world_size = dist.get_world_size()
        if world_size != placement.world_size:
            raise ConfigurationError(
                f"The process group that is there has {world_size} ranks, and {placement.world_size} are asked for.",
                "a group of the user's is used as it is.",
                f"ask for devices x num_nodes = {world_size}, or destroy the group before fit.",
            )
        backend = dist.get_backend()
        if self._backend is not None and self._backend not in (backend, str(backend)):
            raise ConfigurationError(
                f"process_group_backend={self._backend!r}, and the process group that is there runs on {backend!r}.",
                "a group of the user's is used as it is.",
                "leave process_group_backend out, or destroy the group before fit.",
            )
        if device.type == "cuda" and backend == "gloo":
            raise DistributedError(
                f"The process group that is there runs on 'gloo', and the device is {device}.",
                "gradients on CUDA need NCCL.",
                "initialise it with backend='cpu:gloo,cuda:nccl', or let Fit make it.",
            )
