"""FSDPStrategy: parameters, gradients and optimizer state are spread over the ranks, on `fully_shard`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from drivetrain.environments import Placement
from drivetrain.precision import Precision
from drivetrain.strategies import (
    DEFAULT_STEP_TIMEOUT,
    DEFAULT_TIMEOUT,
    DistributedStrategy,
    MemoryAdvice,
    Region,
    StepRunner,
    load_named_optimizer_state,
    named_optimizer_state,
)
from drivetrain_strategies._activation_checkpointing import Checkpointing, ForwardSwap, Policy, checkpointing_advice
from drivetrain_strategies._gather_order import UnitOrder
from drivetrain_strategies._materialize import Building
from drivetrain_strategies._missing_weights import GATHER_LIMIT, are_gathered, exceeds
from drivetrain_strategies._step_module import StepModule, whole_output
from drivetrain_strategies.fsdp import _full_parameter_step as whole_step
from drivetrain_strategies.fsdp import _sharded_lbfgs as lbfgs
from drivetrain_strategies.fsdp._apply_plan import Sharding, change_forwards, gather_ahead, shard
from drivetrain_strategies.fsdp._broadcast_init import start_alike
from drivetrain_strategies.fsdp._checks import (
    check_arguments,
    check_module,
    check_offload,
    check_optimizer,
    check_param_dtype,
    check_reshard_size,
    check_torch,
)
from drivetrain_strategies.fsdp._closure_evaluation import step_with
from drivetrain_strategies.fsdp._custom_step import OwnStep
from drivetrain_strategies.fsdp._device_mesh import Layout, Mesh, find_layout, require_mesh
from drivetrain_strategies.fsdp._gradients import Gradients
from drivetrain_strategies.fsdp._internals import (
    CastsOf,
    Sharded,
    forget_meshes,
    remove_tensor_parallel_hooks,
    undo_sharding,
)
from drivetrain_strategies.fsdp._leave_sharded import gather_back, leave_shards, take_up_shards
from drivetrain_strategies.fsdp._meta_init import BareModule
from drivetrain_strategies.fsdp._mixed_optimizers import KindsApart, mixes
from drivetrain_strategies.fsdp._optimizers import Adoptions
from drivetrain_strategies.fsdp._original_parameters import Original, originals_of
from drivetrain_strategies.fsdp._plan import Plan, Wrap, make_plan
from drivetrain_strategies.fsdp._precision import mixed_precision_policy, offload_policy
from drivetrain_strategies.fsdp._state import load_state, regions_of, shard_of, sharded_optimizer_state, sharded_state
from drivetrain_strategies.fsdp._trainable_changes import adapt, refuse_while_whole
from drivetrain_strategies.fsdp._unused_parameters import UnusedParameters
from drivetrain_strategies.fsdp._weight_casts import WeightCasts

logger = logging.getLogger("drivetrain")

_SAID: set[str] = set()
"""The plans that this process has logged."""


class FSDPStrategy(DistributedStrategy):
    """Sharded data-parallel training on `torch.distributed.fsdp.fully_shard`.

    Args:
        sharding: "full" spreads parameters, gradients and optimizer state; "grad_op" keeps parameters gathered between
            forward and backward; "hybrid" spreads over ``shard_size`` ranks and keeps ``replicate_size`` copies.
        wrap: what is gathered together: None finds the repeated blocks; classes; or ``wrap(name, module) -> bool``.
        reshard_after_forward: of the units; False as "grad_op"; an int keeps larger parts, spread over so many ranks.
        replicate_size: copies, for "hybrid"; by default one a node.
        shard_size: ranks of one copy, for "hybrid"; by default those of a node.
        cpu_offload: keep shards, gradients and optimizer state in the host's memory; True, or torch's policy.
        activation_checkpointing: classes of modules that compute their activations again in backward.
        activation_policy: "full", "save_matmuls", "save_attention", or a function for selective checkpointing.
        mixed_precision: a `MixedPrecisionPolicy` instead of what the precision's name says.
        ignored: names of parameters (``*`` as a wildcard) and classes of modules that stay whole on every rank.
        forward_prefetch: units gathered ahead in forward; 0 leaves it to torch.
        backward_prefetch: units gathered ahead in backward; 0 leaves it to torch.
        compile: compile each unit by itself; True, or a dict of options for `torch.compile`.
        tensor_parallel: over how many ranks ``configure_model`` splits layers, on ``self.device_mesh["tensor"]``.
        reshard_after_backward: within an accumulation window; False spares gathering for memory.
        find_unused_parameters: count in every window which parameters no rank used; None decides in the first.
        gather_limit: bytes of parameters up to which the module is whole again after a run.
        meta: build what ``configure_model`` builds without storage, and initialise it shard by shard.
        process_group_backend: None takes gloo on the CPU and NCCL on CUDA.
        timeout: after which a collective that a rank does not join fails.
        step_timeout: the same, once a step has been made; None leaves it at ``timeout``.
        param_dtype: in which parameters are gathered: under "bf16-mixed" ``torch.bfloat16``, for half the traffic and
            weights that are rounded for norms and embeddings, too; None gathers them as they are kept, in float32.

    Raises:
        ConfigurationError: arguments that contradict each other.
    """

    name: ClassVar[str] = "fsdp"
    collective_forward = True
    shards_parameters = True

    def __init__(
        self,
        sharding: str = "full",
        wrap: Wrap = None,
        reshard_after_forward: bool | int | None = None,
        replicate_size: int | None = None,
        shard_size: int | None = None,
        cpu_offload: bool | OffloadPolicy = False,
        activation_checkpointing: Sequence[type[nn.Module]] | None = None,
        activation_policy: Policy = "full",
        mixed_precision: MixedPrecisionPolicy | None = None,
        ignored: Sequence[str | type[nn.Module]] = (),
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        compile: bool | dict[str, Any] = False,
        tensor_parallel: int = 1,
        reshard_after_backward: bool = True,
        find_unused_parameters: bool | None = None,
        gather_limit: int = GATHER_LIMIT,
        meta: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        step_timeout: timedelta | None = DEFAULT_STEP_TIMEOUT,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        check_torch()
        super().__init__(process_group_backend, timeout, step_timeout)
        check_arguments(sharding, reshard_after_forward, replicate_size, shard_size, tensor_parallel)
        check_param_dtype(param_dtype, mixed_precision)
        self.sharding = sharding
        self.wrap = wrap
        self.reshard_after_forward = False if sharding == "grad_op" else reshard_after_forward
        self.replicate_size = replicate_size
        self.shard_size = shard_size
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.mixed_precision = mixed_precision
        self.param_dtype = param_dtype
        self.ignored = tuple(ignored)
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.compile = compile
        self.tensor_parallel = tensor_parallel
        self.reshard_after_backward = reshard_after_backward
        self.find_unused_parameters = find_unused_parameters
        self.gather_limit = gather_limit
        self.meta = meta
        self._checkpointing = Checkpointing(activation_policy)
        self._layout: Layout | None = None
        self._reset()

    def _reset(self) -> None:
        """Hold nothing of a run."""
        self.plan: Plan | None = None
        self._mesh: Mesh | None = None
        self._building = Building()
        self._originals: list[Original] = []
        self._root: StepModule | None = None
        self._sharded: Sharded | None = None
        self._swap: ForwardSwap | None = None
        self._gradients: Gradients | None = None
        self._order: UnitOrder | None = None
        self._adoptions: Adoptions | None = None
        self._own_steps: list[OwnStep] = []
        self._manual = False
        self._inside = False

    # Where we are

    def bind(self, placement: Placement, device: torch.device, precision: Precision, store: Any = None) -> None:
        self._layout = find_layout(placement, self.sharding, self.replicate_size, self.shard_size, self.tensor_parallel)
        check_reshard_size(self.reshard_after_forward, self._layout.shard)
        check_param_dtype(self.param_dtype, self.mixed_precision, precision)
        super().bind(placement, device, precision, store)

    def setup_environment(self) -> None:
        super().setup_environment()
        check_offload(self.cpu_offload, self.device)
        assert self._layout is not None
        self._mesh = Mesh(self._layout, self.device, self._group.timeout)

    @property
    def device_mesh(self) -> Any:
        return None if self._mesh is None else self._mesh.whole

    @property
    def data_rank(self) -> int:
        # Tensor-parallel ranks are neighbours, and read the same data.
        return self.rank // self.tensor_parallel

    @property
    def data_world_size(self) -> int:
        return self.world_size // self.tensor_parallel

    @property
    def is_data_leader(self) -> bool:
        return self.rank % self.tensor_parallel == 0

    @property
    def data_group(self) -> Any:
        return None if self._mesh is None or self.tensor_parallel == 1 else self._mesh.data_group

    # Set-up

    def module_init_context(self) -> AbstractContextManager[Any]:
        context = super().module_init_context()
        # Under tensor parallelism configure_model hands parts of tensors to other ranks, for which there must be some.
        return self._building.without_storage(context) if self.meta and self.tensor_parallel == 1 else context

    def check(self, module: nn.Module) -> None:
        check_module(module, self.world_size, self.tensor_parallel)

    def setup_module(self, module: nn.Module) -> StepRunner:
        mesh = require_mesh(self._mesh)
        self.module = module
        take_up_shards(module, mesh.whole)
        bare = BareModule(module, self._building.take())
        self.precision.convert_module(module)
        self._originals = originals_of(module)
        plan = self.plan = make_plan(module, self.wrap, self.ignored)
        table = plan.table(mesh.layout.shard)
        if self.rank == 0 and table not in _SAID:  # evaluations of the same module have the same plan
            _SAID.add(table)
            logger.info("%s", table)
        self._manual = not getattr(module, "automatic_optimization", True)
        compile_options = (self.compile if isinstance(self.compile, dict) else {}) if self.compile else None
        self._swap = change_forwards(
            module,
            plan,
            self.activation_checkpointing,
            self._checkpointing,
            compile_options,
            self.param_dtype is not None,
        )
        start_alike(plan.whole.values(), self.device)
        self._root = StepModule(module)
        root = shard(self._root, plan, mesh, self._how(), self._originals)
        sharded = self._sharded = Sharded(root, self._weight_casts())
        bare.initialise(self._originals, sharded, plan, self.device, self.control)
        start_alike(module.buffers(), self.device)
        for other in sharded.meshes():
            mesh.also(other)
        gather_ahead(plan, self.forward_prefetch, self.backward_prefetch)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        counts = True if self._manual else self.find_unused_parameters
        named = {id(one): names[id(one.sharded_param)] for one in sharded.parameters}
        unused = UnusedParameters(counts, named, self.control)
        whole = list(plan.whole.values())
        self._gradients = Gradients(sharded, whole, mesh.data_group, unused, self.reshard_after_backward)
        if whole or self.tensor_parallel > 1:  # an overflow does not spread from one mesh, or from none, to the others
            self.precision.found_inf_reducer = self._spread_overflow
        if len(plan.units) > 1:
            self._order = UnitOrder({unit.name: unit.module for unit in plan.units[:-1]}, self.control)
        self._adoptions = Adoptions(self._originals)
        return self._runner(cast(Callable[..., Any], root))

    def _how(self) -> Sharding:
        return Sharding(
            self.reshard_after_forward,
            mixed_precision_policy(self.precision, self.mixed_precision, self.param_dtype),
            offload_policy(self.cpu_offload, self.device),
            self.device,
        )

    def _weight_casts(self) -> CastsOf | None:
        """What keeps track of the casts that autocast keeps of gathered weights; None where it makes or keeps none."""
        precision, device_type = self.precision, self.device.type
        dtype = precision.compute_dtype
        if self.compile or not precision.has_forward_context or dtype.itemsize > 2:
            return None
        if self._how().precision.param_dtype is not None:
            return None
        # Under a policy that chooses operations, modules that compute again cast anew each time.
        casting_anew = tuple(self.activation_checkpointing or ()) if self._checkpointing.casts_anew else ()

        def casts_of(modules: Sequence[nn.Module], parameters: Sequence[Any]) -> WeightCasts | None:
            if any(isinstance(module, casting_anew) for module in modules):
                return None
            return WeightCasts(parameters, device_type, dtype)

        return casts_of

    def adopt_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        assert self._adoptions is not None
        self._adoptions.take(optimizers)
        for optimizer in self.optimizers:  # groups may have been added
            self._step_by_itself(optimizer)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        for optimizer in optimizers:
            check_optimizer(optimizer)
            lbfgs.take(optimizer)
            self._step_by_itself(optimizer)
        return super().setup_optimizers(optimizers)

    def _step_by_itself(self, optimizer: Optimizer) -> None:
        """Replace the optimizer's step, unless that is done, where its own cannot be taken."""
        if any(one.optimizer is optimizer for one in self._own_steps):
            return
        if isinstance(optimizer, whole_step.KINDS):
            self._own_steps.append(whole_step.WholeStep(optimizer))
        elif mixes(optimizer):
            self._own_steps.append(KindsApart(optimizer))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        if self.module is None:
            return {}
        # Asked within a step too, by some ranks only: nothing is dropped that the others still have whole.
        shards = {} if self._sharded is None else self._sharded.shards_of_wholes()
        return {name: shards.get(id(one), one) for name, one in self.module.named_parameters()}

    def broadcast_module(self, module: nn.Module) -> None:
        """They were given out before they were sharded."""

    def trainable_changed(self, module: nn.Module) -> None:
        assert self._sharded is not None
        adapt(self._resharded(), self._sharded, self._held_gradients())

    # In the loop

    def _runner(self, root: Callable[..., Any]) -> StepRunner:
        sharded = self._sharded
        assert sharded is not None

        def run(step: Callable[..., Any], *args: Any) -> Any:
            order = self._order
            if order is not None:
                self._order = None  # in the first step only
                with order.compared():
                    output = root(step, *args)
            else:
                output = root(step, *args)
            if not torch.is_grad_enabled():
                # No backward will come and drop them, and hooks must find the parameters that train.
                sharded.reshard()
            return whole_output(output)

        if not self._manual:
            return run

        def run_manual(step: Callable[..., Any], *args: Any) -> Any:
            self._inside = True
            try:
                return run(step, *args)
            finally:
                self._inside = False
                sharded.reshard()

        return run_manual

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        # One process has nothing to say, and its gradients are best where a loss that is None can rescale them.
        if enabled or self.world_size == 1:
            return nullcontext()
        return self._held_gradients().accumulating()

    def without_gradient(self) -> AbstractContextManager[Any]:
        return self._held_gradients().silenced()

    def training_only(self, optimizer: Any) -> AbstractContextManager[Any]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return self._held_gradients().only_of(held)

    def _held_gradients(self) -> Gradients:
        assert self._gradients is not None
        return self._gradients

    def backward(self, loss: torch.Tensor) -> None:
        sharded = self._sharded
        assert sharded is not None
        refuse_while_whole(sharded)
        if self._inside:
            sharded.begin_backward_within_forward(loss)
        self.precision.backward(loss)
        self._held_gradients().after_backward()
        if self._inside:
            sharded.gather_root()

    def forget_gradients(self) -> None:
        assert self._sharded is not None
        self._sharded.forget_gradients()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        sharded = self._sharded
        assert sharded is not None
        if closure is not None:
            return step_with(closure, partial(self.precision.step, optimizer), sharded, self._inside)
        if not self._inside:
            return self.precision.step(optimizer)
        # Shards train; what the rest of the step computes with is gathered from them anew.
        sharded.reshard()
        stepped = self.precision.step(optimizer)
        sharded.gather_root()
        return stepped

    def _spread_overflow(self, found: torch.Tensor) -> None:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)

    # State

    def model_state(self) -> dict[str, torch.Tensor]:
        return {} if self.module is None else sharded_state(self._resharded())

    def load_model_state(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        if self.module is not None:
            load_state(self._resharded(), state, strict)

    def optimizer_state(self, index: int = 0) -> dict[str, Any]:
        return named_optimizer_state(self._resharded(), self.optimizers[index])

    def load_optimizer_state(self, state: Mapping[str, Any], index: int = 0) -> None:
        module = self._resharded()
        state = sharded_optimizer_state(state, dict(module.named_parameters()))
        load_named_optimizer_state(module, self.optimizers[index], state)
        self._step_by_itself(self.optimizers[index])  # groups that were added come back

    shard_of = staticmethod(shard_of)

    def model_regions(self) -> dict[str, Region]:
        return regions_of(self._resharded())

    def _resharded(self) -> nn.Module:
        assert self.module is not None
        if self._sharded is not None:
            self._sharded.reshard()
        return self.module

    # Where memory lacks

    def memory_advice(self, module: nn.Module) -> Sequence[MemoryAdvice]:
        advice = []
        if self.sharding != "full":
            advice.append(MemoryAdvice("state", "FSDPStrategy(sharding='full')"))
        if not self.cpu_offload:
            text = "FSDPStrategy(cpu_offload=True): parameters and optimizer state wait in the host's memory"
            advice.append(MemoryAdvice("state", text))
        if not self.activation_checkpointing:
            advice.append(checkpointing_advice(type(self)))
        return advice

    # The end

    def leaves_shards(self, module: nn.Module) -> bool:
        return exceeds(module, self.gather_limit)

    def restore_module(self) -> None:
        module = self.module
        if module is None or self._sharded is None:
            return
        self.sync_buffers(module)
        nbytes = sum(one.current.numel() * one.current.element_size() for one in self._originals)
        if not are_gathered(nbytes, self.gather_limit, "FSDPStrategy", tell=self.rank == 0):
            return
        self._undo()
        gather_back(self._originals)
        self._originals = []
        if self._adoptions is not None:
            self._adoptions.give_back()

    def _undo(self) -> None:
        """Take off the module everything that was put on it; it then holds shards."""
        if self._swap is not None:
            self._swap.undo()
        if self._root is not None:
            undo_sharding(self._root)
        if self.tensor_parallel > 1 and self.module is not None:
            remove_tensor_parallel_hooks(self.module)
        self._swap = self._root = self._sharded = None

    def teardown(self) -> None:
        self._undo()
        if self.module is not None and self._originals:
            leave_shards(self.module, self._originals, self.gather_limit, tell=self.rank == 0)
        for optimizer in self.optimizers:
            lbfgs.give_back(optimizer)
        for step in self._own_steps:
            step.undo()
        self.precision.found_inf_reducer = None
        if self._mesh is not None:
            self._mesh.close()
            forget_meshes(self.device if self.tensor_parallel > 1 else None)
        self._reset()
        super().teardown()
