"""What of DeepSpeed's engine is reached beside its public methods. The one place that knows its insides.

Three classes of DeepSpeed's stand behind one face here: ZeRO 1 and 2, the bf16 optimizer that it takes at stage 1, and
ZeRO 3. Each keeps float32 masters of this rank's part of every parameter in flat tensors, which are what the torch
optimizer steps, and of which it keeps its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import Span


@dataclass(frozen=True, slots=True)
class Fragment:
    """This rank's master of a parameter.

    Attributes:
        parameter: whose.
        number: of the tensor that the optimizer steps.
        flat: that tensor. Empty while it is on a drive: see `Zero.at_hand`.
        offset: where in it the master begins.
        span: which elements of the parameter these are.
    """

    parameter: nn.Parameter
    number: int
    flat: torch.Tensor
    offset: int
    span: Span

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the flat's shape that belongs to the parameter."""
        return flat.detach().narrow(0, self.offset, self.span.stop - self.span.start)

    @property
    def master(self) -> torch.Tensor:
        return self.of(self.flat)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(getattr(self.parameter, "ds_shape", self.parameter.shape))


def on_drive(parameter: Any) -> bool:
    """Whether stage 3 keeps this rank's part of a parameter on a drive."""
    return bool(parameter.ds_tensor.final_location == "nvme")


def write_part(parameter: Any, part: torch.Tensor, span: Span) -> None:
    """Write this rank's part of a parameter to where stage 3 keeps it. Collective."""
    if not on_drive(parameter):
        parameter.ds_tensor[: span.stop - span.start].copy_(part)
        return
    parameter.all_gather()
    parameter.data.view(-1)[span.start : span.stop].copy_(part)
    parameter.partition(has_been_updated=True)


