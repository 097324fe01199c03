"""Who this process is among how many, and whether more have to be started."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn import Module

from drivetrain._distributed.failure import RankFailedError, first_cause
from drivetrain._distributed.job_identity import Job
from drivetrain._distributed.rendezvous import admit, admit_first, host
from drivetrain._runtime.accelerators import Devices
from drivetrain.environments import Environment, Placement, environment_by_name
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import World, current_world
from drivetrain.strategies.strategy import Strategy

_CONNECT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this process stands.

    Attributes:
        placement: among all processes; with ``missing``, the placement the first process of this node will have.
        store: the way to the others; None where this process is alone, or a process group of the user's leads there.
        world: the processes that we started, where we did.
        missing: the other processes of this node have yet to be started.
        address: of the first node, where processes are started on several.
        port: of the store there; 0 lets the system choose.
    """

    placement: Placement
    store: Store | None = None
    world: World | None = None
    missing: bool = False
    address: str = "127.0.0.1"
    port: int = 0


def find_topology(environment: Environment, devices: Devices, num_nodes: int, strategy: Strategy | None) -> Topology:
    """Find this process's place for a run on ``devices`` of each of ``num_nodes`` nodes.

    Args:
        environment: who started the processes.
        devices: what the run asks for on this node.
        num_nodes: over how many nodes.
        strategy: the run's, where it is known yet. One for a single process takes one, whatever others there are.

    Raises:
        ConfigurationError: the processes that are there are not as many as asked for; or the port where they are to
            meet is taken, or another job's.
        DistributedError: nobody hosts the store where they are to meet.
    """
    asked = len(devices.indices) * num_nodes
    single = _takes_one(strategy, asked)
    if single and devices.chosen is False:
        asked = 1
    alone = single or (devices.chosen and asked == 1)
    if dist.is_available() and dist.is_initialized() and not single:
        return Topology(_in_users_group(environment, asked, devices.chosen))
    world = current_world()
    if world is not None:
        return _in_world(world, asked, devices.chosen, alone)
    if environment.started_us:
        placement = environment.placement()
        if single:
            return Topology(Placement())
        _check_size(placement, asked, devices.chosen, environment.name)
        return Topology(placement, _store_of(environment, placement))
    if asked == 1:
        return Topology(Placement(), HashStore())
    first = environment.first_on_node(num_nodes, len(devices.indices))
    if num_nodes == 1:
        return Topology(first, missing=True)
    return Topology(first, missing=True, address=environment.main_address, port=environment.main_port)


def environment_of(setting: str | Environment) -> Environment:
    """Return the environment that ``Fit(environment=...)`` is, or names, as of this moment."""
    return setting if isinstance(setting, Environment) else environment_by_name(setting)


def stands_alone(environment: Environment) -> bool:
    """Whether this process is of no run yet: neither a cluster nor a launcher nor a process group makes it one rank."""
    in_group = dist.is_available() and dist.is_initialized()
    return not (environment.started_us or in_group or current_world() is not None)


def topology_of_first(devices: Devices, num_nodes: int, strategy: Strategy | None) -> Topology:
    """Return rank 0's place in a run whose processes are all started elsewhere, on ``devices`` of each node.

    Raises:
        ConfigurationError: the strategy takes one process, and there would be more.
    """
    local_world_size = len(devices.indices)
    _takes_one(strategy, local_world_size * num_nodes)
    placement = Placement(
        world_size=local_world_size * num_nodes, local_world_size=local_world_size, num_nodes=num_nodes
    )
    return Topology(placement, missing=True)


def expected_placement(setting: str | Environment, devices: int | str | list[int], num_nodes: int) -> Placement:
    """Where this process will stand in a run that has not begun, for what a script prints or reads before it.

    In a process that runs the caller's script again it is the rank that the process was started for. What does not fit
    together is refused when the run begins, not here.
    """
    if num_nodes == 1 and devices in (1, "1") and current_world() is not None:
        return Placement()  # every rank of the script's runs by itself
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return Placement(rank, world_size, rank, world_size)
    environment = environment_of(setting)
    return environment.placement() if environment.started_us else Placement()


def _takes_one(strategy: Strategy | None, asked: int) -> bool:
    """Whether the run's strategy is for a single process.

    Raises:
        ConfigurationError: it is, and several are asked for.
    """
    single = strategy is not None and strategy.single_process
    if strategy is not None and single and asked > 1:
        raise ConfigurationError(
            f"strategy={strategy.name!r} with {asked} devices.",
            "it trains one replica on one device.",
            "use strategy='ddp', or devices=1.",
        )
    return single


def _in_users_group(environment: Environment, asked: int, chosen: bool) -> Placement:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = environment.placement() if environment.started_us else None
    if placement is None or placement.world_size != world_size:
        placement = Placement(rank, world_size, rank, world_size)
    _check_size(placement, asked, chosen, "the process group that is there")
    return placement


def _in_world(world: World, asked: int, chosen: bool, alone: bool) -> Topology:
    if alone:
        return Topology(Placement(), HashStore(), world)
    failures = world.failures()
    if failures:  # a process that has ended cannot come back
        raise RankFailedError(first_cause(failures))
    size = world.placement.world_size
    if chosen and asked != size:
        raise ConfigurationError(
            f"{asked} processes are asked for, and this script runs in {size}.",
            "its processes were started by an earlier run, and last until the script ends.",
            f"ask for {size} again, or for 1 (every rank then runs by itself).",
        )
    return Topology(world.placement, world.store("runs"), world)


