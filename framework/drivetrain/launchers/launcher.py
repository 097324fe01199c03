"""Launcher: the interface of classes that start the processes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.environments import Placement

if TYPE_CHECKING:
    from drivetrain._runtime.accelerators import Devices
    from drivetrain.launchers.world import World


class Work(ABC):
    """What a run does on each rank. The engine passes it to `Launcher.run`, which calls one of the two methods.

    Attributes:
        device: "cpu", "cuda", ...: the type of device that each rank uses.
        signals: the signals to forward from the caller to the ranks.
    """

    device: str
    signals: Sequence[int]

    @abstractmethod
    def here(self, world: World) -> Any:
        """Run as one rank of ``world`` in this process, and return the result of the run.

        For launchers whose other processes reach the same call by themselves, as when they run the script again.
        """

    @abstractmethod
    def elsewhere(self, call: Callable[..., Any]) -> Any:
        """Run on ranks that are all in other processes, and return the result of the run.

        Afterwards the caller's module, trainer and callbacks have the state that a run in this process would leave.

        Args:
            call: ``call(function, *arguments)`` calls ``function(*arguments)`` on every rank and returns the value from
                rank 0. Both can be pickled if the user's module and data can. A process in which the function is called
                gets its rank from the environment: from `torchrun_variables` or a cluster's variables.
        """


class Launcher:
    """Starts the processes of a run. A subclass implements `launch` or `run`.

    Implement `launch` if the other processes reach the run by themselves and the caller is one of the ranks, as when
    the script is run again. Implement `run` if the caller sends them a function.

    Constructing a launcher starts nothing. The engine uses it only if the run still needs processes: not in those that
    it started, nor under torchrun or a cluster. Pass one to ``Fit(launcher=...)``, or register a callable without
    arguments that returns one in the entry-point group ``drivetrain.launchers`` and pass its name.
    """

    places_devices: ClassVar[bool] = False
    """True if the launcher's scheduler decides which machines and devices the ranks get. `devices` then describes each
    node, and the caller's own devices are not queried."""

    def devices(self, accelerator: str, devices: int | str | list[int]) -> Devices:
        """Return the devices of each node of a run, for a launcher with ``places_devices = True``.

        Args:
            accelerator: as for ``Fit``.
            devices: as for ``Fit``.

        Raises:
            ConfigurationError: the devices are unknown or cannot be provided.
        """
        from drivetrain._runtime.accelerators import resolve_devices

        return resolve_devices(accelerator, devices)

    def check(self, num_local: int) -> None:
        """Raise an error, before anything is started, if the launcher cannot work in this process.

        Args:
            num_local: the number of processes on this node.

        Raises:
            ConfigurationError: says why it cannot work.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.launch is Launcher.launch and cls.run is Launcher.run:
            raise TypeError(f"{cls.__name__} implements neither launch, which returns a World, nor run")

    def launch(self, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> World:
        """Start the other processes of this node, which reach the same run, and return this process's world.

        Args:
            placement: the caller's placement, with the first rank of its node.
            address: the host of rank 0, if there are several nodes.
            port: the port of the store on rank 0's host; 0 lets the operating system choose.

        Raises:
            ConfigurationError: the processes cannot be started.
        """
        raise NotImplementedError(f"{type(self).__name__} runs functions in other processes: the caller gets no World")

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        """Start the processes, run ``work`` on every rank, and return its result.

        Args:
            work: what to run, in this process too (`Work.here`) or only in others (`Work.elsewhere`).
            placement: the placement of this node's first process, with the number of processes here and in all.
            address: as for `launch`.
            port: as for `launch`.

        Raises:
            ConfigurationError: the processes cannot be started.
            RankFailedError: a rank raised or died.
        """
        return work.here(self.launch(placement, address=address, port=port))
