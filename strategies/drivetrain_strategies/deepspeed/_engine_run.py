"""DeepSpeedRun: one run under DeepSpeed's engine, from the engine's start until the module is restored."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drivetrain.strategies import ControlPlane, broadcast_together, may_move, replace_tensors
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies._gathering import GatherOrder, check_gather_limit
from drivetrain_strategies._step_module import StepModule, unwrap_step_output
from drivetrain_strategies.deepspeed._checks import is_known
from drivetrain_strategies.deepspeed._cleanup import ModuleSnapshot, forget_root
from drivetrain_strategies.deepspeed._empty_parameters import EmptyParameters
from drivetrain_strategies.deepspeed._error_messages import explain_different_parameters, explain_start_errors
from drivetrain_strategies.deepspeed._frozen_weights import FrozenWeights
from drivetrain_strategies.deepspeed._gradient_exchange import GradientExchange
from drivetrain_strategies.deepspeed._internals import Zero, without_broadcast, write_part
from drivetrain_strategies.deepspeed._library import redirected_prints
from drivetrain_strategies.deepspeed._partition import Partitioner
from drivetrain_strategies.deepspeed._precision import DeepSpeedPrecision
from drivetrain_strategies.deepspeed._state import State, StoredParameter, whole_of
from drivetrain_strategies.deepspeed._user_hooks import UserHooks

logger = logging.getLogger("drivetrain")

_WRITING_METHODS = ("train", "eval")
"""Methods by which optimizers without a schedule swap the weights for validation (https://arxiv.org/abs/2405.15682)."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run under DeepSpeed.

    Attributes:
        stage: ZeRO stage.
        device: device of this rank.
        precision: the run's precision.
        control: exchanges small values between the ranks.
        gather_limit: size in bytes up to which the parameters are gathered after the run.
        leaf_modules: classes of modules that stage 3 gathers as a whole.
        find_unused_parameters: the strategy's argument. None makes `GradientExchange` compare the ranks, and True makes
            stage 2 exchange gradients after backward.
    """

    stage: int
    device: torch.device
    precision: DeepSpeedPrecision
    control: ControlPlane
    gather_limit: int
    leaf_modules: tuple[type[nn.Module], ...]
    find_unused_parameters: bool | None


class DeepSpeedRun:
    """A run in which DeepSpeed's engine trains or evaluates a module.

    Args:
        deepspeed: the package `deepspeed`.
        module: the user's module.
        config: the resolved configuration. The run adds ``reduce_bucket_size`` if the key is missing.
        options: the run's options.
    """

    def __init__(self, deepspeed: Any, module: nn.Module, config: dict[str, Any], options: RunOptions) -> None:
        self._deepspeed = deepspeed
        self._module = module
        self._config = config
        self._options = options
        self._undo = ExitStack()
        """Removes everything that DeepSpeed and this class have added to the module."""
        self._engine: Any = None
        self._zero: Zero | None = None
        self._unrounded: dict[int, StoredParameter] = {}
        self._state: State | None = None
        self._handles: list[Any] = []
        self._exchange: GradientExchange | None = None
        self._gather_order: GatherOrder | None = None
        self._user_hooks: UserHooks | None = None
        self._watch: EmptyParameters | None = None
        self._unwatched: set[str] = set()  # names of the steps that used no empty parameter
        self._within_forward = self._has_gradients = self._warned_skipped = False
        self._has_weights = False  # from the start until the module has whole weights again
        self._frozen = FrozenWeights(nn.Module(), options.stage, rounded=False)
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

    # Set-up: broadcast, partitioning and the engine's start

    def start(self, optimizers: Sequence[Optimizer], deferred: DeferredModule) -> None:
        """Broadcast rank 0's weights, shard them, and start the engine if the run needs one. Collective."""
        module, options = self._module, self._options
        with may_move(module):
            snapshot = ModuleSnapshot(module)
            self._undo.callback(snapshot.undo)
            self._has_weights = True
            needs_engine = bool(optimizers) or "optimizer" in self._config or options.stage == 3
            with redirected_prints():
                if options.stage == 3:
                    self._partition(deferred)
                else:
                    self._broadcast_weights(needs_engine)
                if needs_engine:
                    self._initialize(optimizers, snapshot)
        broadcast_together(list(module.buffers()))
        self._state = State(module, self._unrounded, self._zero, self._update_compute_weights)
        self._frozen = FrozenWeights(module, options.stage, rounded=options.precision.half_dtype is not None)
        if self._zero is not None:
            self._user_hooks = UserHooks(module, self._zero, self._state, options.gather_limit)
            if options.stage == 3:
                self._zero.gather_small_parameters()  # so that hooks find them whole before the first step, too

    def _broadcast_weights(self, needs_engine: bool) -> None:
        """Broadcast the weights at stages 1 and 2, and keep unrounded copies for the master weights.

        If an engine will be started, the copies are kept in host memory, so that the device holds only one float32
        weight at a time.

        Args:
            needs_engine: whether an engine will be started. If so, the weights are rounded to the run's half precision,
                if it has one.
        """
        module, options = self._module, self._options
        half_dtype = options.precision.half_dtype
        for parameter in module.parameters():
            unrounded = parameter.data = parameter.data.to(options.device)
            dist.broadcast(unrounded, 0)
            if half_dtype is not None and parameter.dtype != half_dtype:
                if needs_engine:
                    parameter.data = unrounded.to(half_dtype)
                    unrounded = unrounded.cpu()
                self._unrounded[id(parameter)] = StoredParameter(unrounded, tuple(parameter.shape), None)
        module.to(options.device)  # the parameters are on the device already, so only buffers are moved

    def _partition(self, deferred: DeferredModule) -> None:
        module, options = self._module, self._options
        with explain_start_errors():
            partitioner = Partitioner(self._config, options.precision.half_dtype, options.device)
        self._unrounded = partitioner.unrounded
        partitioner.materialize(module, deferred, options.control)
        partitioner.partition_all(module)
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = buffer.to(options.device)
        leaves: list[nn.Module] = []
        if options.leaf_modules:
            leaves = self._deepspeed.utils.set_z3_leaf_modules(module, list(options.leaf_modules))
        if options.control.world_size > 1:
            self._gather_order = GatherOrder(_separately_gathered(module, leaves), options.control)

    def _initialize(self, optimizers: Sequence[Optimizer], snapshot: ModuleSnapshot) -> None:
        module = self._module
        in_optimizer = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        # Stage 3 cannot handle gradients of parameters that the optimizer does not hold.
        for parameter in module.parameters():
            if parameter.requires_grad and in_optimizer and id(parameter) not in in_optimizer:
                parameter.requires_grad_(False)
                self._undo.callback(parameter.requires_grad_, True)
        names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        # DeepSpeed allocates the whole bucket even if the model is smaller.
        numel = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in names)
        self._config["zero_optimization"].setdefault("reduce_bucket_size", max(1, min(500_000_000, numel)))
        root = StepModule(module, hides_values=True)
        self._undo.callback(forget_root, root)
        with explain_start_errors(), without_broadcast():
            self._engine, *_ = self._deepspeed.initialize(
                model=root,
                optimizer=optimizers[0] if optimizers else None,
                model_parameters=list(names),
                config=copy.deepcopy(self._config),
            )
        engine = self._engine
        self._undo.callback(engine.destroy)
        snapshot.record_additions()
        if not optimizers and engine.optimizer_name() is None:
            return
        self._zero = Zero(engine)
        if self._options.precision.name == "16-mixed":
            sets_minimum_scale = "min_loss_scale" in self._config["fp16"]
            self._options.precision.take_scaler(engine.optimizer.loss_scaler, sets_minimum_scale)
        optimizer = self._zero.base_optimizer
        # The optimizer's own zero_grad would remove the gradients that DeepSpeed keeps with offloaded state.
        optimizer.__dict__["zero_grad"] = self._forget_pending_gradients
        for name in _WRITING_METHODS:
            if hasattr(optimizer, name):
                optimizer.__dict__[name] = partial(self._call_and_update_weights, getattr(optimizer, name))
        self.optimizers = [optimizer]
        if not is_known(optimizer):
            self._handles = _copy_gradients_in_steps(optimizer)  # torch's and DeepSpeed's optimizers keep none
        if engine.lr_scheduler is not None:
            self.schedulers = [engine.lr_scheduler]
            engine.lr_scheduler = None  # the loop steps the scheduler once per optimizer step
        control, find_unused = self._options.control, self._options.find_unused_parameters
        compares = find_unused is None and self._zero.stage > 1 and control.world_size > 1
        self._exchange = GradientExchange(names, self._zero, control, compares)
        self._undo.callback(self._exchange.close)
        self._restore_masters()

    @torch.no_grad()
    def _restore_masters(self) -> None:
        """Write the unrounded weights into the master weights, which DeepSpeed built from rounded weights."""
        for number, fragments in groupby(self.zero.fragments(), lambda fragment: fragment.flat_index):
            stored_weights = [(fragment, self._unrounded.pop(id(fragment.parameter), None)) for fragment in fragments]
            if self._options.precision.half_dtype is None:
                continue
            with self.zero.swapped_in(number, write=True):
                for fragment, stored in stored_weights:
                    if stored is not None:
                        span = fragment.span
                        weights = stored.local if stored.span is not None else stored.local.reshape(-1)[span.start :]
                        fragment.master.copy_(weights[: span.stop - span.start])

    def hook_context(self, name: str, window_is_complete: bool) -> AbstractContextManager[None]:
        hooks = self._user_hooks
        return nullcontext() if hooks is None else hooks.context(name, window_is_complete)

    def keep_writes_of_hooks(self) -> None:
        """Copy weights that hooks of the user may have written into the master weights. Does not communicate."""
        if self._user_hooks is not None:
            self._user_hooks.keep_writes()

    def weights(self) -> dict[str, Any]:
        """Return weights by name; see `State.weights`."""
        self.keep_writes_of_hooks()
        return self.state.weights()

    def load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load weights by name; see `State.load_weights`."""
        self.keep_writes_of_hooks()
        self.state.load_weights(state, strict)
        self._frozen.accept_current_values()

    # During a step: forward, backward, optimizer step and gradients

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._engine is None:
            return step(*args)
        if self._frozen.weights and (lost_update := self._frozen.lost_update()) is not None:
            raise lost_update
        if self._options.stage == 3:
            self.keep_writes_of_hooks()  # stage 3 partitions parameters within the forward
        call = partial(step, *args)
        if torch.is_autocast_enabled():  # DeepSpeed's engine would disable CUDA's autocast
            call = partial(self._under_autocast, call)
        # The ranks compare their gather orders only in the first step.
        gather_order, self._gather_order = self._gather_order, None
        if self._options.stage == 3 and step.__name__ not in self._unwatched:
            call = partial(self._watched, call, step.__name__)
        if self._user_hooks is not None and self._options.stage < 3 and torch.is_grad_enabled():
            call = partial(self._user_hooks.run_step, call)
        self._within_forward = True
        try:
            if gather_order is None:
                return unwrap_step_output(self._engine(call))
            with explain_different_parameters(), gather_order.compared():
                return unwrap_step_output(self._engine(call))
        finally:
            self._within_forward = False

    def _watched(self, call: Callable[[], Any], name: str) -> Any:
        """Gather empty parameters that operators use. After a first step without any, later steps do without."""
        if self._watch is None:
            names = {id(parameter): name for name, parameter in self._module.named_parameters()}
            self._watch = EmptyParameters(names, self._engine)
        self._watch.found = False
        with self._watch:
            result = call()
        if not self._watch.found:
            self._unwatched.add(name)
        return result

    def _under_autocast(self, call: Callable[[], Any]) -> Any:
        with self._options.precision.forward_context():
            return call()

    def backward(self, loss: torch.Tensor) -> None:
        if self._zero is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        assert self._exchange is not None
        self._has_gradients = True
        self._exchange.before_backward(loss)
        with explain_different_parameters(partial(self._exchange.differing, loss)):
            self._zero.backward(loss, bool(self._options.find_unused_parameters), within_forward=self._within_forward)
        self._exchange.after_backward()

    def step(self, max_norm: float | None) -> bool:
        self._has_gradients = False
        self.keep_writes_of_hooks()
        stepped = self.zero.step(max_norm)
        if self._within_forward and self._user_hooks is not None:
            self._user_hooks.after_optimizer_step()
        assert self._exchange is not None
        self._exchange.after_step()
        if not stepped and self._options.precision.name == "16-mixed":
            self._options.precision.note_skipped_step()
        elif not stepped and not self._warned_skipped:
            self._warned_skipped = True
            logger.warning(
                "A gradient was infinite or NaN: DeepSpeed skipped the step on every rank. This warning is shown once."
            )
        return stepped

    def forget(self) -> None:
        self._has_gradients = False
        if self._zero is not None:
            self._zero.forget()

    def _forget_pending_gradients(self, set_to_none: bool = True) -> None:
        if self._has_gradients:
            self.forget()

    # Whole parameters within a run, and updates of the weights that the module computes with

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], write: bool) -> Iterator[None]:
        """Assign whole master weights to the given parameters within this context. Collective.

        Args:
            parameters: the parameters.
            write: whether rank 0's changes are kept, on all ranks.
        """
        self.keep_writes_of_hooks()
        wanted = {id(parameter): parameter for parameter in parameters}
        data_before = {key: parameter.data for key, parameter in wanted.items()}
        with torch.no_grad():
            for key, stored in self.state.stored_parameters(wanted):
                wanted[key].data = whole_of(stored.read()).to(self._options.device)
        try:
            yield
            if write:
                with torch.no_grad():
                    for key, stored in self.state.stored_parameters(wanted, write=True):
                        dist.broadcast(wanted[key].data, 0)
                        stored.write(wanted[key].data)
        finally:
            for key, parameter in wanted.items():
                parameter.data = data_before[key]
        if write:
            self._update_compute_weights()

    def _call_and_update_weights(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the optimizer that writes the master weights. Collective."""
        self.keep_writes_of_hooks()
        with self.zero.params_in_groups(list(enumerate(self.zero.flat_tensors()))):
            result = method(*args, **kwargs)
        self._update_compute_weights()
        return result

    @torch.no_grad()
    def _update_compute_weights(self) -> None:
        """Copy unrounded weights and master weights into the weights that the module computes with. Collective."""
        parameter: Any
        for parameter in self._module.parameters():
            unrounded = self._unrounded.get(id(parameter))
            if unrounded is None:
                continue
            if unrounded.span is None:
                parameter.data.copy_(unrounded.local)
            else:
                write_part(parameter, unrounded.local, unrounded.span)
        if self._zero is not None:
            self._zero.update_compute_weights()

    # End of the run: the module is restored

    @torch.no_grad()
    def restore(self) -> None:
        """Turn the module back into a plain module, with whole parameters in the master weights' dtypes. Collective."""
        options = self._options
        nbytes, warn = self.state.sharded_nbytes(), options.control.rank == 0
        if options.stage == 3 and not check_gather_limit(nbytes, options.gather_limit, "DeepSpeedStrategy", warn):
            return
        weights = self.weights()
        lost_update = self._frozen.lost_update()
        if lost_update is not None:  # an update after the last forward
            logger.warning("%s Why: %s Fix: %s", lost_update.what, lost_update.why, lost_update.fix)
        parameters = dict(self._module.named_parameters())
        # Copies go to the host until DeepSpeed's buffers are freed: a device may not have memory for both.
        whole_weights = {name: whole_of(weights[name]).cpu() for name in parameters}
        self._release()
        self._has_weights = False
        for name, parameter in parameters.items():
            parameter.data = whole_weights[name].to(parameter.device)
            parameter.grad = None

    def end(self) -> None:
        """Release everything that this run acquired, also after a failure. Does not communicate."""
        if self._has_weights:
            self._leave_weights()
        self._release()
        for optimizer in self.optimizers:
            for name in ("zero_grad", *_WRITING_METHODS):
                optimizer.__dict__.pop(name, None)
            # DeepSpeed's flat tensors are freed, whoever keeps the optimizer. Another run with it is refused by name.
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [torch.empty(0)]
        for handle in self._handles:
            handle.remove()
        self._options.precision.loss_scaler = None

    @torch.no_grad()
    def _leave_weights(self) -> None:
        """Leave the module without whole weights: after a failure, when ranks cannot communicate, or above the limit.

        At stage 3, its parameters are on the meta device afterwards.
        """
        module = self._module
        stored_parameters = dict(self._unrounded.items() if self._state is None else self._state.stored_parameters())
        if self._options.stage == 3:
            self._release()
            replace_tensors(
                module,
                {
                    key: torch.empty(stored.shape, dtype=stored.local.dtype, device="meta")
                    for key, stored in stored_parameters.items()
                },
            )
            return
        values = {key: stored.read() for key, stored in stored_parameters.items()}
        self._release()
        for parameter in module.parameters():
            # Trained weights stay rounded, since each rank has only its part of the master weights. Copies are
            # assigned, so that no parameter is a view of DeepSpeed's buffers.
            value = values.get(id(parameter))
            if isinstance(value, torch.Tensor):
                parameter.data = value.to(parameter.device)
            else:
                dtype = parameter.dtype if value is None else value.dtype
                parameter.data = parameter.data.to(dtype, copy=True)
            parameter.grad = None

    def _release(self) -> None:
        with redirected_prints():  # the engine's destroy prints
            self._undo.close()
        self._engine = self._zero = self._state = self._exchange = self._gather_order = self._user_hooks = None


