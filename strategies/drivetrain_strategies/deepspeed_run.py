"""One run under DeepSpeed's engine: from its start to a module that is plain again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drivetrain.control import ControlPlane
from drivetrain.module import TrainModule, hold, release
from drivetrain.shards import Shard
from drivetrain_strategies.collectives import broadcast_together
from drivetrain_strategies.deepspeed_library import prints_hidden
from drivetrain_strategies.deepspeed_partition import Partitioner, materialize
from drivetrain_strategies.deepspeed_precision import DeepSpeedPrecision
from drivetrain_strategies.deepspeed_private import Zero
from drivetrain_strategies.deepspeed_root import Root, unboxed
from drivetrain_strategies.deepspeed_state import Place, State
from drivetrain_strategies.deepspeed_traces import ModuleTraces, forget_root
from drivetrain_strategies.materialize import Recording

logger = logging.getLogger("drivetrain")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how exactly a run computes."""

    stage: int
    device: torch.device
    precision: DeepSpeedPrecision
    control: ControlPlane


class DeepSpeedRun:
    """A module under DeepSpeed.

    Args:
        deepspeed: the package.
        module: the user's.
        config: what DeepSpeed gets.
        setting: where and how.
    """

    def __init__(self, deepspeed: Any, module: nn.Module, config: dict[str, Any], setting: Setting) -> None:
        self._deepspeed = deepspeed
        self._module = module
        self._config = config
        self._setting = setting
        self._traces = ModuleTraces(module)
        self._root: Root | None = None
        self._engine: Any = None
        self._zero: Zero | None = None
        self._exact: dict[int, Place] = {}
        self._state: State | None = None
        self._given: list[tuple[Optimizer, list[list[nn.Parameter]]]] = []
        self._collecting = False
        self._told_skipped = False
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []

    @property
    def zero(self) -> Zero:
        assert self._zero is not None
        return self._zero

    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state

    # Set-up

    def start(
        self,
        optimizers: Sequence[Optimizer],
        recording: Recording | None,
        leaf_modules: Sequence[type[nn.Module]] | None,
        training: bool,
    ) -> None:
        """Give all ranks rank 0's weights, spread them, and start the engine where there is something to run."""
        module, setting = self._module, self._setting
        if isinstance(module, TrainModule):
            release(module)
        try:
            with prints_hidden():
                if setting.stage == 3:
                    self._partition(recording, leaf_modules)
                else:
                    self._share()
                wants_engine = bool(optimizers) or "optimizer" in self._config or setting.stage == 3
                if wants_engine:
                    self._initialize(optimizers)
        finally:
            if isinstance(module, TrainModule):
                hold(module)
        broadcast_together(list(module.buffers()))
        self._state = State(module, self._places(), self._zero, self._publish)

    def _share(self) -> None:
        """Stages 1 and 2: every rank holds the whole; masters want the weights as they were before any rounding."""
        module, setting = self._module, self._setting
        module.to(setting.device)
        half = setting.precision.half
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
            if half is not None and parameter.dtype != half:
                self._exact[id(parameter)] = Place(parameter.data, tuple(parameter.shape), None)

    def _partition(self, recording: Recording | None, leaf_modules: Sequence[type[nn.Module]] | None) -> None:
        module, setting = self._module, self._setting
        partitioner = Partitioner(self._config, setting.precision.half, setting.device)
        materialize(module, recording, partitioner.cut, setting.device, setting.control)
        partitioner.cut_all(module)
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = buffer.to(setting.device)
        self._exact = partitioner.exact
        if leaf_modules:
            self._deepspeed.utils.set_z3_leaf_modules(module, list(leaf_modules))

    def _initialize(self, optimizers: Sequence[Optimizer]) -> None:
        module = self._module
        given = [[list(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self._given = list(zip(optimizers, given, strict=True))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        config = dict(self._config)
        zero = config["zero_optimization"] = dict(config["zero_optimization"])
        numel = sum(int(getattr(one, "ds_numel", one.numel())) for one in trained)
        zero.setdefault("reduce_bucket_size", max(1, min(500_000_000, numel)))
        self._root = Root(module)
        engine, *_ = self._deepspeed.initialize(
            model=self._root,
            optimizer=optimizers[0] if optimizers else None,
            model_parameters=trained,
            config=config,
        )
        self._engine = engine
        self._traces.note()
        if not optimizers and engine.optimizer_name() is None:
            return
        self._zero = Zero(engine)
        self._setting.precision.loss_scaler = getattr(engine.optimizer, "loss_scaler", None)
        optimizer = self._zero.base_optimizer
        # Its own would take from offloaded state the gradients that DeepSpeed keeps there.
        optimizer.__dict__["zero_grad"] = self._forget_if_any
        self.optimizers = [optimizer]
        if engine.lr_scheduler is not None:
            self.schedulers = [engine.lr_scheduler]
            engine.lr_scheduler = None  # stepped once a step, by the loop
        self._restore_masters()

    @torch.no_grad()
    def _restore_masters(self) -> None:
        """Write the weights as they were over masters that were made of rounded ones (E-11)."""
        for fragment in self.zero.fragments():
            exact = self._exact.pop(id(fragment.parameter), None)
            if exact is None or self._setting.precision.half is None:
                continue
            whole = exact.local if exact.span is not None else exact.local.reshape(-1)[fragment.span.start :]
            fragment.master.copy_(whole[: fragment.span.stop - fragment.span.start])

    def _places(self) -> dict[int, Place]:
        places = dict(self._exact)
        if self._zero is not None:
            for fragment in self._zero.fragments():
                parameter: Any = fragment.parameter
                shape = tuple(parameter.ds_shape if self._setting.stage == 3 else parameter.shape)
                places[id(parameter)] = Place(fragment.master, shape, fragment.span)
        return places

    # In the loop

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._engine is None:
            return step(*args)
        return unboxed(self._engine(partial(step, *args)))

    def backward(self, loss: torch.Tensor) -> None:
        if self._zero is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        self._collecting = True
        self._zero.backward(loss)

    def step(self, max_norm: float | None) -> bool:
        self._collecting = False
        stepped = self.zero.step(max_norm)
        if not stepped and self._setting.precision.name != "16-mixed" and not self._told_skipped:
            self._told_skipped = True
            logger.warning("A gradient was infinite or NaN: DeepSpeed skipped the step on every rank. Said once.")
        return stepped

    def forget(self) -> None:
        self._collecting = False
        if self._zero is not None:
            self._zero.forget()

    def _forget_if_any(self, set_to_none: bool = True) -> None:
        if self._collecting:
            self.forget()

    # The end

    @torch.no_grad()
    def _publish(self) -> None:
        if self._zero is not None:
            for parameter in self._module.parameters():
                exact = self._exact.get(id(parameter))
                if exact is not None:
                    self._show(parameter, exact)
            self._zero.publish()
            return
        for parameter in self._module.parameters():
            exact = self._exact.get(id(parameter))
            if exact is not None:
                self._show(parameter, exact)

    def _show(self, parameter: Any, exact: Place) -> None:
        """Let what computes hold what was written to its exact place."""
        if exact.span is None:
            parameter.data.copy_(exact.local)
        else:
            parameter.ds_tensor[: exact.span.stop - exact.span.start].copy_(exact.local)

    @torch.no_grad()
    def restore(self, limit: int, tell: bool) -> None:
        """Make the module whole and plain, in the dtypes that it had. Collective."""
        weights = self.state.weights()
        nbytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in weights.values() if isinstance(one, Shard))
        if nbytes > limit and self._setting.stage == 3:
            logger.log(
                logging.WARNING if tell else logging.DEBUG,
                "The parameters take %.1f GiB, more than gather_limit. Raise DeepSpeedStrategy(gather_limit=...), or "
                "save_checkpoint within the run, to have them whole.",
                nbytes / 2**30,
            )
            return
        parameters = dict(self._module.named_parameters())
        whole = {
            name: weights[name].full_tensor() if isinstance(weights[name], Shard) else weights[name].clone()
            for name in parameters
        }
        self._undo()
        for name, parameter in parameters.items():
            parameter.data = whole[name].to(parameter.device)
            parameter.grad = None

    def _undo(self) -> None:
        """Take everything off the module."""
        if self._engine is not None:
            with prints_hidden():
                self._engine.destroy()
        if self._root is not None:
            forget_root(self._root)
        self._traces.undo()
        self._engine = self._root = self._zero = self._state = None
        self._setting.precision.loss_scaler = None

    def end(self) -> None:
        """Let go of everything, also after a failure. Talks to nobody."""
        self._undo()
        for optimizer in self.optimizers:
            optimizer.__dict__.pop("zero_grad", None)
        for optimizer, groups in self._given:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            optimizer.state.clear()
