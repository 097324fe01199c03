"""Strategy: the interface of what decides *where* a run computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._distributed.shards import ParameterShard, Region
from drivetrain._runtime.transfer import move_to
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision
from drivetrain.strategies._optimizer_state import load_named_optimizer_state, named_optimizer_state
from drivetrain.strategies.run_settings import RunSettings

if TYPE_CHECKING:
    from drivetrain._runtime.memory_advice import MemoryAdvice

StepRunner = Callable[..., Any]
"""``runner(step, *args)`` calls ``step(*args)`` the way the strategy needs it called (through DDP's forward, say)."""


class Strategy(ABC):
    """Where a run computes: processes, wrapping, sharding, collectives.

    A strategy knows the module, the optimizers and a `Precision`; never the engine or the callbacks. Fit drives it so:

    `bind` (placement, device, precision) → `setup_environment` → `take_settings` → ``configure_model`` under
    `module_init_context` → `setup_module` → ``configure_optimizers`` → `setup_optimizers` → steps → `teardown`.

    Subclass it for one process, and `drivetrain.strategies.DistributedStrategy` for several; `setup_module` is all that
    must be written. Register a factory in the entry-point group ``drivetrain.strategies`` to give it a name.
    """

    name: ClassVar[str] = "custom"

    single_process: ClassVar[bool] = False
    """True where the strategy cannot use more than one process."""

    collective_forward: bool = False
    """True where every forward talks to other ranks, evaluation's included: a rank without data must join in."""

    shards_parameters: bool = False
    """True where a rank holds parts of parameters; evaluation then runs in no_grad, never in inference_mode."""

    accepts_none_loss: ClassVar[bool] = True
    """False where ``training_step`` may not return None even in a single process."""

    takes_closures: ClassVar[bool] = True
    """False where `optimizer_step` refuses a closure."""

    supports_sync_batchnorm: ClassVar[bool] = False
    """True where the strategy heeds its `sync_batchnorm`; on several ranks of another, it is refused."""

    def __init__(self) -> None:
        self.sync_batchnorm = False
        """Normalise over the samples of all ranks; ``Fit(sync_batchnorm=True)`` sets it."""
        self.launcher: Any = None
        """A `drivetrain.launchers.Launcher` of the strategy's own; None leaves the choice to Fit."""
        self.placement = Placement()
        self.device = torch.device("cpu")
        self.precision = Precision()
        self.control: ControlPlane = LocalControl()
        self.settings = RunSettings()
        self.module: torch.nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        """Learning-rate schedulers that the strategy built itself; each steps once an optimizer step."""

    # What must be written

    @abstractmethod
    def setup_module(self, module: torch.nn.Module) -> StepRunner:
        """Move, convert and wrap ``module``; return the callable that every step runs through.

        The bare module is kept in ``self.module``, from which state is read by plain names.
        """

    # What may be written: the rest has defaults that are right for one process that holds the whole module

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from drivetrain._config.lightning_names import (
                strategy_attribute_error,
            )  # by whoever asks for what is not there

            raise AttributeError(strategy_attribute_error(type(self).__name__, name))

    # Where we are

    def bind(
        self, placement: Placement, device: torch.device, precision: Precision, store: Store | None = None
    ) -> None:
        """Take the place in the world, the device and the precision of the coming run. Talks to nobody.

        Args:
            placement: this process among all.
            device: what it computes on.
            precision: how exactly.
            store: the way to the other processes, where they were started together and have no process group yet.
        """
        self.placement = placement
        self.device = device
        self.precision = precision

    @property
    def root_device(self) -> torch.device:
        """`device`, by Lightning's name."""
        return self.device

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def local_rank(self) -> int:
        return self.placement.local_rank

    @property
    def node_rank(self) -> int:
        return self.placement.node_rank

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank reads; differs from `rank` where ranks hold parts of one replica."""
        return self.rank

    @property
    def data_world_size(self) -> int:
        """Among how many ranks the data is dealt."""
        return self.world_size

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank tells the others what it saw of its share, where several ranks read the same one."""
        return True

    @property
    def data_group(self) -> Any:
        """The process group of ranks with shares of their own, among them this one; None where that is every rank."""
        return None

    @property
    def device_mesh(self) -> Any:
        """The `torch.distributed.device_mesh.DeviceMesh` of the run; None where the strategy has none."""
        return None

    # Set-up

    def take_settings(self, settings: RunSettings) -> None:
        """Take what the run is going to do, before anything is set up."""
        self.settings = settings

    def check(self, module: torch.nn.Module) -> None:
        """Refuse, before anything is wrapped, what this strategy cannot train.

        Raises:
            ConfigurationError: names the value, the reason and the way out.
        """

    def setup_environment(self) -> None:
        """Join the other processes, and make the device the one at hand. A run puts back which one that was."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """The context under which ``configure_model`` builds layers."""
        return self.precision.module_init_context()

    def optimizer_init_context(self) -> AbstractContextManager[Any]:
        """The context under which ``configure_optimizers`` builds optimizers."""
        return nullcontext()

    def adopt_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers that were built before `setup_module` the parameters that took their parameters' places."""

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Take the optimizers and return the ones to step."""
        self.optimizers = list(optimizers)
        return self.optimizers

    def broadcast_module(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's weights. Collective; called once after `setup_optimizers`, on several ranks."""

    # What trains

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The module's parameters by plain name, as its optimizers know them."""
        return {} if self.module is None else dict(self.module.named_parameters())

    def trainable_changed(self, module: torch.nn.Module) -> None:
        """Adapt to a change of what trains, or refuse it. Called between windows, on all ranks alike.

        Parameters were frozen or unfrozen, layers created, or groups added to an optimizer. A strategy of one process
        that looks at ``requires_grad`` anew in every step has nothing to do.

        Raises:
            ConfigurationError: the strategy cannot train ``module`` so; on several ranks, where this is not overridden.
        """
        if self.world_size > 1:
            raise ConfigurationError(
                f"What trains changed within a run, under {type(self).__name__}.",
                "it does not say how it adapts, and the ranks' gradients may be exchanged for the wrong parameters.",
                "override Strategy.trainable_changed, or train each phase in a fit of its own.",
            )

    def adding_group(self, optimizer: Optimizer) -> None:
        """Refuse, where it must be, that ``optimizer.add_param_group`` is called within a run.

        Raises:
            ConfigurationError: it cannot be done under this strategy.
        """

    # In the loop

    def to_device(self, batch: Any) -> Any:
        """Move every tensor of a nested batch to this rank's device; the host does not wait for pinned memory."""
        return move_to(batch, self.device, non_blocking=True)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        """The context for forward and backward of a micro-batch; gradients are exchanged where ``enabled``.

        It is enabled for a window's last micro-batch, and for each ``manual_backward``. Where it is a `nullcontext`
        then, the loop leaves it out.
        """
        return nullcontext()

    def without_gradient(self) -> AbstractContextManager[None]:
        """Within it a backward adds exactly zero to every parameter's gradient, even where the loss is NaN.

        Multiplying the loss by zero would not do: the mean over no items is NaN, and NaN times zero is NaN.
        """
        assert self.module is not None
        return _silenced(self.module)

    def forget_gradients(self) -> None:
        """Drop what a window has added up so far, where that is not in the parameters' ``grad``."""

    def training_only(self, optimizer: Any) -> AbstractContextManager[None]:
        """Within it only ``optimizer``'s parameters require gradients; what ``toggled_optimizer`` does."""
        assert self.module is not None
        return _training_only(self.module, optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss of shape ()."""
        self.precision.backward(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Give gradients their true magnitude where the precision scaled the loss."""
        self.precision.unscale(optimizer)

    def clip_gradients(
        self, optimizer: Optimizer | Sequence[Optimizer], max_norm: float, algorithm: str = "norm"
    ) -> torch.Tensor:
        """Clip over all given optimizers' parameters together; return the global norm before clipping, shape ()."""
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        return self.precision.clip_gradients(optimizers, max_norm, algorithm)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step one optimizer; False where an overflow made it skip."""
        return self.precision.step(optimizer, closure)

    def finish_step(self) -> None:
        """Called once after all optimizers of a step: adapt the loss scale."""
        self.precision.update()

    # Collectives for user code and the engine

    def reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return ``tensor`` reduced over all ranks; ``op`` is "mean", "sum", "max" or "min"."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Return shape (W, *tensor.shape), in rank order; with ``sync_grads`` its backward sums over the ranks."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return rank ``source``'s tensor."""
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""

    def sync_buffers(self, module: torch.nn.Module) -> None:
        """Give every rank rank 0's buffers."""

    # State, keyed by plain parameter names

    def model_state(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by the names of the bare module."""
        return {} if self.module is None else dict(self.module.state_dict())

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load what `model_state` gave, under this strategy or any other.

        Args:
            state: by name: whole tensors, sharded ones, or a `ParameterShard` of the region that `model_regions` names.
            strict: refuse missing and unexpected names; else what ``state`` leaves out stays as it is.
        """
        if self.module is not None:
            self.module.load_state_dict(state, strict=strict)

    def optimizer_state(self, index: int = 0) -> dict[str, Any]:
        """One optimizer's ``{"state": {parameter name: {key: value}}, "param_groups": [{..., "params": [names]}]}``."""
        assert self.module is not None
        return named_optimizer_state(self.module, self.optimizers[index])

    def load_optimizer_state(self, state: Mapping[str, Any], index: int = 0) -> None:
        """Load what `optimizer_state` gave, matched by name; values as `load_model_state` takes them."""
        assert self.module is not None
        load_named_optimizer_state(self.module, self.optimizers[index], state)

    def shard_of(self, value: torch.Tensor | ParameterShard) -> torch.Tensor | ParameterShard:
        """Return a value of `model_state` or `optimizer_state` as what this rank holds of it.

        A tensor where every rank holds the whole, a `ParameterShard` where each holds a part. Talks to nobody.
        """
        return value

    def model_regions(self) -> dict[str, Region]:
        """Which part of each tensor of the module this rank wants to load; names left out are wanted whole."""
        return {}

    def optimizer_regions(self, index: int = 0) -> dict[str, Region]:
        """The same for one optimizer's values of their parameters' shapes, by parameter name."""
        return self.model_regions()

    def save_beside(self, path: str) -> None:
        """Write what the strategy's own tools read beside the checkpoint at ``path``. Collective."""

    # Where memory lacks

    def memory_advice(self, module: torch.nn.Module) -> Sequence[MemoryAdvice]:
        """Which settings of this strategy, or which other strategy, would take less memory on this rank.

        Asked where training ran out of memory, for the note on the error; the first advice costs least. Talks to
        nobody, and asks for no more memory. By default what holds under any strategy.

        Args:
            module: what was trained, wrapped as it is.
        """
        from drivetrain._runtime.memory_advice import MemoryAdvice  # where memory lacks alone

        return [MemoryAdvice("activations", "activation checkpointing (torch.utils.checkpoint around each block)")]

    # The end

    def leaves_shards(self, module: torch.nn.Module) -> bool:
        """Whether `restore_module` leaves the module's weights spread over the ranks."""
        return False

    def restore_module(self) -> None:
        """Make the module plain again, with whole tensors and rank 0's buffers. Collective."""

    def teardown(self) -> None:
        """Let go of everything this strategy took. Never waits for other ranks, since it also runs after a failure."""
        self.module = None
        self.optimizers = []


@contextmanager
def _silenced(module: torch.nn.Module) -> Iterator[None]:
    handles = [
        parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _training_only(module: torch.nn.Module, optimizer: Any) -> Iterator[None]:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [one for one in module.parameters() if one.requires_grad and id(one) not in held]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