def _copy_gradients_in_steps(optimizer: Optimizer) -> list[Any]:
    """Give a user's optimizer copies of the gradients in each step; return handles that end this.

    DeepSpeed's flat gradients may be buffers that it uses again in the next window. An optimizer that keeps a gradient
    would find it overwritten.
    """
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy_gradients(optimizer: Optimizer, *_: Any) -> None:
        flats = (flat for group in optimizer.param_groups for flat in group["params"])
        buffers[:] = [(flat, flat.grad) for flat in flats if flat.grad is not None]
        for flat, buffer in buffers:
            flat.grad = buffer.clone()

    def put_back(*_: Any) -> None:
        for flat, buffer in buffers:
            flat.grad = buffer
        buffers.clear()

    return [optimizer.register_step_pre_hook(copy_gradients), optimizer.register_step_post_hook(put_back)]


def _separately_gathered(module: nn.Module, leaves: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that stage 3 gathers separately.

    A leaf module is gathered as a whole. Outside leaf modules, every module that owns parameters is gathered by itself.
    """
    within_leaves = {id(child) for leaf in leaves for child in leaf.modules() if child is not leaf}
    return {
        name: child
        for name, child in module.named_modules()
        if name
        and id(child) not in within_leaves
        and (child in leaves or any(True for _ in child.parameters(recurse=False)))
    }
