"""Determines this process's rank and world size, and whether processes must be started."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn import Module

from drivetrain._distributed.failure import RankFailedError, first_cause
from drivetrain._distributed.rendezvous import NO_NAME, admit, admit_first, host
from drivetrain._runtime.accelerators import Devices
from drivetrain.environments import Environment, Placement, environment_by_name
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import LaunchedProcesses, current_world
from drivetrain.strategies.strategy import Strategy

_CONNECT_TIMEOUT = timedelta(minutes=5)

_stores: dict[tuple[str, int, Placement, str | None, bool], TCPStore] = {}
"""The stores that this process hosts or has joined, by the arguments of `_connect`.

They are kept for later runs: rank 0 cannot host a second store on a port, and no rank joins a store twice.
"""


@dataclass(frozen=True, slots=True)
class Topology:
    """This process's place among the processes of a run.

    Attributes:
        placement: the rank and the world size of this process. If ``missing``, the rank and the world size that the
            first process of this node will have.
        store: connects the processes; None before the processes are started, for a single-process strategy, and in a
            process group that the user has initialised.
        world: the processes that the framework has started; None if it has started none.
        missing: whether the processes of this node have yet to be started.
        address: the address of the first node, if processes are started on several nodes.
        port: the port of the store on the first node; 0 lets the system choose a port.
    """

    placement: Placement
    store: Store | None = None
    world: LaunchedProcesses | None = None
    missing: bool = False
    address: str = "127.0.0.1"
    port: int = 0


def find_topology(environment: Environment, devices: Devices, num_nodes: int, strategy: Strategy | None) -> Topology:
    """Find this process's place in a run on ``devices`` of each of ``num_nodes`` nodes.

    Args:
        environment: describes what started the processes.
        devices: the devices that the run requests on this node.
        num_nodes: the number of nodes.
        strategy: the run's strategy; None if it is not known yet. With a single-process strategy, each process
            executes a separate run.

    Raises:
        ConfigurationError: the number of processes differs from the requested number, or the port of the store is in
            use, possibly by another job.
        DistributedError: no process hosts the store.
    """
    requested = len(devices.indices) * num_nodes
    single = _is_single_process(strategy, requested)
    if single and devices.chosen is False:
        requested = 1
    runs_alone = single or (devices.chosen and requested == 1)
    if dist.is_available() and dist.is_initialized() and not single:
        return Topology(_placement_in_users_group(environment, requested, devices.chosen))
    world = current_world()
    if world is not None:
        return _topology_in_world(world, requested, devices.chosen, runs_alone)
    if environment.started_processes:
        placement = environment.placement()
        if single:
            return Topology(Placement())
        _check_world_size(placement, requested, devices.chosen, environment.name)
        return Topology(placement, _open_store(environment, placement))
    if requested == 1:
        return Topology(Placement(), HashStore())
    first = environment.first_placement_on_node(num_nodes, len(devices.indices))
    if num_nodes == 1:
        return Topology(first, missing=True)
    return Topology(first, missing=True, address=environment.main_address, port=environment.main_port)


def resolve_environment(setting: str | Environment) -> Environment:
    """Return the environment for ``Fit(environment=...)``, which is an `Environment` or a name."""
    return setting if isinstance(setting, Environment) else environment_by_name(setting)


def is_standalone(environment: Environment) -> bool:
    """Whether this process is no rank of a run yet: no cluster, launcher or process group has made it one."""
    in_group = dist.is_available() and dist.is_initialized()
    return not (environment.started_processes or in_group or current_world() is not None)


def first_rank_topology(devices: Devices, num_nodes: int, strategy: Strategy | None) -> Topology:
    """Return rank 0's place in a run whose launcher starts all processes elsewhere, one for each device of each node.

    Raises:
        ConfigurationError: the strategy supports only a single process, and several are requested.
    """
    local_world_size = len(devices.indices)
    _is_single_process(strategy, local_world_size * num_nodes)
    placement = Placement(
        world_size=local_world_size * num_nodes, local_world_size=local_world_size, num_nodes=num_nodes
    )
    return Topology(placement, missing=True)


def _is_single_process(strategy: Strategy | None, requested: int) -> bool:
    """Whether the run's strategy is for a single process.

    Raises:
        ConfigurationError: the strategy is for a single process, and several devices are requested.
    """
    single = strategy is not None and strategy.single_process
    if strategy is not None and single and requested > 1:
        raise ConfigurationError(
            f"strategy={strategy.name!r} with {requested} devices.",
            "it trains one replica on one device.",
            "use strategy='ddp', or devices=1.",
        )
    return single


def _placement_in_users_group(environment: Environment, requested: int, chosen: bool) -> Placement:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = environment.placement() if environment.started_processes else None
    if placement is None or placement.world_size != world_size:
        placement = Placement(rank, world_size, rank, world_size)
    _check_world_size(placement, requested, chosen, "the initialised process group")
    return placement


def _topology_in_world(world: LaunchedProcesses, requested: int, chosen: bool, runs_alone: bool) -> Topology:
    if runs_alone:
        return Topology(Placement(), HashStore(), world)
    failures = world.failures()
    if failures:  # a process that has exited cannot rejoin
        raise RankFailedError(first_cause(failures))
    size = world.placement.world_size
    if chosen and requested != size:
        raise ConfigurationError(
            f"{requested} processes are asked for, and this script runs in {size}.",
            "its processes were started by an earlier run and last until the script ends.",
            f"use {size} again, or 1 (every process then runs on its own).",
        )
    return Topology(world.placement, world.store("runs"), world)


def _check_world_size(placement: Placement, requested: int, chosen: bool, owner: str) -> None:
    if chosen and requested not in (placement.world_size, placement.local_world_size):
        raise ConfigurationError(
            f"devices x num_nodes = {requested}, and {owner} has {placement.world_size} processes.",
            "a run uses exactly the devices that were requested.",
            "leave devices out, or make the numbers agree.",
        )


def _open_store(environment: Environment, placement: Placement) -> Store:
    if placement.world_size == 1:
        return HashStore()
    address, port = environment.main_address, environment.main_port
    key = address, port, placement, environment.job, environment.agent_hosts_store
    store = _stores.get(key)
    if store is None or not _is_reachable(store):  # its host may have ended, and another store listen on the port
        store = _stores[key] = _connect(*key)
    # A store that outlives the processes still contains the keys from before a restart, so each restart has a prefix.
    return PrefixStore(f"drivetrain/restart{environment.restart_count}", store)


def _connect(address: str, port: int, placement: Placement, name: str | None, agent_hosts: bool) -> TCPStore:
    job = name or NO_NAME
    if placement.rank == 0 and not agent_hosts:
        return host(address, port, num_nodes=placement.num_nodes, job=job)
    try:
        store = TCPStore(address, port, is_master=False, timeout=_CONNECT_TIMEOUT)
    except RuntimeError as error:
        raise DistributedError(
            f"rank {placement.rank} finds no store at {address}:{port}: {error}",
            "all ranks connect to it, and " + ("rank 0's agent" if agent_hosts else "rank 0") + " hosts it",
            "check whether rank 0 has failed, and whether MASTER_ADDR and MASTER_PORT lead to it from this machine",
        ) from error
    (admit_first if agent_hosts else admit)(store, job, placement.rank, address, port)
    return store


def _is_reachable(store: Store) -> bool:
    try:
        store.check(["drivetrain/job"])
    except RuntimeError:
        return False
    return True


def check_control_plane(strategy: Strategy, placement: Placement) -> None:
    """Check that a strategy's control plane connects the ranks. Unconnected ranks would train separately.

    Args:
        strategy: the strategy, after its `setup_environment`.
        placement: this process's placement.

    Raises:
        ConfigurationError: the strategy or its control plane has another rank or world size.
    """
    control = strategy.control
    expected = (placement.rank, placement.world_size)
    if (strategy.rank, strategy.world_size) != expected:
        raise ConfigurationError(
            f"{type(strategy).__name__} says that it is rank {strategy.rank} of {strategy.world_size}, in a process "
            f"that is rank {placement.rank} of {placement.world_size}.",
            "the data would be split over other ranks than the gradients are averaged over.",
            "leave Strategy.rank and world_size as `bind` sets them; shares of the data are data_rank and "
            "data_world_size.",
        )
    if (control.rank, control.world_size) != expected:
        raise ConfigurationError(
            f"{type(strategy).__name__}.control is a {type(control).__name__} of rank {control.rank} of "
            f"{control.world_size}, in a process that is rank {placement.rank} of {placement.world_size}.",
            "the ranks would not be connected: each would train on its own, on its part of the data.",
            "subclass drivetrain.strategies.DistributedStrategy, whose setup_environment connects the ranks (call "
            "it if you override it); a strategy for one process sets single_process = True.",
        )


def check_distinct_devices(strategy: Strategy) -> None:
    """Check that no two ranks use one GPU. NCCL's error in the first collective does not name the ranks. Collective.

    Args:
        strategy: the strategy, after its `setup_environment`.

    Raises:
        ConfigurationError: ranks share a GPU. Every rank raises the error, which names these ranks.
    """
    if strategy.device.type == "cuda" and strategy.world_size > 1:
        refuse_shared_devices(strategy.control.gather_objects(_identity(strategy.device)))


def _identity(device: torch.device) -> str:
    """Return a name that is unique to the GPU, across nodes."""
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if not identity:
        return f"{device} of {visible} on {socket.gethostname()}"
    return f"{identity} {visible}" if "MIG" in visible else identity  # each MIG slice of a GPU is a device


def refuse_shared_devices(devices: Sequence[str]) -> None:
    """Raise an error if several ranks use the same device.

    Args:
        devices: the unique name of each rank's device.

    Raises:
        ConfigurationError: ranks share a device. The error names the ranks.
    """
    for identity in dict.fromkeys(devices):
        ranks = [rank for rank, device in enumerate(devices) if device == identity]
        if len(ranks) > 1:
            raise ConfigurationError(
                f"Ranks {', '.join(map(str, ranks))} are on one GPU ({identity}).",
                "each rank needs its own: NCCL refuses duplicate devices, and the ranks would share its memory.",
                "start as many processes on a node as it has GPUs, or give each process its own by "
                "CUDA_VISIBLE_DEVICES.",
            )


def check_module_setup(strategy: Strategy, module: Module, run_step: object) -> None:
    """Check the result of a strategy's `setup_module`. Mistakes would otherwise cause wrong values or names later.

    Args:
        strategy: the strategy, after its `setup_module`.
        module: the run's module.
        run_step: the return value of `setup_module`.

    Raises:
        ConfigurationError: ``strategy.module`` is not the module, or ``run_step`` is not a function.
    """
    name = type(strategy).__name__
    if strategy.module is not module:
        current = "None" if strategy.module is None else f"a {type(strategy.module).__name__}"
        raise ConfigurationError(
            f"{name}.setup_module left self.module as {current}.",
            "weights and gradients are looked up there by their plain names, and a wrapper's names differ.",
            "set self.module to the module that setup_module receives; store a wrapper in another attribute.",
        )
    if run_step is module or not callable(run_step):
        returned = "the module itself" if run_step is module else repr(run_step)
        raise ConfigurationError(
            f"{name}.setup_module returned {returned}.",
            "it must return a function that calls a step: runner(step, *arguments) returns step(*arguments).",
            "return operator.call if the strategy does nothing around a step.",
        )
