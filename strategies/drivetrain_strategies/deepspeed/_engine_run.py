"""One run under DeepSpeed's engine: from its start to a module that is plain again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drivetrain.strategies import ControlPlane, ParameterShard, broadcast_together, may_move
from drivetrain_strategies._gather_order import UnitOrder
from drivetrain_strategies._materialize import Recording
from drivetrain_strategies._missing_weights import are_gathered
from drivetrain_strategies.deepspeed._cleanup import ModuleTraces, forget_root
from drivetrain_strategies.deepspeed._error_messages import explained, start_explained
from drivetrain_strategies.deepspeed._frozen_weights import FrozenWeights
from drivetrain_strategies.deepspeed._gradient_order import GradientOrder
from drivetrain_strategies.deepspeed._internals import Zero, weights_shared_already, write_part
from drivetrain_strategies.deepspeed._leave_sharded import leave_parts, take_up_parts
from drivetrain_strategies.deepspeed._library import prints_hidden
from drivetrain_strategies.deepspeed._optimizers import TakenOptimizer
from drivetrain_strategies.deepspeed._partition import Partitioner, materialize
from drivetrain_strategies.deepspeed._precision import DeepSpeedPrecision
from drivetrain_strategies.deepspeed._root_module import Root, unboxed
from drivetrain_strategies.deepspeed._state import Place, State, whole_of
from drivetrain_strategies.deepspeed._unused_parameters import UnusedParameters

logger = logging.getLogger("drivetrain")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a run computes.

    Attributes:
        stage: of ZeRO.
        device: of this rank.
        precision: whose masters are DeepSpeed's.
        control: the way to the other ranks.
        gather_limit: bytes of parameters up to which the module is whole again.
        leaf_modules: classes that stage 3 takes as one.
        find_unused_parameters: see `UnusedParameters`.
    """

    stage: int
    device: torch.device
    precision: DeepSpeedPrecision
    control: ControlPlane
    gather_limit: int
    leaf_modules: tuple[type[nn.Module], ...]
    find_unused_parameters: bool | None


