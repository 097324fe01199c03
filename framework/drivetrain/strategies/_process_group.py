"""Opens and closes the default process group of a run. A group that the user initialized is used and left open."""

from __future__ import annotations

import importlib
import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._distributed.process_groups import abort_nccl, drop_groups, set_timeout, uses_nccl
from drivetrain._distributed.watchdog import Watchdog
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError

_run_numbers = itertools.count()
"""Numbers the distributed runs of this process, so that no two runs share keys in the store."""


class ProcessGroup:
    """The default process group and the control plane of one run.

    Args:
        backend: backend of collectives; None selects gloo on the CPU and NCCL (with gloo for CPU tensors) on CUDA.
        timeout: time after which a collective that a rank does not join fails, as a timedelta or in seconds.
        step_timeout: the timeout of collectives after the first step; None keeps ``timeout``.
    """

    def __init__(
        self, backend: str | None, timeout: timedelta | float, step_timeout: timedelta | float | None = None
    ) -> None:
        self._backend = backend
        self.timeout = _parse_timeout("timeout", timeout)
        self._step_timeout = None if step_timeout is None else _parse_timeout("step_timeout", step_timeout)
        self._watchdog: Watchdog | None = None
        self._owned = False
        self._control_group: Any = None
        self._control: GroupControl | None = None  # None for a single rank

    def open(self, placement: Placement, device: torch.device, store: Store | None) -> ControlPlane:
        """Use the user's default process group, or initialize one over ``store``. Return the control plane.

        Raises:
            ConfigurationError: the user's group contradicts the settings, or there is neither a group nor a store.
        """
        # DDP would import dynamo later. An import after the group is opened keeps the group's threads alive after the
        # group is destroyed, and the process could then abort at exit.
        importlib.import_module("torch._dynamo")
        if dist.is_initialized():
            self._check_users_group(placement)
            store = dist.distributed_c10d._get_default_store()
        elif store is None:
            raise ConfigurationError(
                f"Rank {placement.rank} of {placement.world_size} cannot reach the other ranks.",
                "there is neither a process group nor a store's address (MASTER_ADDR, MASTER_PORT).",
                "start the processes with torchrun, or let Fit start them (launcher='auto').",
            )
        run_store = PrefixStore(f"drivetrain/run{next(_run_numbers)}", store)
        if not dist.is_initialized():
            default_backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                self._backend or default_backend,
                store=PrefixStore("default", run_store),
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=self.timeout,
            )
            self._owned = True
        if placement.world_size == 1:
            return LocalControl()
        self._control_group = dist.new_group(backend="gloo", timeout=self.timeout)
        control_store = PrefixStore("control", run_store)
        rank, world_size = placement.rank, placement.world_size
        self._control = control = GroupControl(
            self._control_group, control_store, rank, world_size, self.timeout, on_first_step=self._after_first_step
        )
        watchdog_store: Store = control_store.clone()  # type: ignore[attr-defined]
        # NCCL kernels keep waiting for a failed rank, and so does every thread that waits for such a kernel.
        abort = abort_nccl if self._owned and uses_nccl() else None
        self._watchdog = Watchdog(watchdog_store, rank, control.flight.write, abort, control.poll)
        return control

    def _after_first_step(self) -> None:
        """Switch to the shorter timeout, since slow work such as compiling and loading ends with the first step."""
        if self._step_timeout is None or self._step_timeout >= self.timeout:
            return
        assert self._control is not None
        self._control.timeout = self._step_timeout
        if self._owned:
            set_timeout(self._step_timeout)

    def close(self) -> None:
        """Close the control plane, and the group if this run opened it.

        This method does not communicate, since other ranks may be gone.
        """
        if self._watchdog is not None:
            self._watchdog.end()
            self._watchdog = None
        if self._control_group is not None:
            group, self._control_group = self._control_group, None
            if dist.is_initialized():
                dist.destroy_process_group(group)
        if self._control is not None:
            self._control.detach()
        if self._owned and dist.is_initialized():
            if self._control is not None and self._control.failures.has_reported and uses_nccl():
                drop_groups()
            else:
                dist.destroy_process_group()
        self._owned = False

    def _check_users_group(self, placement: Placement) -> None:
        world_size = dist.get_world_size()
        if world_size != placement.world_size:
            raise ConfigurationError(
                f"The existing process group has {world_size} ranks, but the run needs {placement.world_size}.",
                "a process group that the user initialized is used unchanged.",
                f"set devices x num_nodes = {world_size}, or destroy the group before fit.",
            )
        backend = dist.get_backend()
        if self._backend is not None and self._backend not in (backend, str(backend)):
            raise ConfigurationError(
                f"process_group_backend={self._backend!r}, but the existing process group uses {backend!r}.",
                "a process group that the user initialized is used unchanged.",
                "leave process_group_backend out, or destroy the group before fit.",
            )


def _parse_timeout(name: str, timeout: timedelta | float) -> timedelta:
    found = timedelta(seconds=timeout) if type(timeout) in (int, float) else timeout  # type: ignore[arg-type]
    if not isinstance(found, timedelta) or found <= timedelta(0):
        raise ConfigurationError(
            f"{name}={timeout!r}.",
            "a timeout is a datetime.timedelta, or a positive number of seconds.",
            f"use {name}=timedelta(minutes=10), or {name}=600.",
        )
    return found
