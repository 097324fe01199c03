"""Strategy: the interface that defines on which processes and devices a run computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._distributed.shards import ParameterShard, Region
from drivetrain._parameters.optimizer_state import load_named_optimizer_state, named_optimizer_state
from drivetrain._runtime.transfer import move_to
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision

StepRunner = Callable[..., Any]
"""``runner(step, *args)`` calls ``step(*args)`` in the way that the strategy requires, such as within DDP's forward."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of `Fit` that a strategy's engine (DeepSpeed's, for example) would otherwise choose itself.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        accumulate_grad_batches: micro-batches per window.
        gradient_clip_val: clipping threshold; None or 0 disables clipping.
        gradient_clip_algorithm: "norm" or "value".
        batch_size: samples in one rank's micro-batch; None if the loader has no attribute ``batch_size``.
        automatic_optimization: False if ``training_step`` runs backward and steps itself.
    """

    stage: str = "fit"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    batch_size: int | None = None
    automatic_optimization: bool = True


class Strategy(ABC):
    """Defines where a run computes: its processes, the wrapping and sharding of the module, and collectives.

    A subclass must define `setup_module`. It may override the methods for placement, lifecycle, optimization,
    collectives and checkpoint state, whose defaults suit a single process that holds the whole module. `rank`,
    `world_size`, `local_rank`, `node_rank` and `root_device` are final. Subclass
    `drivetrain.strategies.DistributedStrategy` for several processes.

    A strategy uses the module, the optimizers and a `Precision`, but neither the engine nor the callbacks. ``Fit``
    calls the strategy's methods in this order:

    `bind` (placement, device, precision) → `setup_environment` → `set_run_settings` → ``configure_model`` under
    `module_init_context` → `check` → `setup_module` → ``configure_optimizers`` → `setup_optimizers` → steps →
    `restore_module` → `teardown`.

    Register a factory in the entry-point group ``drivetrain.strategies`` to select the strategy by name.
    """

    name: ClassVar[str] = "custom"

    single_process: ClassVar[bool] = False
    """True if the strategy cannot use more than one process."""

    collective_forward: bool = False
    """True if every forward is collective, also in evaluation, so that a rank without data must run the forward too."""

    shards_parameters: bool = False
    """True if a rank holds only parts of parameters. Evaluation then runs in no_grad, never in inference_mode."""

    accepts_none_loss: ClassVar[bool] = True
    """False if ``training_step`` may not return None even in a single process."""

    has_hook_contexts: ClassVar[bool] = False
    """True if hooks that user code defines run in a `hook_context`."""

    supports_sync_batchnorm: ClassVar[bool] = False
    """True if the strategy implements `sync_batchnorm`. Other strategies refuse the setting on several ranks."""

    def __init__(self) -> None:
        self.sync_batchnorm = False
        """Whether batch statistics are computed over all ranks. ``Fit(sync_batchnorm=True)`` sets this attribute."""
        self.launcher: Any = None
        """The `drivetrain.launchers.Launcher` that this strategy needs; None leaves the choice to ``Fit``."""
        self.placement = Placement()
        self.device = torch.device("cpu")
        self.precision = Precision()
        self.control: ControlPlane = LocalControl()
        self.settings = RunSettings()
        self.module: torch.nn.Module | None = None
        self.optimizers: list[Optimizer] = []
        self.elementwise_optimizers: Sequence[Optimizer] = ()
        """The optimizers that ``configure_optimizers`` declared element-wise. Set before `adopt_parameters`."""
        self.schedulers: list[Any] = []
        """Learning-rate schedulers that the strategy built itself. Each scheduler steps once per optimizer step."""

    @abstractmethod
    def setup_module(self, module: torch.nn.Module) -> StepRunner:
        """Move, convert and wrap ``module``; return the callable through which every step runs.

        An implementation stores the bare module in ``self.module``, whose state is saved and loaded by plain names.
        """

    # Placement: rank and device of this process, and which part of the data it reads. `data_rank`, `data_world_size`,
    # `is_data_leader` and `data_group` are overridden together, if several ranks hold one replica and read equal data.

    def bind(
        self, placement: Placement, device: torch.device, precision: Precision, store: Store | None = None
    ) -> None:
        """Store the placement, device and precision of the coming run without communicating.

        Args:
            placement: rank and world size of this process.
            device: the device that this process computes on.
            precision: the run's precision.
            store: the rendezvous store, if the processes were started together and have no process group yet.
        """
        self.placement = placement
        self.device = device
        self.precision = precision

    @property
    @final
    def root_device(self) -> torch.device:
        """`device` under its name in Lightning."""
        return self.device

    @property
    @final
    def rank(self) -> int:
        return self.placement.rank

    @property
    @final
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    @final
    def local_rank(self) -> int:
        return self.placement.local_rank

    @property
    @final
    def node_rank(self) -> int:
        return self.placement.node_rank

    @property
    def data_rank(self) -> int:
        """Index of the part of the data that this rank reads. Not equal to `rank` if several ranks hold one replica."""
        return self.rank

    @property
    def data_world_size(self) -> int:
        """Number of parts that the data is split into."""
        return self.world_size

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank reports values for its part of the data, which several ranks may read."""
        return True

    @property
    def data_group(self) -> Any:
        """The process group of this rank and one rank for each other part of the data; None stands for all ranks."""
        return None

    @property
    def device_mesh(self) -> Any:
        """The `torch.distributed.device_mesh.DeviceMesh` of the run; None if the strategy has none."""
        return None

    # Lifecycle: set-up before the first step and cleanup after the last step

    def setup_environment(self) -> None:
        """Join the other processes and select the CUDA device. The engine restores the previous device afterwards."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def set_run_settings(self, settings: RunSettings) -> None:
        """Store the run's settings in ``self.settings``. Called before `check`."""
        self.settings = settings

    def check(self, module: torch.nn.Module) -> None:
        """Refuse a module that this strategy cannot train. Called before `setup_module`.

        Raises:
            ConfigurationError: the strategy cannot train ``module``.
        """

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context under which ``configure_model`` builds layers."""
        return self.precision.module_init_context()

    def restore_module(self) -> None:
        """Turn the module back into a plain module, with whole tensors and rank 0's buffers. Collective."""

    def memory_advice(self, module: torch.nn.Module) -> Sequence[str]:
        """Return settings, or other strategies, that would need less memory on this rank, the cheapest first.

        The engine calls this method after an out-of-memory error and shows the advice in the error's note. An override
        must neither communicate nor allocate.

        Args:
            module: the module in training, with the strategy's wrappers.

        Returns:
            What to change and, after a colon, the effect: ``"strategy='fsdp': each rank holds its part"``.
        """
        return [
            "strategy='fsdp' on several devices: each rank holds a shard of the module",
            "activation checkpointing (torch.utils.checkpoint around each block)",
        ]

    def teardown(self) -> None:
        """Release what this strategy acquired.

        The engine calls this method after a failure too, so an override must not wait for other ranks.
        """
        self.module = None
        self.optimizers = []
        self.elementwise_optimizers = ()

    # Optimization: optimizers, trainable parameters, gradients, backward and step

    def optimizer_init_context(self) -> AbstractContextManager[Any]:
        """Return the context under which ``configure_optimizers`` builds optimizers."""
        return nullcontext()

    def adopt_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        """Update optimizers built before `setup_module`, if `setup_module` replaced parameters that they hold."""

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Store the optimizers and return the optimizers that the loop steps."""
        self.optimizers = list(optimizers)
        return self.optimizers

    # Trainable parameters

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameter objects that the optimizers hold, by the module's plain names."""
        return {} if self.module is None else dict(self.module.named_parameters())

    def trainable_changed(self, module: torch.nn.Module) -> None:
        """Adapt to a changed set of trainable parameters, or refuse the change. Called between windows, on all ranks.

        The set changes when parameters are frozen or unfrozen, layers are created, or groups are added to an optimizer.
        A single-process strategy that reads ``requires_grad`` in every step has nothing to do.

        Raises:
            ConfigurationError: the strategy cannot train the changed parameters, or the run has several ranks and the
                strategy does not override this method.
        """
        if self.world_size > 1:
            raise ConfigurationError(
                f"The set of trainable parameters changed within a run, under {type(self).__name__}.",
                "the strategy does not define how it adapts, so gradients might be exchanged for the wrong parameters.",
                "override Strategy.trainable_changed, or train each phase in a separate fit.",
            )

    def check_added_group(self, optimizer: Optimizer) -> None:
        """Refuse ``optimizer.add_param_group`` within a run if the strategy does not support added groups.

        Raises:
            ConfigurationError: the strategy does not support added groups.
        """

    # Within a step

    def hook_context(self, name: str, window_is_complete: bool) -> AbstractContextManager[None]:
        """Return the context in which a user's hook runs. Called only if `has_hook_contexts` is set.

        Args:
            name: the name of the hook.
            window_is_complete: whether no further gradients are added before the next optimizer step.
        """
        return nullcontext()

    def to_device(self, batch: Any) -> Any:
        """Move every tensor of a nested batch to this rank's device. Copies from pinned memory do not block."""
        return move_to(batch, self.device, non_blocking=True)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        """Return the context for a micro-batch's forward and backward. Gradients are exchanged if ``enabled``.

        The loop passes True for the last micro-batch of a window and for each ``manual_backward``. The loop does not
        enter the context for True if it is a `nullcontext`.
        """
        return nullcontext()

    def zeroed_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which a backward adds exactly zero to every gradient, even if the loss is NaN.

        Multiplying the loss by zero is not enough: the mean over no items is NaN, and NaN times zero is NaN.
        """
        assert self.module is not None
        return _zeroed_gradients(self.module)

    def forget_gradients(self) -> None:
        """Drop gradients accumulated in this window, if the strategy stores them outside of ``parameter.grad``."""

    def requiring_grad_only_for(self, optimizer: Any) -> AbstractContextManager[None]:
        """Return a context in which only ``optimizer``'s parameters require gradients (``toggled_optimizer``)."""
        assert self.module is not None
        return _only_parameters_of(self.module, optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss of shape ()."""
        self.precision.backward(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, if the precision uses one."""
        self.precision.unscale(optimizer)

    def clip_gradients(
        self, optimizer: Optimizer | Sequence[Optimizer], max_norm: float, algorithm: str = "norm"
    ) -> torch.Tensor:
        """Clip the gradients of all given optimizers together; return the global norm before clipping, of shape ()."""
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        return self.precision.clip_gradients(optimizers, max_norm, algorithm)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step one optimizer. Return False if the step was skipped because of an fp16 overflow."""
        return self.precision.step(optimizer, closure)

    def finish_step(self) -> None:
        """Update the loss scale. Called once after all optimizers of a step have stepped."""
        self.precision.update()

    # Collectives for user code and the engine. The defaults suit a single process

    def reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return ``tensor`` reduced over all ranks by ``op``, which is "mean", "sum", "max" or "min"."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Return the ranks' tensors, stacked by rank to shape (world_size, *tensor.shape).

        With ``sync_grads``, the result's backward sums gradients over the ranks.
        """
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return rank ``source``'s tensor."""
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""

    def broadcast_module(self, module: torch.nn.Module) -> None:
        """Copy rank 0's weights to every rank. Called once after `setup_optimizers`, if there are several ranks."""

    def sync_buffers(self, module: torch.nn.Module) -> None:
        """Copy rank 0's buffers to every rank."""

    # Checkpoint state: weights and optimizer state, by the parameters' names in the bare module without wrappers. The
    # defaults suit a strategy that holds the whole module on every rank; one that shards it overrides all of them

    def model_state(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by the names of the bare module."""
        return {} if self.module is None else dict(self.module.state_dict())

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a result of `model_state`, from this strategy or another one.

        Args:
            state: values by name. A value is a whole tensor, a DTensor, or a `ParameterShard` whose region is the one
                that `model_regions` returns for the name.
            strict: raise an error for missing and unexpected names. If False, missing tensors keep their values.
        """
        if self.module is not None:
            from drivetrain._parameters.loading_hooks import load_current  # only runs that load weights need it

            load_current(self.module, state, strict)

    def optimizer_state(self, index: int = 0) -> dict[str, Any]:
        """Return ``{"state": {parameter name: {key: value}}, "param_groups": [{..., "params": [names]}]}``."""
        assert self.module is not None
        return named_optimizer_state(self.module, self.optimizers[index])

    def load_optimizer_state(self, state: Mapping[str, Any], index: int = 0) -> None:
        """Load a result of `optimizer_state` by name. Values may be of the kinds that `load_model_state` accepts."""
        assert self.module is not None
        load_named_optimizer_state(self.module, self.optimizers[index], state)

    def shard_of(self, value: torch.Tensor | ParameterShard) -> torch.Tensor | ParameterShard:
        """Return this rank's part of a value of `model_state` or `optimizer_state`. Does not communicate.

        The result is a tensor if every rank holds the whole value, and a `ParameterShard` if each rank holds a part.
        """
        return value

    def model_regions(self) -> dict[str, Region]:
        """Return the regions of the tensors that this rank loads in part, by name. It loads all other tensors whole."""
        return {}

    def optimizer_regions(self, index: int = 0) -> dict[str, Region]:
        """Return the regions of one optimizer's state tensors that have the parameter's shape, by parameter name."""
        return self.model_regions()


@contextmanager
def _zeroed_gradients(module: torch.nn.Module) -> Iterator[None]:
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
def _only_parameters_of(module: torch.nn.Module, optimizer: Any) -> Iterator[None]:
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [
        parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in optimized
    ]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