class DeepSpeedRun:
    """A module under DeepSpeed.

    Args:
        deepspeed: the package.
        module: the user's.
        config: what DeepSpeed gets; the size of its bucket is written to it.
        setting: where and how.
    """

    def __init__(self, deepspeed: Any, module: nn.Module, config: dict[str, Any], setting: Setting) -> None:
        self._deepspeed = deepspeed
        self._module = module
        self._config = config
        self._setting = setting
        self._traces: ModuleTraces | None = None
        self._root: Root | None = None
        self._engine: Any = None
        self._zero: Zero | None = None
        self._exact: dict[int, Place] = {}
        self._state: State | None = None
        self._taken: TakenOptimizer | None = None
        self._unused: UnusedParameters | None = None
        self._order: UnitOrder | None = None
        self._arrivals: GradientOrder | None = None
        self._idle: list[nn.Parameter] = []
        self._inside = self._collecting = self._told_skipped = self._restored = False
        self._frozen = FrozenWeights(nn.Module(), setting.stage, rounded=False)
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

    def start(self, optimizers: Sequence[Optimizer], recording: Recording | None) -> None:
        """Give all ranks rank 0's weights, spread them, and start the engine where there is something to run.

        Collective.
        """
        module, setting = self._module, self._setting
        with may_move(module):
            take_up_parts(module, setting.control.world_size)
            self._taken = TakenOptimizer(module, optimizers[0]) if optimizers else None
            self._traces = ModuleTraces(module)
            starts = bool(optimizers) or "optimizer" in self._config or setting.stage == 3
            with prints_hidden():
                if setting.stage == 3:
                    self._partition(recording)
                else:
                    self._share(starts)
                if starts:
                    self._initialize(optimizers)
        broadcast_together(list(module.buffers()))
        self._state = State(module, self._exact, self._zero, self._publish)
        self._frozen = FrozenWeights(module, setting.stage, rounded=setting.precision.half is not None)
        if self._taken is not None:
            self._taken.bring(self._state)

    def _share(self, starts: bool) -> None:
        """Stages 1 and 2: every rank holds the whole; masters want the weights as they were before any rounding.

        Those wait in the host's memory: on the device there is one in float32 at a time, and of frozen ones none stays.

        Args:
            starts: whether an engine comes, which computes with weights in half precision.
        """
        module, setting = self._module, self._setting
        half = setting.precision.half
        for parameter in module.parameters():
            whole = parameter.data = parameter.data.to(setting.device)
            dist.broadcast(whole, 0)
            if half is not None and parameter.dtype != half:
                if starts:
                    parameter.data = whole.to(half)
                    whole = whole.cpu()
                self._exact[id(parameter)] = Place(whole, tuple(parameter.shape), None)
        module.to(setting.device)  # buffers

    def _partition(self, recording: Recording | None) -> None:
        module, setting = self._module, self._setting
        with start_explained():
            partitioner = Partitioner(self._config, setting.precision.half, setting.device)
        self._exact = partitioner.exact
        materialize(module, recording, partitioner.cut, setting.device, setting.control)
        partitioner.cut_all(module)
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = buffer.to(setting.device)
        leaves: list[nn.Module] = []
        if setting.leaf_modules:
            leaves = self._deepspeed.utils.set_z3_leaf_modules(module, list(setting.leaf_modules))
        if setting.control.world_size > 1:
            self._order = UnitOrder(_gathered_by_themselves(module, leaves), setting.control)

    def _initialize(self, optimizers: Sequence[Optimizer]) -> None:
        module = self._module
        held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        # Nobody steps on their gradients, and stage 3 could not take them.
        self._idle = [one for one in module.parameters() if one.requires_grad and held and id(one) not in held]
        for one in self._idle:
            one.requires_grad_(False)
        names = {one: name for name, one in module.named_parameters() if one.requires_grad}
        # DeepSpeed sets a bucket aside in whole, however small the model is.
        numel = sum(int(getattr(one, "ds_numel", one.numel())) for one in names)
        self._config["zero_optimization"].setdefault("reduce_bucket_size", max(1, min(500_000_000, numel)))
        self._root = Root(module)
        with start_explained(), weights_shared_already():
            self._engine, *_ = self._deepspeed.initialize(
                model=self._root,
                optimizer=optimizers[0] if optimizers else None,
                model_parameters=list(names),
                config=copy.deepcopy(self._config),
            )
        assert self._traces is not None
        self._traces.note()
        engine = self._engine
        if not optimizers and engine.optimizer_name() is None:
            return
        self._zero = Zero(engine)
        if self._setting.precision.name == "16-mixed":
            keeps_floor = "min_loss_scale" in self._config["fp16"]
            self._setting.precision.take_scaler(engine.optimizer.loss_scaler, keeps_floor)
        optimizer = self._zero.base_optimizer
        # Its own would take from offloaded state the gradients that DeepSpeed keeps there.
        optimizer.__dict__["zero_grad"] = self._forget_if_any
        self.optimizers = [optimizer]
        if engine.lr_scheduler is not None:
            self.schedulers = [engine.lr_scheduler]
            engine.lr_scheduler = None  # stepped once a step, by the loop
        control, asked = self._setting.control, self._setting.find_unused_parameters
        self._unused = UnusedParameters(names, self._zero, control, asked)
        if asked is None and self._zero.stage == 2 and control.world_size > 1:
            self._arrivals = GradientOrder(self._zero.optimizer, names, control)
        self._restore_masters()

    @torch.no_grad()
    def _restore_masters(self) -> None:
        """Write the weights as they were over masters that were made of rounded ones (E-11)."""
        for number, held in groupby(self.zero.fragments(), lambda one: one.number):
            exact = [(one, self._exact.pop(id(one.parameter), None)) for one in held]
            if self._setting.precision.half is None:
                continue
            with self.zero.at_hand(number, write=True):
                for fragment, place in exact:
                    if place is not None:
                        span = fragment.span
                        whole = place.local if place.span is not None else place.local.reshape(-1)[span.start :]
                        fragment.master.copy_(whole[: span.stop - span.start])

    def load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Take weights by name, as `State.load_weights` does."""
        self.state.load_weights(state, strict)
        self._frozen.accept()

    # In the loop

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._engine is None:
            return step(*args)
        if self._frozen.watches:
            self._frozen.check()
        call = partial(step, *args)
        if torch.is_autocast_enabled():  # asks for CUDA's, as DeepSpeed does, whose engine then switches it off
            call = partial(self._under_autocast, call)
        order, self._order = self._order, None  # in the first step only
        self._inside = True
        try:
            if order is None:
                return unboxed(self._engine(call))
            with explained(self), order.compared():
                return unboxed(self._engine(call))
        finally:
            self._inside = False

    def _under_autocast(self, call: Callable[[], Any]) -> Any:
        with self._setting.precision.forward_context():
            return call()

    def backward(self, loss: torch.Tensor) -> None:
        if self._zero is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        assert self._unused is not None
        self._collecting = True
        self._unused.before_backward(loss)
        if self._unused.in_order:
            self._forget_arrivals()
        with explained(self):
            self._zero.backward(loss, self._unused.in_order, within_forward=self._inside)
        self._unused.after_backward(loss)
        if self._arrivals is not None:
            self._arrivals.after_backward()

    def step(self, max_norm: float | None) -> bool:
        self._collecting = False
        with explained(self):
            stepped = self.zero.step(max_norm)
        assert self._unused is not None
        self._unused.after_step()
        if self._arrivals is not None:
            self._arrivals.after_step()
        if not stepped and self._setting.precision.name == "16-mixed":
            self._setting.precision.note_skipped_step()
        elif not stepped and not self._told_skipped:
            self._told_skipped = True
            logger.warning("A gradient was infinite or NaN: DeepSpeed skipped the step on every rank. Said once.")
        return stepped

    def _forget_arrivals(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    @property
    def missed_gradients(self) -> bool:
        """Whether the last backward left a parameter without a gradient on this rank."""
        trained = sum(parameter.requires_grad for parameter in self._module.parameters())
        return self._zero is not None and self._setting.stage > 1 and self._zero.gradients_seen < trained

    def forget(self) -> None:
        self._collecting = False
        if self._zero is not None:
            self._zero.forget()

    def _forget_if_any(self, set_to_none: bool = True) -> None:
        if self._collecting:
            self.forget()

    # Whole parameters within a run

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], write: bool) -> Iterator[None]:
        """Within it parameters hold their masters, whole. Collective."""
        wanted = {id(one): one for one in parameters}
        before = {key: one.data for key, one in wanted.items()}
        with torch.no_grad():
            for key, place in self.state.places(wanted):
                wanted[key].data = whole_of(place.read()).to(self._setting.device)
        try:
            yield
            if write:
                with torch.no_grad():
                    for key, place in self.state.places(wanted, write=True):
                        dist.broadcast(wanted[key].data, 0)
                        place.write(wanted[key].data)
        finally:
            for key, parameter in wanted.items():
                parameter.data = before[key]
        if write:
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Let what computes hold what was written to its exact place. Collective."""
        for one in self._module.parameters():
            parameter: Any = one
            exact = self._exact.get(id(parameter))
            if exact is None:
                continue
            if exact.span is None:
                parameter.data.copy_(exact.local)
            else:
                write_part(parameter, exact.local, exact.span)
        if self._zero is not None:
            self._zero.publish()

    # DeepSpeed's own checkpoints

    def write_native(self, path: str) -> None:
        self._engine.save_checkpoint(path)

    def read_native(self, path: str) -> bool:
        """Load; False where there is none, which DeepSpeed takes for a fresh start."""
        found, _ = self._engine.load_checkpoint(path)
        return found is not None

    # The end

    @torch.no_grad()
    def restore(self) -> None:
        """Make the module whole and plain, in the dtypes of its masters. Collective."""
        setting = self._setting
        nbytes, tell = self.state.nbytes_spread(), setting.control.rank == 0
        if setting.stage == 3 and not are_gathered(nbytes, setting.gather_limit, "DeepSpeedStrategy", tell):
            return
        weights = self.state.weights()
        lost = self._frozen.lost()
        if lost is not None:  # after the last step, when nobody refuses any more
            logger.warning("%s Why: %s Fix: %s", lost.what, lost.why, lost.fix)
        parameters = dict(self._module.named_parameters())
        whole = {name: whole_of(weights[name]) for name in parameters}
        if self._taken is not None:
            self._taken.gather(self.state)
        self._undo()
        self._restored = True
        for name, parameter in parameters.items():
            parameter.data = whole[name].to(parameter.device)
            parameter.grad = None

    def end(self) -> None:
        """Let go of everything, also after a failure. Talks to nobody."""
        if self._traces is not None and not self._restored:
            self._leave()
        self._undo()
        if self._taken is not None:
            self._taken.give_back()
        for optimizer in self.optimizers:
            optimizer.__dict__.pop("zero_grad", None)
        self._setting.precision.loss_scaler = None

    @torch.no_grad()
    def _leave(self) -> None:
        """Leave what this rank has, where the others cannot be asked for theirs."""
        module, setting = self._module, self._setting
        places = self._exact.items() if self._state is None else self._state.places()
        held = {key: place.read() for key, place in places}
        values = {name: held[id(one)] for name, one in module.named_parameters() if id(one) in held}
        parts = {name: value for name, value in values.items() if isinstance(value, ParameterShard)}
        self._undo()
        if setting.stage == 3:
            leave_parts(module, parts, setting.gather_limit, setting.control.world_size, setting.control.rank == 0)
            return
        for name, parameter in module.named_parameters():
            # Whole on every rank, if rounded where it trained; and no view of DeepSpeed's buffers any longer.
            value = values.get(name)
            if isinstance(value, torch.Tensor):
                parameter.data = value.to(parameter.device)
            else:
                dtype = parameter.dtype if value is None else value.dtype
                parameter.data = parameter.data.to(dtype, copy=True)
            parameter.grad = None

    def _undo(self) -> None:
        """Take everything off the module."""
        if self._unused is not None:
            self._unused.close()
        self._forget_arrivals()
        if self._engine is not None:
            with prints_hidden():
                self._engine.destroy()
        if self._root is not None:
            forget_root(self._root)
        if self._traces is not None:
            self._traces.undo()
        for one in self._idle:
            one.requires_grad_(True)
        self._idle = []
        self._engine = self._root = self._zero = self._state = self._unused = self._order = None


def _gathered_by_themselves(module: nn.Module, leaves: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that stage 3 gathers one after the other: those with parameters of their own, leaves as wholes."""
    within = {id(child) for leaf in leaves for child in leaf.modules() if child is not leaf}
    return {
        name: child
        for name, child in module.named_modules()
        if name and id(child) not in within and (child in leaves or any(True for _ in child.parameters(recurse=False)))
    }
