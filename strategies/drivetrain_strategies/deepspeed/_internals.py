"""All uses of private names of DeepSpeed's engine.

`Zero` wraps two optimizer classes of DeepSpeed: one of ZeRO 1 and 2, and one of ZeRO 3. Each keeps float32 master
weights in flat tensors, which the torch optimizer steps. A rank has the master weights of its part of every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import Span

_EXCHANGE_OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
"""The method with which stage 3 exchanges a bucket of gradients."""

_END_OF_WINDOW = "finalize_gradient_accumulation_boundary"
"""The method with which stages 2 and 3 finish the gradients of a window."""


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of a parameter's most exact values: its master weights, or weights that are not trained.

    Attributes:
        parameter: the parameter.
        tensor: contains the values. The flat tensor of master weights is empty while it is swapped out to a drive; see
            `Zero.swapped_in`.
        span: the elements of the parameter that this rank holds. None if ``tensor`` is the whole parameter.
        offset: position of the first of them in ``tensor``.
        flat_index: index of the flat tensor of master weights; None for other weights.
        is_swapped: whether ``tensor`` is swapped out to a drive between steps, so that values must be copied.
    """

    parameter: nn.Parameter
    tensor: torch.Tensor
    span: Span | None
    offset: int = 0
    flat_index: int | None = None
    is_swapped: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(getattr(self.parameter, "ds_shape", self.parameter.shape))

    @property
    def nbytes(self) -> int:
        """Size of the whole parameter in the dtype of these values."""
        return math.prod(self.shape) * self.tensor.element_size()

    @property
    def local(self) -> torch.Tensor:
        """The values that this rank holds, of shape (n,), or of the parameter's shape."""
        return self.cut_from(self.tensor)

    def cut_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part's elements of a tensor with the shape of `tensor`, such as state of the optimizer."""
        return tensor.detach() if self.span is None else tensor.detach().narrow(0, self.offset, self.span.numel)


def on_drive(parameter: Any) -> bool:
    """Return whether stage 3 keeps this rank's part of a parameter on a drive."""
    return bool(parameter.ds_tensor.final_location == "nvme")


def write_part(parameter: Any, part: torch.Tensor, span: Span) -> None:
    """Write this rank's part of a parameter into its stage 3 partition. Collective."""
    if not on_drive(parameter):
        parameter.ds_tensor[: span.stop - span.start].copy_(part)
        return
    parameter.all_gather()
    parameter.data.view(-1)[span.start : span.stop].copy_(part)
    parameter.partition(has_been_updated=True)


def partitioned_span(parameter: Any) -> Span:
    """Return the elements that this rank's partition of a parameter of stage 3 holds. The last may have fewer."""
    size, numel = parameter.ds_tensor.ds_numel, parameter.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, numel)
    return Span(start, min(start + size, numel))


def is_gathered(parameter: Any) -> bool:
    """Return whether a parameter of stage 3 holds the whole values now."""
    return bool(parameter.numel() == parameter.ds_numel)


@contextmanager
def gathered_for_use(engine: Any, parameters: Sequence[Any]) -> Iterator[None]:
    """Gather parameters of stage 3 for an operator within the engine's forward. Collective if they are partitioned.

    If autograd records the operator, the parameters stay gathered for this forward and for its backward, and later ones
    gather them when they begin. DeepSpeed does the same for a parameter that a layer reads from another layer.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    keeps = torch.is_grad_enabled()
    partitioned = [parameter for parameter in parameters if not is_gathered(parameter)]
    coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
    if coordinator.is_complete_trace() and (keeps or any(one.ds_status.name == "INFLIGHT" for one in partitioned)):
        # The order of gathers that DeepSpeed recorded lacks this use. Gathers under way are waited for and discarded.
        coordinator._invalidate_trace()
    for parameter in parameters:
        if keeps:
            register_external_parameter(FWD_MODULE_STACK[-1], parameter)
        parameter.all_gather()
    yield
    if not keeps:
        for parameter in partitioned:
            parameter.partition()


@contextmanager
def changed_start() -> Iterator[None]:
    """Change two steps of the engine's start within this context.

    The engine does not broadcast weights: those of the ranks are equal already, and its broadcast fails for scalars. At
    stage 1 in bf16, it uses the optimizer class of the other precisions and of stage 2, not one with other internals.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    changes = {"_broadcast_model": lambda *_: None, "_do_optimizer_sanity_check": lambda *_: ZERO_OPTIMIZATION}
    before = {name: getattr(DeepSpeedEngine, name) for name in changes}
    try:
        for name, change in changes.items():
            setattr(DeepSpeedEngine, name, change)
        yield
    finally:
        for name, method in before.items():
            setattr(DeepSpeedEngine, name, method)


