"""Finds the processes of a run: those that something has started, or the place where a launcher starts them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.rendezvous import NO_NAME, connect, host
from drivetrain._runtime.accelerators import Devices
from drivetrain.environments import Environment, Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import LaunchedProcesses, current_processes
from drivetrain.strategies.strategy import Strategy

_CONNECT_TIMEOUT = timedelta(minutes=5)

_stores: dict[tuple[Placement, bool], TCPStore] = {}
"""The stores that this process hosts or has joined, by the arguments of `_host_or_connect`.

They are kept for later runs: rank 0 cannot host a second store on a port, and no rank joins a store twice.
"""


def find_processes(
    environment: Environment, devices: Devices, num_nodes: int, strategy: Strategy | None
) -> LaunchedProcesses | None:
    """Return the processes of a run on ``devices`` of each of ``num_nodes`` nodes, or None if they must be started.

    Args:
        environment: describes what started this process.
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
    alone = LaunchedProcesses(Placement(), store=HashStore())
    if check_number(strategy, requested):
        return alone
    if dist.is_initialized():
        placement = _placement_in_users_group(environment, requested, devices.chosen)
        return LaunchedProcesses(placement, store=HashStore())  # the ranks meet in the user's group
    processes = current_processes()
    if processes is not None:
        if devices.chosen and requested == 1:
            return alone
        processes.check_usable(requested if devices.chosen else None)
        return processes
    if environment.started_processes:
        placement = environment.placement()
        _check_world_size(placement, requested, devices.chosen, environment.name)
        if placement.world_size == 1:
            return LaunchedProcesses(placement, store=HashStore())
        placement = environment.with_address(placement)
        return LaunchedProcesses(placement, store=_open_store(environment, placement))
    return alone if requested == 1 else None


def first_placement(environment: Environment | None, devices: Devices, num_nodes: int) -> Placement:
    """Return the placement of the first process on this node, for processes that a launcher has yet to start.

    Args:
        environment: describes what started this process; None if the launcher chooses all nodes.
        devices: the devices of each node.
        num_nodes: the number of nodes.
    """
    on_node = len(devices.indices)
    if environment is None:
        return Placement(world_size=on_node * num_nodes, local_world_size=on_node, num_nodes=num_nodes)
    placement = environment.first_placement_on_node(num_nodes, on_node)
    return placement if num_nodes == 1 else environment.with_address(placement)


def is_standalone(environment: Environment) -> bool:
    """Whether this process is no rank of a run yet: no cluster, launcher or process group has made it one."""
    return not (environment.started_processes or dist.is_initialized() or current_processes() is not None)


def check_number(strategy: Strategy | None, requested: int) -> bool:
    """Return whether the run's strategy is for a single process.

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
    placement = environment.placement() if environment.started_processes else None
    if placement is None or placement.world_size != dist.get_world_size():
        placement = Placement.on_one_node(dist.get_rank(), dist.get_world_size())
    _check_world_size(placement, requested, chosen, "the initialised process group")
    return placement


def _check_world_size(placement: Placement, requested: int, chosen: bool, owner: str) -> None:
    if chosen and requested not in (placement.world_size, placement.local_world_size):
        raise ConfigurationError(
            f"devices x num_nodes = {requested}, and {owner} has {placement.world_size} processes.",
            "a run uses exactly the devices that were requested.",
            "leave devices out, or make the numbers agree.",
        )


def _open_store(environment: Environment, placement: Placement) -> Store:
    key = placement, environment.agent_hosts_store
    store = _stores.get(key)
    if store is None or not _is_reachable(store):  # its host may have ended, and another store listen on the port
        store = _stores[key] = _host_or_connect(*key)
    # A store that outlives the processes still contains the keys from before a restart, so each restart has a prefix.
    return PrefixStore(f"drivetrain/restart{environment.restart_count}", store)


def _host_or_connect(placement: Placement, agent_hosts: bool) -> TCPStore:
    address, port, job = placement.address, placement.port, placement.job
    if placement.rank == 0 and not agent_hosts:
        return host(address, port, num_nodes=placement.num_nodes, job=job or NO_NAME)
    return connect(address, port, job, placement.rank, _CONNECT_TIMEOUT, outlives_ranks=agent_hosts)


def _is_reachable(store: Store) -> bool:
    try:
        store.check(["drivetrain/job"])
    except RuntimeError:
        return False
    return True