@contextmanager
def weights_shared_already() -> Iterator[None]:
    """Within it a starting engine gives out no weights: they are alike, and single numbers it cannot give out."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    before = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda self: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = before


def _is_bf16_optimizer(optimizer: Any) -> bool:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # takes seconds

    return isinstance(optimizer, BF16_Optimizer)


class Zero:
    """DeepSpeed's engine with an optimizer.

    Args:
        engine: as `deepspeed.initialize` returned it.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.stage = int(engine.zero_optimization_stage())
        self._bf16 = _is_bf16_optimizer(self.optimizer)
        self._clip = self.optimizer.clip_grad
        self._reduced = False
        self._norm: torch.Tensor | None = None
        self._put_aside()
        if self.stage == 2 and self.optimizer.reduce_scatter and self.optimizer.gradient_average:
            self._divide_as_they_travel()

    def _divide_as_they_travel(self) -> None:
        """Have gradients divided by the number of ranks in the dtype in which they are exchanged.

        Stage 2 divides them before, in half precision, by which they are rounded once more where the number of ranks is
        no power of two.
        """
        optimizer, exchange = self.optimizer, self.optimizer.allreduce_bucket
        optimizer.gradient_average = False  # whole buckets stay as they are

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
        """The torch optimizer that is stepped."""
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer

    # What this rank holds

    def flats(self) -> list[torch.Tensor]:
        """The tensors that the optimizer steps."""
        optimizer = self.optimizer
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.fp32_groups_flat_partition if self._bf16 else optimizer.single_partition_of_fp32_groups)

    def group_of_flat(self, number: int) -> int:
        """The optimizer's parameter group that a flat belongs to."""
        return int(self.optimizer.sub_group_to_group_id[number]) if self.stage == 3 else number

    def fragments(self) -> Iterator[Fragment]:
        """This rank's master of every parameter that trains; an empty one where it has none."""
        optimizer, flats = self.optimizer, self.flats()
        if self.stage == 3:
            for group in optimizer.fp16_groups:
                for parameter in group:
                    number, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
                    stop = min(start + size, parameter.ds_numel)
                    yield Fragment(parameter, number, flats[number], offset, Span(start, stop))
            return
        for number, group in enumerate(self._whole_groups()):
            for parameter in group:
                mapping, flat = parameter._hp_mapping, flats[number]
                if mapping is None:
                    yield Fragment(parameter, number, flat, 0, Span(0, 0))
                    continue
                start = mapping.lp_fragment_address.start
                span = Span(start, start + mapping.lp_fragment_address.numel)
                yield Fragment(parameter, number, flat, mapping.hp_fragment_address.start, span)

    def _whole_groups(self) -> Sequence[Sequence[Any]]:
        groups: Sequence[Sequence[Any]] = self.optimizer.bf16_groups if self._bf16 else self.optimizer.bit16_groups
        return groups

    def lent(self, number: int) -> bool:
        """Whether a flat is in memory only while it is asked for: between steps it is on a drive."""
        return self.stage == 3 and bool(self.optimizer._swappable_optimizer_subgroup(number))

    @contextmanager
    def at_hand(self, number: int, write: bool = False) -> Iterator[None]:
        """Within it a flat and its state are in memory; one at a time, as buffers are few.

        Args:
            number: of the flat.
            write: what is written to them stays.
        """
        optimizer = self.optimizer
        if not self.lent(number) or self.flats()[number].numel():
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

    def publish(self) -> None:
        """Give all ranks the parameters anew, from the masters. Collective."""
        optimizer = self.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for number in range(len(optimizer.fp16_groups)):
            with self.at_hand(number):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        self.gather_small()

    def gather_small(self) -> None:
        """Gather the parameters that stay whole at stage 3 between steps. Collective."""
        small = self.optimizer.persistent_parameters
        if small:
            small[0].all_gather(small)

    def relink_state(self) -> None:
        """Tell DeepSpeed that the optimizer's state was replaced."""
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    # A window

    def forward(self, call: Any) -> Any:
        return self.engine(call)

    def backward(self, loss: torch.Tensor, in_order: bool = False, within_forward: bool = False) -> None:
        """Back-propagate, and at stages 2 and 3 exchange the gradients and add them up. Collective.

        Args:
            loss: of shape ().
            in_order: at stage 2, exchange afterwards, in the parameters' order, zeros standing for what is missing.
            within_forward: the engine's forward is still under way, and did not prepare for a backward.
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
                _fill(parameter, optimizer)
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, number)
        optimizer.overlapping_partition_gradients_reduce_epilogue()

    def reduce(self) -> None:
        """Exchange what the window has added up where that is still to do; once a window. Collective."""
        if self._reduced:
            return
        self._reduced = True
        engine, optimizer = self.engine, self.optimizer
        if self.stage == 3 and optimizer.swap_optimizer:
            # What got no gradient goes to the drive as zeros: nothing else is there to be read.
            optimizer._offload_boundary_param_ids.update(
                parameter.ds_id for group in optimizer.fp16_groups for parameter in group
            )
        if self.stage > 1:
            self._finalize()
            return
        if self._bf16:
            # Whether a parameter counts in the norm must not differ between ranks.
            optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in optimizer.bf16_groups]
        else:
            for group in optimizer.bit16_groups:
                for parameter in group:
                    _fill(parameter, optimizer)
        engine._running_engine_step = True
        self._allreduce()

    def norm(self) -> torch.Tensor:
        """The global norm of the window's gradients, of shape (); infinite where one is not finite. Collective."""
        self.reduce()
        if self._norm is None:
            self._norm = self._scaled_norm()
        norm = self._norm / self.loss_scale
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm).float()

    def step(self, max_norm: float | None) -> bool:
        """Clip, step and start a new window; False where DeepSpeed skipped the step. Collective.

        Args:
            max_norm: None leaves clipping to the config.
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
            self.forget()  # offloaded, DeepSpeed keeps what it did not step on, and would add the next window to it
        return stepped

    def forget(self) -> None:
        """Drop what the window has added up."""
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        if self.stage == 3:
            optimizer._pre_step()
        elif not self._bf16:
            optimizer.micro_step_id = -1
            for store in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for key in store:
                    store[key] = None
            if self.offloads:
                optimizer._offload_accumulated_param_ids = set()
        self._open_window()

    @property
    def gradients_seen(self) -> int:
        """How many parameters got a gradient in the last backward."""
        return int(getattr(self.optimizer, "_hooks_fired_this_backward", 0))

    @property
    def loss_scale(self) -> float:
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    def _put_aside(self) -> None:
        """Let `reduce` do, once, what ``engine.step`` would do as it begins, and keep the norm that it computes."""
        engine, optimizer = self.engine, self.optimizer
        if self.stage > 1:
            self._finalize = optimizer.finalize_gradient_accumulation_boundary
            optimizer.finalize_gradient_accumulation_boundary = lambda: None
        else:
            self._allreduce = engine.allreduce_gradients
            engine.allreduce_gradients = lambda *_: None
        if self.stage == 3:
            if optimizer.swap_optimizer:
                _keep_unaligned(optimizer.optimizer_swapper)
            norms = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: norms() if self._norm is None else [self._norm]
        elif not self._bf16:
            whole = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda: whole() if self._norm is None else self._norm
            self._whole_norm = whole

    def _scaled_norm(self) -> torch.Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors

        norm: torch.Tensor
        if self.stage == 3:
            norm = combine_grad_norm_groups(self.optimizer._get_norm_groups())
        elif self._bf16:
            norm = torch.as_tensor(get_global_norm_of_tensors(self.optimizer.get_grads_for_norm()[0]))
        else:
            norm = self.optimizer.scaled_global_norm()
        return norm

    def _open_window(self) -> None:
        self._reduced, self._norm = False, None
        self.engine._running_engine_step = False
        # A parameter without a gradient in the coming window must not find the last one's.
        if self.stage == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.offloads:
            self.optimizer.reset_cpu_buffers()
            for flat in self.flats():
                if flat.grad is not None:
                    flat.grad.zero_()


def _keep_unaligned(swapper: Any) -> None:
    """Keep gradients in memory that do not begin at a block's border: reading them from a drive fails in silence."""
    swap_out = swapper.swap_out_gradients

    def keep(parameter: torch.Tensor, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
        gradients = list(zip(gradient_offsets, gradient_tensors, strict=True))
        aligned = [one for one in gradients if one[0] % swapper.numel_alignment == 0]
        info = swapper._get_param_swap_info(parameter)
        if info is not None:
            info.unswapped_gradients.update(one for one in gradients if one[0] % swapper.numel_alignment)
        swap_out(parameter, [offset for offset, _ in aligned], [tensor for _, tensor in aligned])

    swapper.swap_out_gradients = keep


def _fill(parameter: nn.Parameter, optimizer: Any) -> None:
    """Give a parameter that got no gradient on this rank one of zeros: others may have one to exchange."""
    if optimizer.get_gradient_for_reduction(parameter) is not None:
        return
    zeros = torch.zeros_like(parameter, dtype=optimizer._gradient_reduction_buffer_dtype())
    if optimizer.use_grad_accum_attribute:
        parameter.grad_accum = zeros  # type: ignore[attr-defined]
    else:
        parameter.grad = zeros
