"""FSDPStrategy: shards parameters, gradients and optimizer state over the ranks with `fully_shard`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision
from drivetrain.strategies import (
    DEFAULT_STEP_TIMEOUT,
    DEFAULT_TIMEOUT,
    ControlPlane,
    DistributedStrategy,
    Region,
    StepRunner,
    load_named_optimizer_state,
    load_tensors,
    named_optimizer_state,
)
from drivetrain_strategies._changed_forwards import Checkpointing, ForwardSwap, checkpointing_advice
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies._elementwise import is_elementwise
from drivetrain_strategies._gathering import GATHER_LIMIT, GatherOrder
from drivetrain_strategies._module_checks import refuse_accumulate_hook, refuse_device_map, refuse_sparse_embeddings
from drivetrain_strategies._step_module import StepModule, unwrap_step_output
from drivetrain_strategies.fsdp._changed_dtensor import ChangedDTensor
from drivetrain_strategies.fsdp._checks import check_arguments, check_offload, check_torch
from drivetrain_strategies.fsdp._device_mesh import Mesh, mesh_sizes
from drivetrain_strategies.fsdp._gradients import Gradients
from drivetrain_strategies.fsdp._internals import (
    Sharded,
    forget_meshes,
    remove_tensor_parallel_hooks,
    undo_sharding,
)
from drivetrain_strategies.fsdp._original_parameters import OriginalParameters
from drivetrain_strategies.fsdp._plain_step import PlainStep, mixes_meshes
from drivetrain_strategies.fsdp._plan import Plan, Wrap, make_plan
from drivetrain_strategies.fsdp._state import regions_of, shard_of, sharded_optimizer_state, sharded_state, write_value
from drivetrain_strategies.fsdp._unsplit_gradients import UnsplitGradients
from drivetrain_strategies.fsdp._user_code import UserHooks, UserSteps
from drivetrain_strategies.fsdp._weight_casts import save_no_frozen_casts

logger = logging.getLogger("drivetrain")


class FSDPStrategy(DistributedStrategy):
    """Sharded data-parallel training on `torch.distributed.fsdp.fully_shard`.

    Args:
        sharding: "full" shards parameters, gradients and optimizer state; "grad_op" keeps parameters gathered between
            forward and backward; "hybrid" shards over ``shard_size`` ranks and keeps ``replicate_size`` copies.
        wrap: selects the units, which are the modules whose parameters are gathered together. None selects the repeated
            blocks, a sequence of classes selects all modules of these classes, and ``wrap(name, module) -> bool``
            decides for each module.
        reshard_after_forward: whether units are resharded after forward. False keeps units gathered, as "grad_op" does.
        replicate_size: number of copies under "hybrid". The default is one copy per node.
        shard_size: number of ranks per copy under "hybrid". The default is the number of ranks of a node.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        activation_checkpointing: classes of modules whose activations are recomputed in backward.
        activation_policy: which results are saved rather than recomputed. "full" saves none, "save_attention" saves
            those of attention, and "save_matmuls" also those of matrix products.
        mixed_precision: a `MixedPrecisionPolicy` that replaces the one derived from the precision. Under "bf16-mixed",
            its ``param_dtype=torch.bfloat16`` halves the traffic, but also rounds the weights of norms and embeddings.
        ignored: names of parameters to replicate on every rank, with ``*`` as a wildcard.
        forward_prefetch: number of units to prefetch in forward; 0 uses torch's default.
        backward_prefetch: number of units to prefetch in backward; 0 uses torch's default.
        compile: compile each unit separately. Takes a bool or a dict of options for `torch.compile`.
        tensor_parallel: ranks over which ``configure_model`` splits layers, on ``self.device_mesh["tensor"]``. Each
            rank has only some heads, so write ``unflatten(-1, (-1, head_size))`` instead of a fixed number of heads.
        reshard_after_backward: reshard parameters after each backward within an accumulation window. False saves
            communication and needs more memory.
        find_unused_parameters: find, in every accumulation window, the parameters that no rank used. None does so only
            if a gradient is missing in the first window.
        gather_limit: size in bytes up to which the parameters are gathered after a run. Those of a larger module are
            on the meta device then.
        meta: build the layers of ``configure_model`` on the meta device and initialise them shard by shard.
        process_group_backend: backend of the process group. None selects gloo on the CPU and NCCL on CUDA.
        timeout: time after which a collective that a rank does not join fails: a timedelta, or seconds.
        step_timeout: replaces ``timeout`` after the first step; None keeps ``timeout``.

    Raises:
        ConfigurationError: arguments contradict each other. In the first window of a run with ``tensor_parallel``: a
            weight that is not split got another gradient on each rank of a group.
    """

    name: ClassVar[str] = "fsdp"
    has_hook_contexts: ClassVar[bool] = True
    collective_forward = True
    shards_parameters = True

    def __init__(
        self,
        sharding: str = "full",
        wrap: Wrap = None,
        reshard_after_forward: bool | None = None,
        replicate_size: int | None = None,
        shard_size: int | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: Sequence[type[nn.Module]] | None = None,
        activation_policy: str = "full",
        mixed_precision: MixedPrecisionPolicy | None = None,
        ignored: Sequence[str] = (),
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        compile: bool | dict[str, Any] = False,
        tensor_parallel: int = 1,
        reshard_after_backward: bool = True,
        find_unused_parameters: bool | None = None,
        gather_limit: int = GATHER_LIMIT,
        meta: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        step_timeout: timedelta | float | None = DEFAULT_STEP_TIMEOUT,
    ) -> None:
        check_torch()
        super().__init__(process_group_backend, timeout, step_timeout)
        sizes = {"replicate_size": replicate_size, "shard_size": shard_size, "tensor_parallel": tensor_parallel}
        check_arguments(sharding, reshard_after_forward, mixed_precision, sizes)
        self.sharding = sharding
        self.wrap = wrap
        self.reshard_after_forward = False if sharding == "grad_op" else reshard_after_forward
        self.replicate_size = replicate_size
        self.shard_size = shard_size
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.mixed_precision = mixed_precision
        self.ignored = tuple(ignored)
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.compile = compile
        self.tensor_parallel = tensor_parallel
        self.reshard_after_backward = reshard_after_backward
        self.find_unused_parameters = find_unused_parameters
        self.gather_limit = gather_limit
        self.meta = meta
        self._checkpointing = Checkpointing(activation_policy)
        self._mesh_sizes: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        """Clear everything that belongs to one run."""
        self.plan: Plan | None = None
        self._mesh: Mesh | None = None
        self._deferred_module = DeferredModule()
        self._originals: OriginalParameters | None = None
        self._hooks: UserHooks | None = None
        self._changed_dtensor: ChangedDTensor | None = None
        self._wrappers = ExitStack()
        """Removes what was added to the module, whose parameters are shards afterwards."""
        self._sharded: Sharded | None = None
        self._forward_swap: ForwardSwap | None = None
        self._gradients: Gradients | None = None
        self._gather_order: GatherOrder | None = None
        self._plain_steps: list[PlainStep] = []
        self._manual_optimization = False
        self._within_forward = False

    # Placement: the device mesh, and which part of the data this rank reads

    def bind(self, placement: Placement, device: torch.device, precision: Precision, store: Any = None) -> None:
        self._mesh_sizes = mesh_sizes(
            placement, self.sharding, self.replicate_size, self.shard_size, self.tensor_parallel
        )
        super().bind(placement, device, precision, store)

    def setup_environment(self) -> None:
        super().setup_environment()
        check_offload(self.cpu_offload, self.device)
        self._mesh = Mesh.of_sizes(self._mesh_sizes, self.device, self._group.timeout)

    def use_mesh(self, mesh: DeviceMesh, data_group: ProcessGroup, control: ControlPlane) -> None:
        """Shard over the mesh of a strategy that holds this one. Called in place of `setup_environment`.

        Such a strategy combines sharding with other ways to divide a run. It connects the processes, creates and
        closes the mesh and its groups, and delegates what concerns parameters, gradients, optimizers and state. The
        placement that it gives `bind` counts the data ranks alone. The ranks of ``data_group`` start with the weights
        of its first one, so the holding strategy decides what the first ranks of several groups start with.

        Args:
            mesh: the mesh over which parameters are sharded, of shape (shards,), or (copies, shards) with hybrid
                sharding. It may be a part of a larger mesh.
            data_group: the ranks of ``mesh``, in the same order.
            control: exchanges small values between the ranks that call this strategy's methods together. Their modules
                have the same units, since the ranks compare in the first forward which units they gather.

        Raises:
            ConfigurationError: the mesh has another shape than `sharding` and the sizes demand.
        """
        shape = tuple(self._mesh_sizes.values())
        if tuple(mesh.shape) != shape or self.tensor_parallel > 1:
            raise ConfigurationError(
                f"FSDPStrategy got a mesh of shape {tuple(mesh.shape)}.",
                f"sharding={self.sharding!r} over {self.world_size} data ranks needs one of shape {shape}.",
                "pass the data dimensions of the run's mesh, and leave tensor_parallel out.",
            )
        check_offload(self.cpu_offload, self.device)
        self.control = control
        self._mesh = Mesh(mesh, mesh, data_group, data_group, self.device)

    @property
    def device_mesh(self) -> Any:
        return None if self._mesh is None else self._mesh.whole

    @property
    def data_rank(self) -> int:
        # Consecutive ranks form a tensor-parallel group, whose ranks all read the same data.
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

    # Set-up of the module and its optimizers

    def module_init_context(self) -> AbstractContextManager[Any]:
        context = super().module_init_context()
        # Under tensor parallelism, configure_model splits tensors over ranks, and these tensors must have storage.
        return self._deferred_module.record_on_meta(context) if self.meta and self.tensor_parallel == 1 else context

    def hook_context(self, name: str, window_is_complete: bool) -> AbstractContextManager[None]:
        if self._hooks is None:
            return nullcontext()
        has_gradients = window_is_complete or self._within_forward or self.world_size == 1
        return self._hooks.context(name, self._within_forward, has_gradients)

    def check(self, module: nn.Module) -> None:
        refuse_device_map(module)
        super().check(module)
        refuse_sparse_embeddings(module, "gradients of sharded parameters are dense.")
        for name, parameter in module.named_parameters():
            refuse_accumulate_hook(name, parameter)

    def setup_module(self, module: nn.Module) -> StepRunner:
        mesh = self._mesh
        assert mesh is not None
        self.module = module
        has_meta_tensors = self._deferred_module.find_in(module)
        self.precision.convert_module(module)
        originals = self._originals = OriginalParameters(module)
        plan = self.plan = make_plan(module, self.wrap, self.ignored)
        if self.rank == 0:
            logger.info("%s", plan.table(mesh.data.shape[-1]))
        self._manual_optimization = not getattr(module, "automatic_optimization", True)
        if self.tensor_parallel > 1:
            self._wrappers.callback(remove_tensor_parallel_hooks, module)
        swap = self._forward_swap = ForwardSwap()  # FSDP's hooks, added later, run around the new forwards
        self._wrappers.callback(swap.undo)
        gathered_dtype = self._gathered_dtype
        if gathered_dtype is not None and gathered_dtype.itemsize == 2 and self.precision.has_forward_context:
            swap.keep_norms_in_float32(module)
        swap.checkpoint(module, self.activation_checkpointing, self._checkpointing)
        if self.compile:
            compile_options = self.compile if isinstance(self.compile, dict) else {}
            for unit in plan.units[:-1]:
                swap.put(unit.module, partial(torch.compile, **compile_options))
        self._save_no_frozen_casts()
        mesh.broadcast(plan.replicated.values())
        step_module = StepModule(module)
        self._wrappers.callback(undo_sharding, step_module)
        root = plan.shard(
            step_module,
            mesh,
            originals,
            self.reshard_after_forward,
            mp_policy=self.mixed_precision or mixed_precision_policy(self.precision),
            offload_policy=CPUOffloadPolicy(self.device.type != "cpu") if self.cpu_offload else OffloadPolicy(),
        )
        sharded = self._sharded = Sharded(root)
        if self._frees_casts:
            sharded.free_casts(self.device.type, self.precision.compute_dtype)
        if has_meta_tensors:
            sharded.give_storage(self.device)
            originals.materialize(self._deferred_module, plan.replicated, self.device, self.control)
        originals.hand_over()
        self._hooks = UserHooks(module, sharded)
        self._changed_dtensor = ChangedDTensor(sharded, self.device)
        mesh.broadcast(module.buffers())
        plan.set_prefetch(self.forward_prefetch, self.backward_prefetch)
        unsplit = None
        if self.tensor_parallel > 1:
            group = mesh.whole.get_group("tensor")
            unsplit = UnsplitGradients(dict(module.named_parameters()), group, self.control)
        replicated = list(plan.replicated.values())
        find_unused = True if self._manual_optimization else self.find_unused_parameters
        self._gradients = Gradients(
            sharded, replicated, mesh.data_group, self.control, find_unused, unsplit, self.reshard_after_backward
        )
        if replicated or mesh.is_part_of_world:  # an overflow may occur on some ranks only
            self.precision.found_inf_reducer = self._all_reduce_overflow
        if len(plan.units) > 1:
            self._gather_order = GatherOrder({unit.name: unit.module for unit in plan.units[:-1]}, self.control)
        return self._runner(UserSteps(module, sharded, originals.shards), cast(Callable[..., Any], root), sharded)

    @property
    def _gathered_dtype(self) -> torch.dtype | None:
        """The dtype in which weights are gathered; None gathers them in their own."""
        return None if self.mixed_precision is None else self.mixed_precision.param_dtype

    @property
    def _frees_casts(self) -> bool:
        """Whether autocast makes casts of gathered weights, which would outlive them."""
        precision = self.precision
        makes_casts = precision.has_forward_context and precision.compute_dtype.itemsize <= 2
        return makes_casts and not self.compile and self._gathered_dtype is None

    def _save_no_frozen_casts(self) -> None:
        if not self._frees_casts or self.reshard_after_forward is False:
            return
        assert self.plan is not None
        assert self._forward_swap is not None
        for unit in self.plan.units[:-1]:  # the root stays gathered
            save_no_frozen_casts(unit.module.modules(), self._forward_swap)

    def adopt_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        assert self._originals is not None
        self._originals.adopt(optimizers)
        for optimizer in self.optimizers:  # a parameter group on another mesh may have been added
            self._customize_step(optimizer)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        for optimizer in optimizers:
            self._customize_step(optimizer)
        return super().setup_optimizers(optimizers)

    def _customize_step(self, optimizer: Optimizer) -> None:
        """Replace the step of an optimizer that cannot step DTensors itself. A later call checks the size again."""
        step = next((step for step in self._plain_steps if step.optimizer is optimizer), None)
        if step is None:
            elementwise = is_elementwise(optimizer, self.elementwise_optimizers)
            if is_elementwise(optimizer, ()) and not mixes_meshes(optimizer):
                return
            step = PlainStep(optimizer, whole=not elementwise)
            self._plain_steps.append(step)
            if step.whole and self.rank == 0:
                step.announce()
        step.check_fits(self.gather_limit)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        if self.module is None:
            return {}
        # This method may be called on some ranks only and within a step, so it must not reshard gathered parameters.
        shards = {} if self._sharded is None else self._sharded.shards_by_gathered_id()
        return {name: shards.get(id(value), value) for name, value in self.module.named_parameters()}

    def broadcast_module(self, module: nn.Module) -> None:
        """Do nothing: parameters were broadcast before they were sharded."""

    def trainable_changed(self, module: nn.Module) -> None:
        self._require_gradients().trainable_changed(self._resharded_module())
        self._save_no_frozen_casts()

    # During a step: forward, gradients, backward and optimizer step

    def _runner(self, steps: UserSteps, root: Callable[..., Any], sharded: Sharded) -> StepRunner:
        call = steps.run

        def run(step: Callable[..., Any], *args: Any) -> Any:
            gather_order = self._gather_order
            if gather_order is not None:
                self._gather_order = None  # the ranks compare their orders only in the first step
                with gather_order.compared():
                    output = call(root, step, *args)
            else:
                output = call(root, step, *args)
            if not torch.is_grad_enabled():
                # Without a backward, nothing else reshards the parameters, and hooks must find the trainable shards.
                sharded.reshard()
            return unwrap_step_output(output)

        if not self._manual_optimization:
            return run

        def run_manual(step: Callable[..., Any], *args: Any) -> Any:
            self._within_forward = True
            try:
                return run(step, *args)
            finally:
                self._within_forward = False
                sharded.reshard()

        return run_manual

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        # A single process has nothing to exchange, so its gradients stay in the parameters' ``grad``. If some
        # micro-batches of a window return a None loss, the gradients are rescaled there.
        if enabled or self.world_size == 1:
            return nullcontext()
        return self._require_gradients().accumulating()

    def zeroed_gradients(self) -> AbstractContextManager[Any]:
        return self._require_gradients().zeroed()

    def requiring_grad_only_for(self, optimizer: Any) -> AbstractContextManager[Any]:
        parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return self._require_gradients().requiring_only(parameter_ids)

    def _require_gradients(self) -> Gradients:
        assert self._gradients is not None
        return self._gradients

    def backward(self, loss: torch.Tensor) -> None:
        sharded, gradients = self._sharded, self._require_gradients()
        assert sharded is not None
        gradients.refuse_changes_while_gathered()
        if isinstance(loss, DTensor):  # of sharded parameters alone
            loss = sharded.whole(loss)
        if self._within_forward:
            sharded.begin_backward_within_forward(loss)
        self.precision.backward(loss)
        gradients.after_backward()
        if self._within_forward:
            sharded.gather_root()

    def forget_gradients(self) -> None:
        assert self._sharded is not None
        self._sharded.forget_gradients()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        sharded = self._sharded
        assert sharded is not None
        if not self._within_forward:
            return self.precision.step(optimizer, closure)
        # The optimizer updates the shards. The closure, and the rest of the step, need the gathered parameters again.
        sharded.reshard()
        stepped = self.precision.step(optimizer, closure and partial(self._evaluate_gathered, closure))
        sharded.gather_root()
        return stepped

    def _evaluate_gathered(self, closure: Callable[[], Any]) -> Any:
        assert self._sharded is not None
        self._sharded.gather_root()
        loss = closure()
        self._sharded.reshard()
        return loss

    def _all_reduce_overflow(self, found_inf: torch.Tensor) -> None:
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX)

    # Weights and optimizer state of a checkpoint

    def model_state(self) -> dict[str, torch.Tensor]:
        return {} if self.module is None else sharded_state(self._resharded_module())

    def load_model_state(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        if self.module is not None:
            load_tensors(self._resharded_module(), state, strict, write_value)

    def optimizer_state(self, index: int = 0) -> dict[str, Any]:
        return named_optimizer_state(self._resharded_module(), self.optimizers[index])

    def load_optimizer_state(self, state: Mapping[str, Any], index: int = 0) -> None:
        module = self._resharded_module()
        state = sharded_optimizer_state(state, dict(module.named_parameters()))
        load_named_optimizer_state(module, self.optimizers[index], state)
        # Loading also adds the parameter groups that the saved optimizer had gained.
        self._customize_step(self.optimizers[index])

    shard_of = staticmethod(shard_of)

    def model_regions(self) -> dict[str, Region]:
        return regions_of(self._resharded_module())

    def _resharded_module(self) -> nn.Module:
        assert self.module is not None
        if self._sharded is not None:
            self._sharded.reshard()
        return self.module

    # Advice after an out-of-memory error

    def memory_advice(self, module: nn.Module) -> Sequence[str]:
        advice = []
        if self.sharding != "full":
            advice.append("FSDPStrategy(sharding='full')")
        if not self.cpu_offload:
            advice.append("FSDPStrategy(cpu_offload=True): parameters and optimizer state are kept in host memory")
        if not self.activation_checkpointing:
            advice.append(checkpointing_advice(type(self)))
        return advice

    # Teardown

    def restore_module(self) -> None:
        module, mesh = self.module, self._mesh
        if module is None or mesh is None or self._originals is None or self._sharded is None:
            return
        self.sync_buffers(module, mesh.common_group)
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        if nbytes <= self.gather_limit:
            self._remove_wrappers()
            self._originals.restore()

    def _remove_wrappers(self) -> None:
        self._wrappers.close()
        self._sharded = self._hooks = None

    def teardown(self) -> None:
        if self._changed_dtensor is not None:
            self._changed_dtensor.undo()
        self._remove_wrappers()
        if self._originals is not None:
            self._originals.leave_on_meta()  # those that were not restored
        for step in self._plain_steps:
            step.undo()
        self.precision.found_inf_reducer = None
        if self._mesh is not None:
            self._mesh.close()
            forget_meshes(self.device if self._mesh.is_part_of_world else None)
        self._reset()
        super().teardown()


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return the policy for a precision: parameters are gathered in their own dtype.

    Under a mixed precision, autocast rounds per operation, as under other strategies. Operations that autocast runs in
    float32 (norms, softmax, losses, embeddings) read float32 parameters. If the parameters were gathered in half
    precision, they would be rounded once more than under other strategies. Forward inputs are never cast, because the
    root's input is a batch, which includes the targets.
    """
    return MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)
