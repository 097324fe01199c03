"""DeepSpeedRun: one run under DeepSpeed's engine, from the engine's start until the module is restored."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.strategies import ControlPlane, broadcast_together, may_move, replace_tensors
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies._gathering import GatherOrder
from drivetrain_strategies._step_module import StepModule, unwrap_step_output
from drivetrain_strategies.deepspeed._checks import is_known
from drivetrain_strategies.deepspeed._cleanup import ModuleSnapshot, forget_root
from drivetrain_strategies.deepspeed._error_messages import explain_compilation_errors, explain_different_parameters
from drivetrain_strategies.deepspeed._first_weights import Partitioner, broadcast_weights
from drivetrain_strategies.deepspeed._gradient_exchange import GradientExchange
from drivetrain_strategies.deepspeed._internals import Zero, changed_start
from drivetrain_strategies.deepspeed._library import redirected_prints
from drivetrain_strategies.deepspeed._precision import DeepSpeedPrecision
from drivetrain_strategies.deepspeed._state import State, whole_of
from drivetrain_strategies.deepspeed._user_code import EmptyParameters, FrozenWeights, UserHooks

logger = logging.getLogger("drivetrain")

_WRITING_METHODS = ("train", "eval")
"""Methods by which optimizers without a schedule swap the weights for validation (https://arxiv.org/abs/2405.15682)."""


class DeepSpeedRun:
    """A run in which DeepSpeed's engine trains or evaluates a module.

    Args:
        deepspeed: the package `deepspeed`.
        module: the user's module.
        config: the resolved configuration. The run adds ``reduce_bucket_size`` if the key is missing.
        device: device of this rank.
        precision: the run's precision.
        control: exchanges small values between the ranks.
        leaf_modules: classes of modules that stage 3 gathers as a whole.
        find_unused_parameters: the strategy's argument. None makes `GradientExchange` compare the ranks, and True makes
            stage 2 exchange gradients after backward.
        gather_limit: size in bytes up to which parameters are gathered after the run.
    """

    def __init__(
        self,
        deepspeed: Any,
        module: nn.Module,
        config: dict[str, Any],
        device: torch.device,
        precision: DeepSpeedPrecision,
        control: ControlPlane,
        leaf_modules: tuple[type[nn.Module], ...],
        find_unused_parameters: bool | None,
        gather_limit: int,
    ) -> None:
        self._deepspeed = deepspeed
        self._module = module
        self._config = config
        self._stage: int = config["zero_optimization"]["stage"]
        self._device = device
        self._precision = precision
        self._control = control
        self._leaf_modules = leaf_modules
        self._find_unused = find_unused_parameters
        self._gather_limit = gather_limit
        self._undo = ExitStack()
        """Removes everything that DeepSpeed and this class have added to the module."""
        self._dtypes = {id(parameter): parameter.dtype for parameter in module.parameters()}
        self._state = State(module)
        self._engine: Any = None
        self._zero: Zero | None = None
        self._exchange: GradientExchange | None = None
        self._gather_order: GatherOrder | None = None
        self._user_hooks: UserHooks | None = None
        self._frozen = FrozenWeights(nn.Module(), self._stage, rounded=False)
        self._watch: EmptyParameters | None = None
        self._within_forward = self._has_gradients = self._warned_skipped = False
        self._has_weights = False  # from the start until the module has whole weights again
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []

    @property
    def zero(self) -> Zero:
        assert self._zero is not None
        return self._zero

    # Set-up: broadcast, partitioning and the engine's start

    def start(self, optimizers: Sequence[Optimizer], deferred: DeferredModule) -> None:
        """Broadcast rank 0's weights, shard them, and start the engine if the run needs one. Collective."""
        module, half_dtype = self._module, self._precision.half_dtype
        needs_engine = bool(optimizers) or "optimizer" in self._config or self._stage == 3
        with may_move(module), redirected_prints():
            snapshot = ModuleSnapshot(module)
            self._undo.callback(snapshot.undo)
            self._has_weights = True
            if self._stage == 3:
                self._partition(deferred)
            else:
                broadcast_weights(module, self._device, half_dtype if needs_engine else None, self._state)
            if needs_engine:
                self._start_engine(optimizers, snapshot)
        broadcast_together(list(module.buffers()))
        self._frozen = FrozenWeights(module, self._stage, rounded=needs_engine and half_dtype is not None)
        if self._zero is not None:
            self._state.use_masters(self._zero)
            self._user_hooks = UserHooks(self._zero, self._state)
            if self._stage == 3:
                self._zero.gather_small_parameters()  # so that hooks find them whole before the first step, too

    def _partition(self, deferred: DeferredModule) -> None:
        module = self._module
        partitioner = Partitioner(self._config, self._precision.half_dtype, self._device, self._state)
        partitioner.partition_module(module, deferred, self._control)
        leaves: list[nn.Module] = []
        if self._leaf_modules:
            leaves = self._deepspeed.utils.set_z3_leaf_modules(module, list(self._leaf_modules))
        if self._control.world_size > 1:
            self._gather_order = GatherOrder(_separately_gathered(module, leaves), self._control)

    def _start_engine(self, optimizers: Sequence[Optimizer], snapshot: ModuleSnapshot) -> None:
        module = self._module
        groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        in_optimizer = {id(parameter) for group in groups for parameter in group["params"]}
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
        with explain_compilation_errors(), changed_start():
            self._engine, *_ = self._deepspeed.initialize(
                model=root,
                optimizer=optimizers[0] if optimizers else None,
                model_parameters=list(names),
                config=copy.deepcopy(self._config),
            )
        self._undo.callback(self._engine.destroy)
        if self._stage == 3:
            self._watch = EmptyParameters(self._state.names, self._engine)
        snapshot.record_additions()
        if optimizers or self._engine.optimizer_name() is not None:
            self._prepare_training(names)

    def _prepare_training(self, names: dict[nn.Parameter, str]) -> None:
        engine, zero = self._engine, Zero(self._engine)
        self._zero = zero
        if self._precision.name == "16-mixed":
            self._precision.take_scaler(engine.optimizer.loss_scaler, "min_loss_scale" in self._config["fp16"])
        optimizer = zero.base_optimizer
        # The optimizer's own zero_grad would remove the gradients that DeepSpeed keeps with offloaded state.
        methods: dict[str, Callable[..., Any]] = {"zero_grad": self._forget_pending_gradients}
        for name in _WRITING_METHODS:
            if hasattr(optimizer, name):
                methods[name] = partial(self._call_and_update_weights, getattr(optimizer, name))
        for name, method in methods.items():
            optimizer.__dict__[name] = method
            self._undo.callback(optimizer.__dict__.pop, name)
        self.optimizers = [optimizer]
        if not is_known(optimizer):  # torch's and DeepSpeed's optimizers keep no gradients
            for handle in _copy_gradients_in_steps(optimizer):
                self._undo.callback(handle.remove)
        if engine.lr_scheduler is not None:
            self.schedulers = [engine.lr_scheduler]
            engine.lr_scheduler = None  # the loop steps the scheduler once per optimizer step
        compares = self._find_unused is None and self._stage > 1 and self._control.world_size > 1
        self._exchange = GradientExchange(names, zero, self._control, compares)
        self._undo.callback(self._exchange.close)

    # What user code reads and writes outside of the engine's calls

    def hook_context(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._user_hooks is None else self._user_hooks.context(name)

    def state(self) -> State:
        """Return the state of the module, with weights that hooks of the user may have written. No communication."""
        self._keep_writes_of_hooks()
        return self._state

    def _keep_writes_of_hooks(self) -> None:
        if self._user_hooks is not None:
            self._user_hooks.keep_writes()

    def _call_and_update_weights(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the optimizer that writes the master weights. Collective."""
        state = self.state()
        with self.zero.params_in_groups(list(enumerate(self.zero.flat_tensors()))):
            result = method(*args, **kwargs)
        state.update_compute_weights()
        return result

    # During a step: forward, backward, optimizer step and gradients

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        if self._engine is None:
            return step(*args)
        if self._frozen.weights and (lost_update := self._frozen.lost_update()) is not None:
            raise lost_update
        if self._stage == 3:
            self._keep_writes_of_hooks()  # stage 3 partitions parameters within the forward
        call = partial(step, *args)
        if torch.is_autocast_enabled():  # DeepSpeed's engine would disable CUDA's autocast
            call = partial(self._under_autocast, call)
        # The ranks compare their gather orders only in the first step.
        gather_order, self._gather_order = self._gather_order, None
        if self._watch is not None and step.__name__ not in self._watch.unused_in:
            call = partial(self._watch.run_step, call, step.__name__)
        self._within_forward = True
        try:
            if gather_order is None:
                return unwrap_step_output(self._engine(call))
            with explain_different_parameters(), gather_order.compared():
                return unwrap_step_output(self._engine(call))
        finally:
            self._within_forward = False

    def _under_autocast(self, call: Callable[[], Any]) -> Any:
        with self._precision.forward_context():
            return call()

    def backward(self, loss: torch.Tensor) -> None:
        if self._zero is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        assert self._exchange is not None
        self._has_gradients = True
        self._exchange.before_backward(loss)
        with explain_different_parameters(partial(self._exchange.differing, loss)):
            self._zero.backward(loss, bool(self._find_unused), within_forward=self._within_forward)
        self._exchange.after_backward()

    def step(self, max_norm: float | None) -> bool:
        self._has_gradients = False
        self._keep_writes_of_hooks()
        stepped = self.zero.step(max_norm)
        if self._user_hooks is not None:
            self._user_hooks.after_optimizer_step()
        assert self._exchange is not None
        self._exchange.after_step()
        if not stepped and self._precision.name == "16-mixed":
            self._precision.note_skipped_step()
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

    # End of the run: the module is restored

    @torch.no_grad()
    def restore(self) -> None:
        """Turn the module back into a plain module, with whole parameters in the master weights' dtypes. Collective."""
        state = self.state()  # with what the last hooks wrote, at every stage
        if self._stage == 3 and state.sharded_nbytes() > self._gather_limit:
            return
        lost_update = self._frozen.lost_update()
        if lost_update is not None:  # an update after the last forward
            logger.warning("%s Why: %s Fix: %s", lost_update.what, lost_update.why, lost_update.fix)
        parameters = dict(self._module.named_parameters())
        # Copies go to the host until DeepSpeed's buffers are freed: a device may not have memory for both.
        weights = {name: whole_of(one).cpu() for name, one in state.weights().items() if name in parameters}
        self._release()
        self._has_weights = False
        for name, parameter in parameters.items():
            parameter.data = weights[name].to(parameter.device)
            parameter.grad = None

    def end(self) -> None:
        """Release everything that this run acquired, also after a failure. Does not communicate."""
        if self._has_weights:
            self._leave_weights()
        self._release()
        for optimizer in self.optimizers:
            # DeepSpeed's flat tensors are freed, whoever keeps the optimizer. Another run with it is refused by name.
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [torch.empty(0)]
        self._precision.loss_scaler = None

    @torch.no_grad()
    def _leave_weights(self) -> None:
        """Leave the module without whole weights: after a failure, when ranks cannot communicate, or above the limit.

        Partitioned parameters are on the meta device afterwards.
        """
        parameters: list[Any] = list(self._module.parameters())
        if self._stage == 3:
            empty = {
                id(one): torch.empty(one.ds_shape, dtype=self._dtypes[id(one)], device="meta")
                for one in parameters
                if hasattr(one, "ds_shape")
            }
            self._release()
            replace_tensors(self._module, empty)
            return
        # Trained weights stay rounded, since each rank has only its part of the master weights.
        whole = self._state.whole_values()
        self._release()
        for parameter in parameters:
            # Copies are assigned, so that no parameter is a view of DeepSpeed's buffers.
            weights = whole.get(id(parameter), parameter.data)
            dtype = self._dtypes.get(id(parameter), parameter.dtype)  # a parameter created within the run has its own
            parameter.data = weights.to(parameter.device, dtype, copy=True)
            parameter.grad = None

    def _release(self) -> None:
        with redirected_prints():  # the engine's destroy prints
            self._undo.close()
        self._state = State(self._module)  # without DeepSpeed's tensors
        self._engine = self._zero = self._exchange = self._gather_order = self._user_hooks = self._watch = None


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
