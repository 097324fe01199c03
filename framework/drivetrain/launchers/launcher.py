"""Launcher: the interface of classes that start the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.environments import Placement

if TYPE_CHECKING:
    from drivetrain._runtime.accelerators import Devices
    from drivetrain.launchers.launched_processes import LaunchedProcesses


class Launcher:
    """Starts the processes of a run. A subclass implements `launch` or `call`.

    Implement `launch` if the caller is one of the ranks and the other processes execute the caller's script. Implement
    `call` if all ranks are other processes, to which the caller sends a function.

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
        if cls.launch is Launcher.launch and cls.call is Launcher.call:
            raise TypeError(f"{cls.__name__} implements neither launch, which returns LaunchedProcesses, nor call")

    def launch(self, placement: Placement) -> LaunchedProcesses:
        """Start the other processes of this node, which execute the caller's script.

        Args:
            placement: the placement of the caller, which is the first rank of its node, with the address and port of
                the store. With port 0, the operating system chooses the port.

        Returns:
            The processes of the run, as seen from the caller.

        Raises:
            ConfigurationError: the processes cannot be started.
        """
        raise NotImplementedError(f"{type(self).__name__} calls functions in other processes: the caller is no rank")

    def call(
        self,
        placement: Placement,
        function: Callable[..., Any],
        *arguments: Any,
        device: str = "cpu",
        signals: Sequence[int] = (),
    ) -> Any:
        """Start the processes, call ``function(*arguments)`` on every rank, and return the value from rank 0.

        Args:
            placement: the placement of the first process on this node, as for `launch`.
            function: the function to call. On each rank, the variables of `torchrun_variables` or of a cluster must be
                set before the call. The engine's function can be pickled if the user's module and data can be pickled.
            arguments: the arguments of ``function``.
            device: the type of device that each rank uses, such as "cpu" or "cuda".
            signals: the signals to forward from the caller to the ranks.

        Raises:
            ConfigurationError: the processes cannot be started.
            RankFailedError: a rank raised or died.
        """
        raise NotImplementedError(f"{type(self).__name__} runs the caller's script in other processes, no function")
