"""Calls a function on every rank, each in an actor of a Ray cluster, and returns the values."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.child_processes import all_or_raise, collect, outcome_of, suggested_threads
from drivetrain._distributed.failure import Failure
from drivetrain._distributed.rendezvous import host, name_new_job
from drivetrain._runtime.accelerators import Devices, resolve_devices
from drivetrain._runtime.lazy_names import import_optional
from drivetrain._runtime.process_state import ProcessState
from drivetrain.environments import Placement, torchrun_variables
from drivetrain.errors import ConfigurationError
from drivetrain.launchers.launched_processes import LaunchedProcesses, set_current_processes
from drivetrain.launchers.launcher import Launcher


class RayLauncher(Launcher):
    """Starts one actor per rank on a Ray cluster and waits until all ranks are done.

    If the caller is connected to a cluster, the launcher uses that cluster and leaves it running. Otherwise, for the
    duration of the run, the launcher connects to the cluster at ``address`` or ``RAY_ADDRESS``, or starts a cluster on
    this machine.

    The workers of a node share one bundle of a placement group, and the nodes of a run are different machines. Rank 0's
    worker hosts the store on a free port. Signals to the caller are not forwarded; Ctrl-C ends the run.

    Args:
        resources_per_worker: what Ray reserves for each worker. None reserves one CPU, and also one GPU for a run on
            GPUs.
        address: the address of the cluster, as for ``ray.init``.
        placement_timeout: seconds to wait for the cluster to have room for all workers.
        grace: seconds that the other ranks get to stop after the first failure.
    """

    places_devices: ClassVar[bool] = True

    def __init__(
        self,
        resources_per_worker: Mapping[str, float] | None = None,
        *,
        address: str | None = None,
        placement_timeout: float = 120.0,
        grace: float = 5.0,
    ) -> None:
        self._resources = resources_per_worker
        self._address = address
        self._placement_timeout = placement_timeout
        self._grace = grace

    def devices(self, accelerator: str, devices: int | str | list[int]) -> Devices:
        """Return the devices of each node of the run, which may differ from the devices of the caller's machine.

        Raises:
            ConfigurationError: ``devices`` is not a count.
        """
        counted = None if isinstance(devices, list) else resolve_devices("cpu", devices)
        if counted is None or not counted.chosen:
            raise ConfigurationError(
                f"devices={devices!r} with launcher='ray'",
                "the caller does not know the machines that the cluster will assign",
                "give the number of workers on each node, such as devices=2",
            )
        kind = "cuda" if accelerator in ("gpu", "cuda") else resolve_devices(accelerator, "auto").type
        return Devices(kind, counted.indices, chosen=True)

    def call(
        self,
        placement: Placement,
        function: Callable[..., Any],
        *arguments: Any,
        device: str = "cpu",
        signals: Sequence[int] = (),
    ) -> Any:
        """Call ``function(*arguments)`` on every rank of all nodes and return the value from rank 0.

        Args:
            placement: rank 0's placement. Ray provides the addresses, and rank 0's worker chooses the port.
            function: the function to call. The function and its arguments are pickled by value if they come from the
                script of the caller.
            arguments: the arguments.
            device: "cpu" or "cuda".
            signals: unused; signals are not forwarded.

        Raises:
            ConfigurationError: ray is not installed, or the cluster has no room.
            RankFailedError: a rank raised or died. If all ranks raised the same error, that error is raised instead.
        """
        ray = import_optional("ray", "launcher='ray'", "pip install 'drivetrain[ray]'")
        importlib.import_module("ray.util")
        with ProcessState():  # ray.init sets signal handlers and variables
            started_here = not ray.is_initialized()
            if started_here:
                ray.init(address=self._address, include_dashboard=False, logging_level="error")
            try:
                return self._call(ray, placement, ray.cloudpickle.dumps((function, arguments)), device)
            finally:
                if started_here:
                    ray.shutdown()

    def _call(self, ray: Any, placement: Placement, work: bytes, device: str) -> Any:
        resources = dict(self._resources or {"CPU": 1, **({"GPU": 1} if device == "cuda" else {})})
        group = self._reserve(ray, placement, resources)
        actors: list[Any] = []
        try:
            actors = [_actor(ray, group, placement, resources, rank) for rank in range(placement.world_size)]
            return self._run(ray, actors, placement, work)[0]
        finally:
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)

    def _reserve(self, ray: Any, placement: Placement, resources: Mapping[str, float]) -> Any:
        """Return a placement group of one bundle per node, with room for all workers of the node."""
        bundle = {name: amount * placement.local_world_size for name, amount in resources.items()}
        strategy = "STRICT_SPREAD" if placement.num_nodes > 1 else "STRICT_PACK"
        group = ray.util.placement_group([bundle] * placement.num_nodes, strategy=strategy)
        if not group.wait(self._placement_timeout):
            ray.util.remove_placement_group(group)
            raise ConfigurationError(
                f"The Ray cluster had no room within {self._placement_timeout:g} s for {placement.num_nodes} node(s) "
                f"of {placement.local_world_size} worker(s) with {resources} each",
                f"the cluster has {ray.cluster_resources()} in all, of which {ray.available_resources()} are free",
                "use fewer devices or nodes, reserve less with RayLauncher(resources_per_worker=...), or add machines",
            )
        return group

    def _run(self, ray: Any, actors: Sequence[Any], placement: Placement, work: bytes) -> list[Any]:
        locations = self._collect(ray, [actor.location.remote() for actor in actors])
        first = replace(placement, address=locations[0][0], job=name_new_job(1))
        [port] = self._collect(ray, [actors[0].host.remote(first)])
        shared, paths = ray.put(work), [path for path in sys.path if path]
        calls = []
        for rank, actor in enumerate(actors):
            node, local_rank = divmod(rank, placement.local_world_size)
            place = replace(first, rank=rank, local_rank=local_rank, node_rank=node, port=port)
            on_node = locations[rank - local_rank : rank - local_rank + placement.local_world_size]
            devices = [device for _, of_worker in on_node for device in of_worker]
            calls.append(actor.run.remote(place, devices, paths, shared))
        return [pickle.loads(value) for value in self._collect(ray, calls)]

    def _collect(self, ray: Any, calls: Sequence[Any]) -> list[Any]:
        """Return the results of one call on each rank, beginning with rank 0."""

        def receive(ranks: Collection[int], timeout: float) -> dict[int, Any]:
            waits_forever = timeout == float("inf")
            done, _ = ray.wait([calls[rank] for rank in ranks], timeout=None if waits_forever else timeout)
            return {rank: _get_outcome(ray, rank, calls[rank]) for rank in ranks if calls[rank] in done}

        return all_or_raise(collect(range(len(calls)), receive, grace=self._grace), len(calls))


def _actor(ray: Any, group: Any, placement: Placement, resources: Mapping[str, float], rank: int) -> Any:
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    options = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": others,
        "max_restarts": 0,
        "scheduling_strategy": strategy(group, placement_group_bundle_index=rank // placement.local_world_size),
    }
    return ray.remote(Worker).options(**options).remote()


def _get_outcome(ray: Any, rank: int, call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:  # an error outside the user's function
        return Failure.of_exception(rank, error.cause or error)
    except ray.exceptions.RayError as error:
        # The actor was killed, ran out of memory or was lost with its machine. Ray's text gives machine and reason.
        return Failure(rank, message=f"died: {error}")


# Code that runs in the actors


class Worker:
    """Runs one rank. The launcher makes this class a Ray actor."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def location(self) -> tuple[str, list[str]]:
        """Return the address of the machine where Ray placed this worker, and the ids of the worker's GPUs."""
        ray = importlib.import_module("ray")
        context = ray.get_runtime_context()
        return ray.util.get_node_ip_address(), list(context.get_accelerator_ids().get("GPU", []))

    def host(self, placement: Placement) -> int:
        """Host the rendezvous store at the address of ``placement``, which is this machine's, and return its port."""
        self._store = host(placement.address, 0, job=placement.job)
        return int(self._store.port)

    def run(self, placement: Placement, devices: list[str], paths: list[str], work: bytes) -> bytes | Failure:
        """Call the pickled function in ``work`` as one rank, and return the pickled return value or the failure."""
        # The import paths of the caller are added, for modules outside the environment that also exist on this machine.
        sys.path += [path for path in paths if path not in sys.path]
        os.environ.update(torchrun_variables(placement))
        if devices:
            # Ray makes only the devices of this worker visible, but a rank selects one of all devices of its node by
            # local rank.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        threads = os.environ.get("OMP_NUM_THREADS")
        torch.set_num_threads(int(threads) if threads else suggested_threads(placement.local_world_size))
        set_current_processes(LaunchedProcesses(placement, "function", store=self._store))

        def call() -> Any:
            function, arguments = pickle.loads(work)
            return function(*arguments)

        return outcome_of(placement.rank, call)
