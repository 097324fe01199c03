"""The actor that runs one rank on a Ray cluster."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure
from drivetrain._distributed.rendezvous import host
from drivetrain.environments import Placement
from drivetrain.launchers._torchrun_variables import suggested_threads, torchrun_variables
from drivetrain.launchers.launched_processes import LaunchedProcesses, set_current_world


@dataclass(frozen=True, slots=True)
class WorkerLocation:
    """Where Ray placed a worker.

    Attributes:
        address: the address of the machine.
        devices: the ids of the worker's GPUs.
    """

    address: str
    devices: list[str]


class Worker:
    """Runs one rank. The launcher makes this class a Ray actor."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def location(self) -> WorkerLocation:
        """Return where Ray placed this worker."""
        ray = importlib.import_module("ray")
        context = ray.get_runtime_context()
        return WorkerLocation(ray.util.get_node_ip_address(), list(context.get_accelerator_ids().get("GPU", [])))

    def host(self, address: str) -> int:
        """Host the rendezvous store at ``address``, an address of this machine, and return its port."""
        self._store = host(address, 0)
        return int(self._store.port)

    def run(
        self, placement: Placement, address: str, port: int, devices: list[str], paths: list[str], work: bytes
    ) -> bytes | Failure:
        """Call the pickled function in ``work`` as one rank, and return the pickled return value or the failure."""
        # The import paths of the caller are added, for modules outside the environment that also exist on this machine.
        sys.path += [path for path in paths if path not in sys.path]
        os.environ.update(torchrun_variables(placement, address, port))
        if devices:
            # Ray makes only the devices of this worker visible, but a rank selects one of all devices of its node by
            # local rank.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        threads = os.environ.get("OMP_NUM_THREADS")
        torch.set_num_threads(int(threads) if threads else suggested_threads(placement.local_world_size))
        world = LaunchedProcesses("function", placement, address, port, store=self._store)
        set_current_world(world)
        try:
            fn, args = pickle.loads(work)
            return pickle.dumps(fn(*args))
        except BaseException as error:
            return Failure.of_exception(placement.rank, error)
