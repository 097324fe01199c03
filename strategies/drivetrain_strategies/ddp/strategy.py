"""DDPStrategy: a replica on every rank, gradients averaged during backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import (
    DEFAULT_STEP_TIMEOUT,
    DEFAULT_TIMEOUT,
    DistributedStrategy,
    MemoryAdvice,
    StepRunner,
    broadcast_together,
    refuse_embedding_max_norm,
)
from drivetrain_strategies._device_restore import HomeDevice
from drivetrain_strategies._missing_weights import refuse_weights_left
from drivetrain_strategies._module_checks import (
    refuse_device_map,
    refuse_meta,
    refuse_other_device,
)
from drivetrain_strategies._replicated import shard_them
from drivetrain_strategies._step_module import StepModule, whole_output
from drivetrain_strategies.ddp import _reducer as reducer
from drivetrain_strategies.ddp._comm_hooks import CommHook, refuse_kept_state, register_comm_hook
from drivetrain_strategies.ddp._sync_batchnorm import SyncBatchNormSwap


class DDPStrategy(DistributedStrategy):
    """Data-parallel training on `torch.nn.parallel.DistributedDataParallel`.

    Args:
        static_graph: promise that every step uses the same parameters alike; None leaves torch's default.
        find_unused_parameters: look, in every step, for parameters that it does not use.
        bucket_cap_mb: size of a gradient bucket in MiB; None leaves torch's default.
        broadcast_buffers: give all ranks rank 0's buffers before each ``training_step``; None leaves torch's default
            (True).
        gradient_as_bucket_view: let gradients live in the communication buckets.
        comm_hook: "fp16", "bf16" or "powersgd"; a hook; or a pair of a state and a hook.
        process_group_backend: None takes gloo on the CPU and NCCL on CUDA.
        timeout: after which a collective that a rank does not join fails.
        step_timeout: the same, once a step has been made; None leaves it at ``timeout``.
        sync_batchnorm: turn BatchNorm into SyncBatchNorm for the run. ``Fit(sync_batchnorm=True)`` sets it.

    Raises:
        ConfigurationError: ``static_graph`` together with ``find_unused_parameters``.
    """

    name: ClassVar[str] = "ddp"

    supports_sync_batchnorm: ClassVar[bool] = True

    def __init__(
        self,
        static_graph: bool | None = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
        gradient_as_bucket_view: bool = True,
        comm_hook: CommHook | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        step_timeout: timedelta | None = DEFAULT_STEP_TIMEOUT,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(process_group_backend, timeout, step_timeout)
        if static_graph and find_unused_parameters:
            raise ConfigurationError(
                "static_graph=True together with find_unused_parameters=True.",
                "a static graph already knows from its first step which parameters are unused, and never looks again.",
                "keep static_graph=True alone where the unused parameters are always the same ones.",
            )
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook
        self.sync_batchnorm = sync_batchnorm
        self._options: dict[str, Any] = {"gradient_as_bucket_view": gradient_as_bucket_view}
        if bucket_cap_mb is not None:
            self._options["bucket_cap_mb"] = bucket_cap_mb
        if broadcast_buffers is not None:
            self._options["broadcast_buffers"] = broadcast_buffers
        self._home: HomeDevice | None = None
        self._swap: SyncBatchNormSwap | None = None
        self._ddp: DistributedDataParallel | None = None
        self._manual = False
        self._verify: Callable[[], None] | None = None
        self._replicated: tuple[nn.Parameter, ...] = ()
        self._trained: list[nn.Parameter] = []

    @property
    def ddp_module(self) -> DistributedDataParallel | None:
        """The wrapper that is in use, or None outside a run."""
        return self._ddp

    def check(self, module: nn.Module) -> None:
        refuse_device_map(module)
        refuse_weights_left(module)
        refuse_meta(module)
        refuse_embedding_max_norm(module, self.world_size)
        manual = not getattr(module, "automatic_optimization", True)
        if manual and self.static_graph:
            raise ConfigurationError(
                "static_graph=True together with manual optimization.",
                "optimizers that take turns use other parameters in each backward, which is no static graph.",
                "use strategy='ddp'.",
            )
        kept, reduced = self.precision.param_dtype, self.precision.reduce_dtype
        if kept is not reduced and self.world_size > 1 and self.comm_hook is None:
            raise ConfigurationError(
                f"precision={self.precision.name!r} reduces gradients in {reduced}, and keeps parameters in {kept}.",
                "DDP reduces gradients in the dtype of their parameters.",
                f"use strategy='fsdp', DDPStrategy(comm_hook=...), or {type(self.precision).__name__}.reduce_dtype = "
                f"{kept}.",
            )
        if self.sync_batchnorm and self.device.type == "cpu":
            raise ConfigurationError(
                "sync_batchnorm=True on the CPU.",
                "torch's SyncBatchNorm needs an accelerator.",
                "drop sync_batchnorm, or normalise with GroupNorm or LayerNorm.",
            )

    def setup_module(self, module: nn.Module) -> StepRunner:
        self.module = module
        self._home = HomeDevice(module)
        if self.sync_batchnorm:
            self._swap = SyncBatchNormSwap(module)
        self.precision.convert_module(module)
        module.to(self.device)
        self._manual = not getattr(module, "automatic_optimization", True)
        self._replicated = tuple(module.parameters())
        if not self._wrap(module, init_sync=True):
            self._give_out([*module.parameters(), *module.buffers()])  # as DDP does where anything trains
        if self._manual:
            return self._manual_runner()  # each backward is announced by itself, in `backward`
        if self.world_size == 1 and self.find_unused_parameters and self.comm_hook is None:
            # There is nothing to exchange. DDP's forward would announce a backward, which a None loss has not, and take
            # all parameters for unused ones whose gradients are to be there.
            return operator.call

        static = self.static_graph

        def run(step: Callable[..., Any], *args: Any) -> Any:
            ddp = self._ddp
            if ddp is None or not torch.is_grad_enabled():
                return step(*args)  # nothing to reduce; buffers were given out before the evaluation
            if static and not ddp.static_graph and ddp.require_backward_grad_sync:
                reducer.plan_on_next_backward(ddp)
            try:
                output = ddp(step, *args)
            except RuntimeError as error:
                reducer.explain(error, ddp)
                raise
            return whole_output(output)

        return run

    def _manual_runner(self) -> StepRunner:
        """A step is not DDP's forward, which would give out rank 0's buffers."""
        if self._options.get("broadcast_buffers") is False:
            return operator.call

        def run(step: Callable[..., Any], *args: Any) -> Any:
            ddp = self._ddp  # another one where what trains has changed
            if ddp is not None and torch.is_grad_enabled() and reducer.gives_out_buffers(ddp):
                reducer.give_out_buffers(ddp)
            return step(*args)

        return run

    def _wrap(self, module: nn.Module, init_sync: bool) -> bool:
        """Put DDP around the module, for what trains now; False where nothing does. Collective."""
        self._trained = [one for one in module.parameters() if one.requires_grad]
        if self._ddp is not None:
            reducer.let_go(self._ddp)  # its hooks come off the parameters with it
        self._ddp = self._verify = None
        if not self._trained:
            return False  # nothing to reduce, and DDP refuses such a module
        options = dict(self._options)
        if not init_sync:
            options["init_sync"] = False
        ddp = DistributedDataParallel(
            StepModule(module),
            find_unused_parameters=self.find_unused_parameters or self._manual,
            **options,
        )
        register_comm_hook(ddp, self.comm_hook)
        if self._manual and not self.find_unused_parameters:
            reducer.take_as_told(ddp)
        self._ddp = ddp
        if not (self.find_unused_parameters or self._manual):
            self._verify = reducer.verifier(ddp)
        return True

    def broadcast_module(self, module: nn.Module) -> None:
        """DistributedDataParallel has begun with them."""

    def trainable_changed(self, module: nn.Module) -> None:
        known = {id(one) for one in self._replicated}
        fresh = {name: one for name, one in module.named_parameters() if id(one) not in known}
        self._replicated = tuple(module.parameters())
        if fresh:
            refuse_other_device(fresh, self.device)
            self._give_out([*fresh.values(), *module.buffers()])
        if list(map(id, self._trained)) == [id(one) for one in self._replicated if one.requires_grad]:
            return
        refuse_kept_state(self.comm_hook)
        self._wrap(module, init_sync=False)

    def _give_out(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            broadcast_together(tensors)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        return nullcontext() if enabled or self._ddp is None else self._ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        ddp = self._ddp
        if ddp is None:
            self.precision.backward(loss)
            return
        if self._manual:
            reducer.expect_backward(ddp, loss)
        try:
            self.precision.backward(loss)
            # The next forward would tell too: after a step on this rank's own gradients, if there is one.
            if self._verify is not None and ddp.require_backward_grad_sync:
                self._verify()
        except RuntimeError as error:
            reducer.explain(error, ddp)
            raise

    def memory_advice(self, module: nn.Module) -> Sequence[MemoryAdvice]:
        return [shard_them(self.world_size), *super().memory_advice(module)]

    def teardown(self) -> None:
        if self._swap is not None:
            self._swap.undo()
        if self._home is not None:
            self._home.restore()
        if self._ddp is not None:
            reducer.let_go(self._ddp)
        self._ddp = self._verify = None
        self._home = None
        self._swap = None
        self._replicated, self._trained = (), []
        super().teardown()