class Zero:
    """DeepSpeed's engine with an optimizer.

    Args:
        engine: the engine that `deepspeed.initialize` returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.stage = int(engine.zero_optimization_stage())
        self._clip = self.optimizer.clip_grad
        self._reduced = False
        self._norm: Any = None  # that of the window, as DeepSpeed computes it, once it is known
        self._defer_reduction()
        if self.stage == 2 and self.optimizer.reduce_scatter and self.optimizer.gradient_average:
            self._divide_in_communication_dtype()

    def _divide_in_communication_dtype(self) -> None:
        """Divide gradients by the number of ranks in the communication dtype.

        By default, stage 2 divides gradients earlier, in half precision. Unless the number of ranks is a power of two,
        that division adds a rounding error.
        """
        optimizer, exchange = self.optimizer, self.optimizer.allreduce_bucket
        optimizer.gradient_average = False  # stage 2 then does not divide before the exchange

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor:
            optimizer.gradient_average = True
            try:
                reduced: torch.Tensor = exchange(*args, **{**kwargs, "divide": True})
            finally:
                optimizer.gradient_average = False
            return reduced

        optimizer.allreduce_bucket = divided

    @property
    def offloads(self) -> bool:
        return bool(
            getattr(self.optimizer, "cpu_offload", False) or getattr(self.optimizer, "offload_optimizer", False)
        )

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that DeepSpeed steps."""
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer

    # Master weights of this rank, and the parameters that DeepSpeed computes from them

    def flat_tensors(self) -> list[torch.Tensor]:
        """Return the flat tensors that the optimizer steps."""
        name = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self.optimizer, name))

    def group_of_flat_tensor(self, number: int) -> int:
        """Return the index of the optimizer's parameter group that a flat tensor belongs to."""
        return int(self.optimizer.sub_group_to_group_id[number]) if self.stage == 3 else number

    @contextmanager
    def params_in_groups(self, params: Sequence[tuple[int, torch.Tensor]]) -> Iterator[None]:
        """Let the groups of the optimizer hold ``params`` within this context. Stage 3 leaves them empty between steps.

        Args:
            params: tensors, each after the index of the flat tensor whose group it belongs to.
        """
        groups = self.base_optimizer.param_groups
        before = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        for number, param in params:
            groups[self.group_of_flat_tensor(number)]["params"].append(param)
        try:
            yield
        finally:
            for group, held in zip(groups, before, strict=True):
                group["params"] = held

    def parts(self) -> Iterator[Part]:
        """Yield the `Part` of every trainable parameter. It is empty if this rank holds no element."""
        optimizer, flats = self.optimizer, self.flat_tensors()
        if self.stage == 3:
            for parameter in chain(*optimizer.fp16_groups):
                number, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                span, is_swapped = partitioned_span(parameter), self.is_swapped(number)
                yield Part(parameter, flats[number], span, offset, number, is_swapped)
            return
        for number, group in enumerate(optimizer.bit16_groups):
            for parameter in group:
                mapping = parameter._hp_mapping
                if mapping is None:
                    yield Part(parameter, flats[number], Span(0, 0), 0, number)
                    continue
                start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                span = Span(start, start + numel)
                yield Part(parameter, flats[number], span, mapping.hp_fragment_address.start, number)

    def is_swapped(self, number: int) -> bool:
        """Return whether the flat tensor with this index is swapped out to a drive between steps."""
        return self.stage == 3 and bool(self.optimizer._swappable_optimizer_subgroup(number))

    @contextmanager
    def swapped_in(self, number: int | None, write: bool = False) -> Iterator[None]:
        """Keep a flat tensor and its optimizer state in memory within this context.

        Only one flat tensor may be swapped in at a time, since DeepSpeed has few buffers.

        Args:
            number: index of the flat tensor; None does nothing.
            write: whether changes are written back to the drive.
        """
        optimizer = self.optimizer
        if number is None or not self.is_swapped(number) or self.flat_tensors()[number].numel():
            yield
            return
        optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if write:
                optimizer._optimizer_states_and_gradient_swap_out(number)
            else:
                optimizer._release_swap_buffers(number)

    def update_compute_weights(self) -> None:
        """Update the parameters that the module computes with, on all ranks, from the master weights. Collective."""
        optimizer = self.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for number in range(len(optimizer.fp16_groups)):
            with self.swapped_in(number):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        self.gather_small_parameters()

    def gather_small_parameters(self) -> None:
        """Gather the small parameters that stage 3 keeps whole between steps. Collective."""
        small = self.optimizer.persistent_parameters
        if small:
            small[0].all_gather(small)

    def relink_state(self) -> None:
        """Make DeepSpeed use the optimizer's state after the state was replaced."""
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    # Accumulation window: backward, exchange, norm and step

    def backward(self, loss: torch.Tensor, in_order: bool = False, within_forward: bool = False) -> None:
        """Run backward. At stages 2 and 3, the gradients are also exchanged and accumulated. Collective.

        Args:
            loss: scalar of shape ().
            in_order: whether stage 2 exchanges gradients after backward, in the parameters' order, with zeros for
                missing gradients.
            within_forward: whether the engine's forward is still running. The engine is then not yet prepared for a
                backward.
        """
        if within_forward:
            self.optimizer.clear_backward_seen_flag()
            self.engine._backward_prologue()
        if in_order and self.stage == 2:
            self._backward_in_order(loss)
        else:
            self.engine.backward(loss)

    def _backward_in_order(self, loss: torch.Tensor) -> None:
        engine, optimizer = self.engine, self.optimizer
        engine.inside_no_sync_ctxt = optimizer._coalesce_grad_reduction = True
        try:
            engine.backward(loss)
        finally:
            engine.inside_no_sync_ctxt = optimizer._coalesce_grad_reduction = False
        optimizer.setup_buckets()
        for number, group in enumerate(optimizer.bit16_groups):
            for parameter in group:
                _fill_missing_gradient(parameter, optimizer)
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, number)
        optimizer.overlapping_partition_gradients_reduce_epilogue()

    def reduce(self) -> None:
        """Exchange the accumulated gradients. Later calls in the same window have no effect. Collective."""
        if self._reduced:
            return
        self._reduced = True
        engine, optimizer = self.engine, self.optimizer
        if self.stage == 3 and optimizer.swap_optimizer:
            # Missing gradients must be written to the drive as zeros, since the step reads the gradients of all
            # parameters.
            optimizer._offload_boundary_param_ids.update(one.ds_id for one in chain(*optimizer.fp16_groups))
        if self.stage == 1:
            for parameter in chain(*optimizer.bit16_groups):
                _fill_missing_gradient(parameter, optimizer)
            engine._running_engine_step = True
        self._exchange()

    def norm(self) -> torch.Tensor:
        """Return the global norm of the window's gradients, of shape (). Collective.

        The norm is inf if a gradient is not finite.
        """
        self.reduce()
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm: torch.Tensor = combine_grad_norm_groups(self.optimizer._get_norm_groups())
        else:
            norm = self.optimizer.scaled_global_norm()
        norm = norm / self.loss_scale
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm).float()

    def step(self, max_norm: float | None) -> bool:
        """Clip gradients, step, and start a new window. Return False if DeepSpeed skipped the step. Collective.

        Args:
            max_norm: clipping threshold; None uses the config's threshold.
        """
        self.reduce()
        self.optimizer.clip_grad = self._clip if max_norm is None else max_norm
        try:
            self.engine.step()
        finally:
            self.optimizer.clip_grad = self._clip
            self._open_window()
        stepped = bool(self.engine.was_step_applied())
        if not stepped:
            self.forget()  # DeepSpeed would add a skipped step's offloaded gradients to those of the next window
        return stepped

    def forget(self) -> None:
        """Drop the window's accumulated gradients."""
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        if self.stage == 3:
            optimizer._pre_step()
        else:
            optimizer.micro_step_id = -1
            for store in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for key in store:
                    store[key] = None
            if self.offloads:
                optimizer._offload_accumulated_param_ids = set()
        self._open_window()

    def before_each_exchange(self, call: Callable[[list[nn.Parameter]], None]) -> None:
        """Let stages 2 and 3 call ``call`` before they exchange a bucket, with its parameters in their order there."""
        optimizer = self.optimizer
        name = _EXCHANGE_OF_STAGE_3 if self.stage == 3 else "reduce_ipg_grads"
        exchange = getattr(optimizer, name)

        def watched(comm_dtype: torch.dtype | None = None) -> None:
            for dtype, bucket in optimizer.ipg_buckets.items():
                if bucket.params and comm_dtype in (None, dtype):
                    call(self._parameters_in(bucket))
            exchange(comm_dtype)

        setattr(optimizer, name, watched)

    def _parameters_in(self, bucket: Any) -> list[nn.Parameter]:
        if self.stage == 3:  # which sorts them before the exchange
            return sorted(bucket.params, key=attrgetter("ds_id"))
        groups = self.optimizer.bit16_groups
        return [groups[group][index] for group, index, _ in bucket.params]

    @property
    def loss_scale(self) -> float:
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    def _defer_reduction(self) -> None:
        """Move the reduction at the start of ``engine.step`` to `reduce`, and let the step reuse the computed norm."""
        engine, optimizer = self.engine, self.optimizer
        owner, exchange = (engine, "allreduce_gradients") if self.stage == 1 else (optimizer, _END_OF_WINDOW)
        self._exchange = getattr(owner, exchange)
        setattr(owner, exchange, lambda *_: None)
        if self.stage == 3 and optimizer.swap_optimizer:
            _keep_unaligned_in_memory(optimizer.optimizer_swapper)
        name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        compute = getattr(optimizer, name)

        def compute_once() -> Any:
            if self._norm is None:
                self._norm = compute()
            return self._norm

        setattr(optimizer, name, compute_once)

    def _open_window(self) -> None:
        self._reduced, self._norm = False, None
        self.engine._running_engine_step = False
        # A parameter without a gradient in the next window must not reuse its gradient of this window.
        if self.stage == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.offloads:
            self.optimizer.reset_cpu_buffers()
            for flat in self.flat_tensors():
                if flat.grad is not None:
                    flat.grad.zero_()