def _check_size(placement: Placement, asked: int, chosen: bool, who: str) -> None:
    if chosen and asked not in (placement.world_size, placement.local_world_size):
        raise ConfigurationError(
            f"devices x num_nodes = {asked}, and {who} has {placement.world_size} processes.",
            "what was asked for is what runs.",
            "leave devices out, or make the numbers agree.",
        )


def _store_of(environment: Environment, placement: Placement) -> Store:
    if placement.world_size == 1:
        return HashStore()
    store = _meet(environment.main_address, environment.main_port, placement, environment.job, environment.agent_store)
    # A store that outlives the processes still holds the keys of those before a restart.
    return PrefixStore(f"drivetrain/restart{environment.restart_count}", store)


@lru_cache(maxsize=8)
def _meet(address: str, port: int, placement: Placement, name: str | None, agents: bool) -> TCPStore:
    # Kept for the life of the process: rank 0 cannot host a second store on the port, nor another come in again.
    ranks = (placement.rank, placement.local_rank, placement.node_rank)
    job = Job.of_this_process(name or ("none" if agents else None), ranks)
    if placement.rank == 0 and not agents:
        return host(address, port, num_nodes=placement.num_nodes, job=job)
    try:
        store = TCPStore(address, port, is_master=False, timeout=_CONNECT)
    except RuntimeError as error:
        raise DistributedError(
            f"rank {placement.rank} finds no store at {address}:{port}: {error}",
            "all ranks meet there, and rank 0 hosts it" + (", by its agent" if agents else ""),
            "look whether rank 0 has failed, and whether MASTER_ADDR and MASTER_PORT lead to it from this machine",
        ) from error
    (admit_first if agents else admit)(store, job, placement.rank, address, port)
    return store


def check_control_plane(strategy: Strategy, placement: Placement) -> None:
    """Refuse a strategy whose ranks do not talk to each other: each would train by itself, on its part of the data.

    Args:
        strategy: after its `setup_environment`.
        placement: this process among all of the run.

    Raises:
        ConfigurationError: its control plane is not that of the run's processes.
    """
    control, own = strategy.control, f"{type(strategy).__name__}.control"
    expected = (placement.rank, placement.world_size)
    if (strategy.rank, strategy.world_size) != expected:
        raise ConfigurationError(
            f"{type(strategy).__name__} says that it is rank {strategy.rank} of {strategy.world_size}, in a process "
            f"that is rank {placement.rank} of {placement.world_size}.",
            "the ranks would take other parts of the data than their gradients are averaged over.",
            "leave Strategy.rank and world_size as `bind` sets them; shares of the data are data_rank and "
            "data_world_size.",
        )
    if (control.rank, control.world_size) != expected:
        raise ConfigurationError(
            f"{own} is a {type(control).__name__} of rank {control.rank} of {control.world_size}, in a process that is "
            f"rank {placement.rank} of {placement.world_size}.",
            "the ranks would not hear of each other: each would train by itself on its part of the data.",
            "subclass drivetrain.strategies.DistributedStrategy, whose setup_environment joins the ranks (call it "
            "where you override it); a strategy for one process says single_process = True.",
        )


def check_devices_apart(strategy: Strategy) -> None:
    """Refuse two ranks on one GPU, which NCCL would do at its first collective, without a name. Collective.

    Args:
        strategy: after its `setup_environment`.

    Raises:
        ConfigurationError: on every rank; names the ranks.
    """
    if strategy.device.type == "cuda" and strategy.world_size > 1:
        refuse_shared_devices(strategy.control.gather_objects(_identity(strategy.device)))


def _identity(device: torch.device) -> str:
    """What no other GPU is called."""
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if not identity:
        return f"{device} of {visible} on {socket.gethostname()}"
    return f"{identity} {visible}" if "MIG" in visible else identity  # slices of one GPU are several devices


def refuse_shared_devices(devices: Sequence[str]) -> None:
    """Refuse what several ranks have.

    Args:
        devices: the identity of each rank's.

    Raises:
        ConfigurationError: names the ranks.
    """
    for identity in dict.fromkeys(devices):
        ranks = [rank for rank, one in enumerate(devices) if one == identity]
        if len(ranks) > 1:
            raise ConfigurationError(
                f"Ranks {', '.join(map(str, ranks))} are on one GPU ({identity}).",
                "each rank needs one of its own: NCCL refuses them as duplicates, and they would share its memory.",
                "start as many processes on a node as it has GPUs, or show each process its own by "
                "CUDA_VISIBLE_DEVICES.",
            )


def check_set_up(strategy: Strategy, module: Module, run_step: object) -> None:
    """Refuse what a strategy's `setup_module` left undone, which would show as wrong numbers or names much later.

    Args:
        strategy: after its `setup_module`.
        module: the run's.
        run_step: what `setup_module` returned.

    Raises:
        ConfigurationError: names what is missing.
    """
    name = type(strategy).__name__
    if strategy.module is not module:
        held = "None" if strategy.module is None else f"a {type(strategy.module).__name__}"
        raise ConfigurationError(
            f"{name}.setup_module left self.module as {held}.",
            "weights and gradients are found there by their plain names, and those of a wrapper are other ones.",
            "set self.module to the module that setup_module is given; keep a wrapper under another name.",
        )
    if run_step is module or not callable(run_step):
        returned = "the module itself" if run_step is module else repr(run_step)
        raise ConfigurationError(
            f"{name}.setup_module returned {returned}.",
            "it returns what calls a step: runner(step, *arguments) returns step(*arguments).",
            "return operator.call where nothing has to be done around a step.",
        )
