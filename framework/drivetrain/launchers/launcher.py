"""Launcher: the interface of what starts the processes of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.environments import Placement

if TYPE_CHECKING:
    from drivetrain._runtime.accelerators import Devices
    from drivetrain.launchers.world import World


class Work(ABC):
    """What a run wants done on every rank; the engine hands it to `Launcher.run`, which calls one of the two methods.

    Attributes:
        device: "cpu", "cuda", ...: the kind of device that each rank computes on.
        signals: those that are meant for the ranks, where the caller gets them.
    """

    device: str
    signals: Sequence[int]

    @abstractmethod
    def here(self, world: World) -> Any:
        """Run as one rank of ``world``, in this process, and return what the run returns.

        For a launcher whose other processes come to this run by themselves, as those do that run the script again.
        """

    @abstractmethod
    def elsewhere(self, call: Callable[..., Any]) -> Any:
        """Run on ranks that are all other processes, and return what the run returns.

        The caller's module, trainer and callbacks are then what they would be had the run been here.

        Args:
            call: ``call(function, *arguments)`` calls ``function(*arguments)`` on every rank and returns what it
                returned on rank 0. All of them can be pickled as far as the user's module and data can. A process that
                the function is called in knows its rank by its environment: by `torchrun_variables`, or a cluster's.
        """


class Launcher:
    """Starts the processes of a run. One of two methods must be written.

    `launch`, where the processes come to the run by themselves, the caller being one of them, as with the script that
    is run again; `run`, where the caller hands them a function.

    Building a launcher starts nothing. It is asked once the run is known to lack processes; in those that it starts,
    and under torchrun or a cluster, it is not asked at all. Give one to ``Fit(launcher=...)``, or register a callable
    without arguments that makes one in the entry-point group ``drivetrain.launchers``, and give its name.
    """

    places_devices: ClassVar[bool] = False
    """True where a scheduler of the launcher's decides which machines and devices the ranks get: the caller's own are
    then not looked at, and `devices` says what each node of the run has."""

    def devices(self, accelerator: str, devices: int | str | list[int]) -> Devices:
        """What each node of a run has, for a launcher that `places_devices`.

        Args:
            accelerator: as for ``Fit``.
            devices: as for ``Fit``.

        Raises:
            ConfigurationError: it cannot know, or cannot give it.
        """
        from drivetrain._runtime.accelerators import resolve_devices

        return resolve_devices(accelerator, devices)

    def check(self, num_local: int) -> None:
        """Refuse, before anything is started, what cannot work in this process.

        Args:
            num_local: how many processes this node is to have.

        Raises:
            ConfigurationError: says why.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.launch is Launcher.launch and cls.run is Launcher.run:
            raise TypeError(f"{cls.__name__} writes neither launch, which returns a World, nor run")

    def launch(self, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> World:
        """Start the other processes of this node, all of which come to the same run; return the world of this one.

        Args:
            placement: the caller's: the first rank of its node.
            address: the host of rank 0, where there are several nodes.
            port: where rank 0 hosts the store; 0 lets the operating system choose.

        Raises:
            ConfigurationError: they cannot be started.
        """
        raise NotImplementedError(f"{type(self).__name__} starts functions: no World of the caller's comes of it")

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        """Start the processes, have ``work`` done on every rank, and return what it returns.

        Args:
            work: what is to be done, here and in the others (`Work.here`) or in others alone (`Work.elsewhere`).
            placement: of the first process of this node: how many there are here, and in all.
            address: as for `launch`.
            port: as for `launch`.

        Raises:
            ConfigurationError: they cannot be started.
            RankFailedError: one of them raised or died.
        """
        return work.here(self.launch(placement, address=address, port=port))