def _keep_unaligned_in_memory(swapper: Any) -> None:
    """Keep gradients that are not aligned to a block in memory, since reading them from a drive silently fails."""
    swap_out = swapper.swap_out_gradients

    def keep(parameter: torch.Tensor, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
        gradients = list(zip(gradient_offsets, gradient_tensors, strict=True))
        aligned_gradients = [gradient for gradient in gradients if gradient[0] % swapper.numel_alignment == 0]
        info = swapper._get_param_swap_info(parameter)
        if info is not None:
            info.unswapped_gradients.update(gradient for gradient in gradients if gradient[0] % swapper.numel_alignment)
        swap_out(parameter, [offset for offset, _ in aligned_gradients], [tensor for _, tensor in aligned_gradients])

    swapper.swap_out_gradients = keep


def _fill_missing_gradient(parameter: nn.Parameter, optimizer: Any) -> None:
    """Give a parameter without a gradient on this rank a gradient of zeros, since other ranks may exchange one."""
    if optimizer.get_gradient_for_reduction(parameter) is not None:
        return
    zeros = torch.zeros_like(parameter, dtype=optimizer._gradient_reduction_buffer_dtype())
    if optimizer.use_grad_accum_attribute:
        parameter.grad_accum = zeros  # type: ignore[attr-defined]
    else:
        parameter.grad = zeros
