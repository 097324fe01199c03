"""DDPStrategy: every rank holds a whole replica, and gradients are averaged during backward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import (
    DEFAULT_STEP_TIMEOUT,
    DEFAULT_TIMEOUT,
    DistributedStrategy,
    StepRunner,
    broadcast_together,
)
from drivetrain_strategies._module_checks import refuse_device_map
from drivetrain_strategies._step_module import StepModule, unwrap_step_output
from drivetrain_strategies.ddp import _reducer as reducer
from drivetrain_strategies.ddp._comm_hooks import CommHook, refuse_user_state, register_comm_hook
from drivetrain_strategies.single_device import OriginalDevice


class DDPStrategy(DistributedStrategy):
    """Data-parallel training on `torch.nn.parallel.DistributedDataParallel`.

    Args:
        static_graph: declare that every step uses the same parameters in the same way; None uses torch's default.
        find_unused_parameters: search for unused parameters in every step.
        bucket_cap_mb: size of a gradient bucket in MiB; None uses torch's default.
        broadcast_buffers: broadcast rank 0's buffers before each ``training_step``; None uses torch's default (True).
        gradient_as_bucket_view: make gradients views of the communication buckets, which saves a copy of the gradients
            in memory. Each backward overwrites the gradients of the previous step, so an optimizer must not keep them.
        comm_hook: how gradients are communicated. Takes "fp16", "bf16", "powersgd", a hook, or a tuple (state, hook).
        process_group_backend: backend of the process group. None selects gloo on the CPU and NCCL on CUDA.
        timeout: time after which a collective that a rank does not join fails: a timedelta, or seconds.
        step_timeout: replaces ``timeout`` after the first step; None keeps ``timeout``.

    Raises:
        ConfigurationError: ``static_graph`` and ``find_unused_parameters`` are both set.
    """

    name: ClassVar[str] = "ddp"

    supports_sync_batchnorm: ClassVar[bool] = True

    def __init__(
        self,
        static_graph: bool | None = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
        gradient_as_bucket_view: bool = False,
        comm_hook: CommHook | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        step_timeout: timedelta | float | None = DEFAULT_STEP_TIMEOUT,
    ) -> None:
        super().__init__(process_group_backend, timeout, step_timeout)
        if static_graph and find_unused_parameters:
            raise ConfigurationError(
                "static_graph=True together with find_unused_parameters=True.",
                "with a static graph, DDP finds unused parameters in the first step and does not search again.",
                "keep only static_graph=True if the unused parameters are always the same ones.",
            )
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook
        options = {"bucket_cap_mb": bucket_cap_mb, "broadcast_buffers": broadcast_buffers}
        self._options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._options["gradient_as_bucket_view"] = gradient_as_bucket_view
        self._undo = ExitStack()
        self._ddp: DistributedDataParallel | None = None
        self._check_reduction: Callable[[], None] | None = None
        self._trainable: list[nn.Parameter] = []

    @property
    def ddp_module(self) -> DistributedDataParallel | None:
        """The run's DDP wrapper. None outside a run, and if no parameter is trainable."""
        return self._ddp

    def check(self, module: nn.Module) -> None:
        refuse_device_map(module)
        super().check(module)
        if self.static_graph and not self.settings.automatic_optimization:
            raise ConfigurationError(
                "static_graph=True together with manual optimization.",
                "in manual optimization, each backward may use other parameters, so the graph is not static.",
                "use strategy='ddp'.",
            )
        param_dtype, reduce_dtype = self.precision.param_dtype, self.precision.reduce_dtype
        if param_dtype is not reduce_dtype and self.world_size > 1 and self.comm_hook is None:
            raise ConfigurationError(
                f"precision={self.precision.name!r} reduces gradients in {reduce_dtype} and keeps parameters in "
                f"{param_dtype}.",
                "DDP reduces gradients in the dtype of the parameters.",
                f"use strategy='fsdp', DDPStrategy(comm_hook=...), or {type(self.precision).__name__}.reduce_dtype = "
                f"{param_dtype}.",
            )

    def setup_module(self, module: nn.Module) -> StepRunner:
        self.module = module
        self._undo.callback(OriginalDevice(module).restore)
        if self.sync_batchnorm:
            self._undo.callback(SyncBatchNormSwap(module).undo)
        self.precision.convert_module(module)
        module.to(self.device)
        self._replicated = tuple(module.parameters())
        self._wrap(module, init_sync=True)
        if self._ddp is None:  # then no wrapper has broadcast the values
            broadcast_together([*module.parameters(), *module.buffers()])
        if not self.settings.automatic_optimization:
            return self._manual_runner()  # here, `backward` prepares DDP, not DDP's forward
        if self.world_size == 1 and self.find_unused_parameters and self.comm_hook is None:
            # There is nothing to exchange, so DDP's forward is skipped. After a None loss, which has no backward, it
            # would report all parameters as unused.
            return operator.call

        static = self.static_graph

        def run(step: Callable[..., Any], *args: Any) -> Any:
            ddp = self._ddp
            if ddp is None or not torch.is_grad_enabled():
                return step(*args)  # evaluation has no gradients, and the engine has broadcast the buffers
            if static and not ddp.static_graph and ddp.require_backward_grad_sync:
                reducer.enable_static_graph(ddp)
            try:
                output = ddp(step, *args)
            except RuntimeError as error:
                reducer.raise_explained(error, ddp)
                raise
            return unwrap_step_output(output)

        return run

    def _manual_runner(self) -> StepRunner:
        """Return the step runner of manual optimization, in which DDP's forward does not run.

        The step runner therefore broadcasts rank 0's buffers before each step, as DDP's forward would.
        """
        if self._options.get("broadcast_buffers") is False:
            return operator.call

        def run(step: Callable[..., Any], *args: Any) -> Any:
            ddp = self._ddp  # read in every step, since a change of the trainable parameters replaces the wrapper
            if ddp is not None and torch.is_grad_enabled():
                reducer.broadcast_buffers(ddp)
            return step(*args)

        return run

    def _wrap(self, module: nn.Module, init_sync: bool) -> None:
        """Wrap the module in DDP for the parameters that are trainable now, if there are any. Collective.

        Args:
            module: the bare module.
            init_sync: whether DDP broadcasts rank 0's weights and buffers.
        """
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._unwrap()
        if not self._trainable:
            return  # DDP refuses a module without trainable parameters
        finds_unused = self.find_unused_parameters or not self.settings.automatic_optimization
        ddp = self._ddp = DistributedDataParallel(
            StepModule(module), find_unused_parameters=finds_unused, init_sync=init_sync, **self._options
        )
        if self.comm_hook is not None:
            register_comm_hook(ddp, self.comm_hook)
        if not finds_unused:
            self._check_reduction = reducer.reduction_check(ddp)

    def _unwrap(self) -> None:
        if self._ddp is not None:
            reducer.release_process_group(self._ddp)  # also removes the hooks of DDP from the parameters
        self._ddp = self._check_reduction = None

    def broadcast_module(self, module: nn.Module) -> None:
        """Do nothing, since DistributedDataParallel broadcasts the weights when wrapping the module."""

    def trainable_changed(self, module: nn.Module) -> None:
        self._replicate_created(module)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if list(map(id, self._trainable)) != list(map(id, trainable)):
            refuse_user_state(self.comm_hook)
            self._wrap(module, init_sync=False)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        return nullcontext() if enabled or self._ddp is None else self._ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        ddp = self._ddp
        if ddp is None:
            self.precision.backward(loss)
            return
        if not self.settings.automatic_optimization:
            reducer.expect_backward(ddp, loss)
        try:
            self.precision.backward(loss)
            # DDP itself would raise only in the next forward, after an optimizer step with this rank's local gradients.
            if self._check_reduction is not None and ddp.require_backward_grad_sync:
                self._check_reduction()
        except RuntimeError as error:
            reducer.raise_explained(error, ddp)
            raise

    def teardown(self) -> None:
        self._undo.close()
        self._unwrap()
        self._trainable = []
        super().teardown()


class SyncBatchNormSwap:
    """Replaces every BatchNorm layer of ``module`` by SyncBatchNorm. Parameters and buffers stay the same objects."""

    def __init__(self, module: nn.Module) -> None:
        self._replaced = [
            (parent._modules, name, layer)
            for parent in module.modules()
            for name, layer in parent._modules.items()
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        ]
        successors: dict[int, nn.Module] = {}  # a layer may be registered under several names
        for layers, name, original in self._replaced:
            if id(original) not in successors:
                successors[id(original)] = nn.SyncBatchNorm.convert_sync_batchnorm(original)  # type: ignore[no-untyped-call]
            layers[name] = successors[id(original)]

    def undo(self) -> None:
        """Put the original layers back, with the current parameters and buffers of the SyncBatchNorm layers."""
        for layers, name, original in self._replaced:
            successor: Any = layers[name]
            original._parameters.update(successor._parameters)
            original._buffers.update(successor._buffers)
            original.train(successor.training)
            layers[name] = original
