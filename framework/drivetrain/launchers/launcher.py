"""Launcher: the interface of classes that start the processes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.environments import Placement

if TYPE_CHECKING:
    from drivetrain._runtime.accelerators import Devices
    from drivetrain.launchers.launched_processes import LaunchedProcesses


class Work(ABC):
    """The part of a run that every rank executes. `Launcher.run` gets a `Work` and calls one of its two methods.

    Attributes:
        device: the type of device that each rank uses, such as "cpu" or "cuda".
        signals: the signals to forward from the caller to the ranks.
    """

    device: str
    signals: Sequence[int]

    @abstractmethod
    def run_in_this_process(self, world: LaunchedProcesses) -> Any:
        """Run as one rank of ``world`` in this process, and return the result of the run.

        This method is for launchers whose other processes reach the same call by executing the caller's script.
        """

    @abstractmethod
    def run_in_other_processes(self, call: Callable[..., Any]) -> Any:
        """Run on ranks that are all in other processes, and return the result of the run.

        Afterwards the caller's module, trainer and callbacks have the state that a run in this process would leave.

        Args:
            call: ``call(function, *arguments)`` calls ``function(*arguments)`` on every rank and returns the value from
                rank 0. ``function`` and ``arguments`` can be pickled if the user's module and data can be pickled. On
                each rank, the variables of `torchrun_variables` or of a cluster must be set before ``function`` is
                called.
        """


class Launcher:
    """Starts the processes of a run. A subclass implements `launch` or `run`.

    Implement `launch` if the caller is one of the ranks and the other processes execute the caller's script. Implement
    `run` if the caller sends a function to the other processes.

    Constructing a launcher starts nothing. The engine uses a launcher only if the run needs processes that
    neither torchrun, nor a cluster, nor another launcher has started. Pass a launcher to
    ``Fit(launcher=...)``. Alternatively, register a callable without arguments that returns a launcher in the
    entry-point group ``drivetrain.launchers``, and pass the name of the entry point.
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
            ConfigurationError: the launcher cannot work in this process. The message gives the reason.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.launch is Launcher.launch and cls.run is Launcher.run:
            raise TypeError(f"{cls.__name__} implements neither launch, which returns LaunchedProcesses, nor run")

    def launch(self, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> LaunchedProcesses:
        """Start the other processes of this node, which execute the same run, and return the world of this process.

        Args:
            placement: the placement of the caller, which is the first rank of its node.
            address: the host of rank 0, if there are several nodes.
            port: the port of the store on rank 0's host; 0 lets the operating system choose.

        Raises:
            ConfigurationError: the processes cannot be started.
        """
        raise NotImplementedError(f"{type(self).__name__} runs functions in other processes: the caller gets no handle")

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        """Start the processes, run ``work`` on every rank, and return the result of the run.

        Args:
            work: what to run. Call `Work.run_in_this_process` if this process is a rank, and
                `Work.run_in_other_processes` if it is not.
            placement: the placement of the first process on this node.
            address: as for `launch`.
            port: as for `launch`.

        Raises:
            ConfigurationError: the processes cannot be started.
            RankFailedError: a rank raised or died.
        """
        return work.run_in_this_process(self.launch(placement, address=address, port=port))
