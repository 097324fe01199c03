"""Stage 3: each parameter is given out by rank 0, cut, and let go, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.strategies import ControlPlane, Span
from drivetrain_strategies._materialize import Recording, bare_tensors, replay
from drivetrain_strategies.deepspeed._internals import on_drive
from drivetrain_strategies.deepspeed._state import Place


class Partitioner:
    """Cuts a module's parameters by DeepSpeed's own `zero.Init`, and keeps this rank's part in float32 besides.

    DeepSpeed would build its masters from parameters that are already rounded to half precision (E-11).

    Args:
        config: what DeepSpeed gets.
        half: the dtype of the parameters that compute, where that is not their own.
        device: where they compute.
    """

    def __init__(self, config: dict[str, Any], half: torch.dtype | None, device: torch.device) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init

        self._init = Init(config_dict_or_path=config)  # a dtype that is given is lost where there is no fp16
        if config["zero_optimization"].get("memory_efficient_linear", True):
            self._init._enable_mem_efficient_linear()
        self._half = half
        self._device = device
        self.exact: dict[int, Place] = {}
        """This rank's parts by the parameters' ids, unrounded."""

    @torch.no_grad()
    def cut(self, parameter: nn.Parameter) -> None:
        """Cut one parameter. Collective."""
        data = parameter.data.to(self._device)
        dist.broadcast(data, 0)
        shape, numel = tuple(data.shape), data.numel()
        parameter.data = data if self._half is None else data.to(self._half)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
        partition = parameter.ds_tensor  # type: ignore[attr-defined]
        size = partition.ds_numel
        start = min(parameter.ds_zero_partition_rank * size, numel)  # type: ignore[attr-defined]
        span = Span(start, min(start + size, numel))
        if data.dtype == parameter.dtype and not on_drive(parameter):
            local = partition.detach()[: span.stop - span.start]
        else:
            local = data.reshape(-1)[span.start : span.stop].clone()
        self.exact[id(parameter)] = Place(local, shape, span)

    def cut_all(self, module: nn.Module) -> None:
        """Cut all that have values. Collective."""
        for parameter in module.parameters():
            if not parameter.is_meta and not hasattr(parameter, "ds_id"):
                self.cut(parameter)


def materialize(
    module: nn.Module,
    recording: Recording | None,
    cut: Callable[[nn.Parameter], None],
    device: torch.device,
    control: ControlPlane,
) -> None:
    """Run again what built a module without storage, from rank 0's generator, each parameter cut as it is ready.

    Parameters stay the objects that they are: optimizers hold them. Collective.
    """
    built = [(bare, bare.tensor) for bare in bare_tensors(module, recording)]
    if not built or recording is None:
        return
    places = {id(tensor): bare for bare, tensor in reversed(built)}  # of tied names the first
    state = torch.tensor(control.from_rank_0(recording.generator.tolist()), dtype=torch.uint8)
    before = torch.get_rng_state()
    torch.set_rng_state(state)

    def hand_over(tensor: torch.Tensor, value: torch.Tensor) -> None:
        bare = places[id(tensor)]
        if bare.place is not None:
            bare.place(value.to(device, tensor.dtype))
            return
        assert isinstance(tensor, nn.Parameter)
        real = nn.Parameter(value.detach().to(device, tensor.dtype, copy=True), requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        cut(tensor)

    recurrent = [one for one in module.modules() if isinstance(one, nn.RNNBase)]
    for one in recurrent:
        one._flat_weight_refs = []  # nothing that is weakly referred to is swapped; torch's own `_apply` does so too
    replay(recording, list({id(tensor): tensor for _, tensor in built}.values()), hand_over)
    for one in recurrent:
        one._init_flat_weights()
    if not torch.equal(state, recording.generator) or not torch.equal(before, recording.generator):
        torch.set_rng_state(before)  # only rank 0 has drawn from its own; and others may have been seeded since
