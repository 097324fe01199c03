"""Calls a function on every rank, each in an actor of a Ray cluster, and returns the values."""

from __future__ import annotations

import importlib
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from drivetrain._distributed.failure import Failure, RankFailedError, error_of_all, first_cause
from drivetrain._runtime.accelerators import Devices, resolve_devices
from drivetrain._runtime.process_state import ProcessState
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._ray_worker import Worker, WorkerLocation
from drivetrain.launchers.launcher import Launcher, Work

Result = TypeVar("Result")

# Ray's error about a dead actor has lines that only identify the actor. These are the prefixes of such lines.
_IDENTITY_PREFIXES = ("class_name:", "actor_id:", "namespace:", "name:", "repr:", "pid:", "ip:")


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

    kind = "ray"
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

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        """Run ``work`` in actors. Ray provides the addresses, and rank 0's worker chooses the port."""

        def call(fn: Callable[..., Any], *args: Any) -> Any:
            return self.launch(placement, fn, *args, device=work.device)

        return work.run_in_other_processes(call)

    def launch(  # type: ignore[override]  # the caller gets no handle
        self, placement: Placement, fn: Callable[..., Result], *args: Any, device: str = "cpu"
    ) -> Result:
        """Call ``fn(*args)`` on every rank of all nodes and return the value from rank 0.

        Args:
            placement: rank 0's placement.
            fn: the function to call. The function and its arguments are pickled by value if they come from the script
                of the caller.
            args: the arguments of ``fn``.
            device: "cpu" or "cuda".

        Raises:
            ConfigurationError: ray is not installed, the cluster has no room, or ``fn`` or an argument cannot be
                pickled.
            RankFailedError: a rank raised or died. If all ranks raised the same error, that error is raised instead.
        """
        return self.launch_all(placement, fn, *args, device=device)[0]

    def launch_all(
        self, placement: Placement, fn: Callable[..., Result], *args: Any, device: str = "cpu"
    ) -> list[Result]:
        """Call ``fn(*args)`` as `launch` does and return the values of all ranks, by rank."""
        ray = _import_ray()
        with ProcessState():  # ray.init sets signal handlers and variables
            started_here = not ray.is_initialized()
            if started_here:
                ray.init(address=self._address, include_dashboard=False, logging_level="error")
            try:
                return self._launch(ray, placement, _dump(ray, fn, args), device)
            finally:
                if started_here:
                    ray.shutdown()

    def _launch(self, ray: Any, placement: Placement, work: bytes, device: str) -> list[Any]:
        resources = dict(self._resources or {"CPU": 1, **({"GPU": 1} if device == "cuda" else {})})
        group = self._reserve(ray, placement, resources)
        actors: list[Any] = []
        try:
            actors = [_actor(ray, group, placement, resources, rank) for rank in range(placement.world_size)]
            return self._run(ray, actors, placement, work)
        finally:
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)

    def _reserve(self, ray: Any, placement: Placement, resources: Mapping[str, float]) -> Any:
        """Return a placement group of one bundle per node, with room for all workers of the node."""
        bundle = {name: amount * placement.local_world_size for name, amount in resources.items()}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = [node for node in nodes if all(node.get(name, 0) >= amount for name, amount in bundle.items())]
        if len(fitting) >= placement.num_nodes:
            strategy = "STRICT_SPREAD" if placement.num_nodes > 1 else "STRICT_PACK"
            group = ray.util.placement_group([bundle] * placement.num_nodes, strategy=strategy)
            if group.wait(self._placement_timeout):
                return group
            ray.util.remove_placement_group(group)
            why = f"other jobs use the cluster, which has {_format_resources(ray.available_resources())} free"
        else:
            totals = [{name: node.get(name, 0) for name in bundle} for node in nodes]
            why = f"the nodes of the cluster have {', '.join(map(_format_resources, totals))}"
        raise ConfigurationError(
            f"The Ray cluster has no room for {placement.num_nodes} node(s) of {placement.local_world_size} worker(s) "
            f"with {_format_resources(resources)} each",
            why,
            "use fewer devices or nodes, reserve less with RayLauncher(resources_per_worker=...), or add machines",
        )

    def _run(self, ray: Any, actors: Sequence[Any], placement: Placement, work: bytes) -> list[Any]:
        places = [_placement_of(placement, rank) for rank in range(placement.world_size)]
        outcomes = self._collect(ray, [actor.location.remote() for actor in actors])
        locations: list[WorkerLocation] = _all_or_raise(outcomes)
        [port] = _all_or_raise(self._collect(ray, [actors[0].host.remote(locations[0].address)]))
        shared, paths = ray.put(work), [path for path in sys.path if path]
        calls = [
            actor.run.remote(place, locations[0].address, port, _devices_of(place, locations), paths, shared)
            for actor, place in zip(actors, places, strict=True)
        ]
        return [pickle.loads(value) for value in _all_or_raise(self._collect(ray, calls))]

    def _collect(self, ray: Any, calls: Sequence[Any]) -> list[Any]:
        """Return the result or the `Failure` of each call. After the first failure, wait only for the grace period."""
        outcomes: list[Any] = [None] * len(calls)
        rank_of = {call: rank for rank, call in enumerate(calls)}
        end = float("inf")
        while rank_of and (remaining := end - time.monotonic()) > 0:
            done, _ = ray.wait(list(rank_of), num_returns=1, timeout=None if end == float("inf") else remaining)
            for call in done:
                rank = rank_of.pop(call)
                outcomes[rank] = _get_outcome(ray, rank, call)
                if isinstance(outcomes[rank], Failure):
                    end = min(end, time.monotonic() + self._grace)
        return outcomes


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
    except ImportError as error:
        raise ConfigurationError(
            "launcher='ray' needs ray, which cannot be imported", str(error), "pip install 'drivetrain[ray]'"
        ) from error
    return ray


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


def _placement_of(first: Placement, rank: int) -> Placement:
    node, local_rank = divmod(rank, first.local_world_size)
    return replace(first, rank=rank, local_rank=local_rank, node_rank=node)


def _devices_of(place: Placement, locations: Sequence[WorkerLocation]) -> list[str]:
    """Return the devices of all workers on the node of ``place``, by local rank."""
    begin = place.node_rank * place.local_world_size
    return [device for location in locations[begin : begin + place.local_world_size] for device in location.devices]


def _get_outcome(ray: Any, rank: int, call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:  # an error outside the user's function
        return Failure.of_exception(rank, error.cause or error)
    except ray.exceptions.RayError as error:
        # The actor was killed, ran out of memory or was lost with its machine. Ray's text gives the actor and the
        # reason.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = [line for line in lines if not line.startswith(_IDENTITY_PREFIXES)]
        location = "".join(f" on {line.split()[-1]}" for line in lines if line.startswith("ip:"))
        return Failure(rank, message=f"died{location}: {' '.join(reason[1:] or reason)}")


def _all_or_raise(outcomes: list[Any]) -> list[Any]:
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if not failures:
        return outcomes
    error, original = RankFailedError(first_cause(failures)), error_of_all(failures, len(outcomes))
    if original is not None:
        raise original from error
    raise error


def _dump(ray: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        work: bytes = ray.cloudpickle.dumps((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"launcher='ray' cannot send the function and its arguments to the workers: {error}",
            "the function and its arguments are pickled to be sent",
            "leave out open files, locks and connections",
        ) from error
    return work


def _format_resources(resources: Mapping[str, float]) -> str:
    return " ".join(f"{name} {amount:g}" for name, amount in resources.items() if ":" not in name) or "nothing"
