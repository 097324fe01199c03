"""ModelSummary: prints the module's layers, parameters and size at the start of training."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from drivetrain._config.argument_checks import check_count
from drivetrain._runtime.plain_names import plain_class
from drivetrain.callback import Callback
from drivetrain.callbacks._summary_table import Summary, SummaryRow, as_text

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_MAX_WIDTH = 120  # columns of the table; wider tables are hard to read


class ModelSummary(Callback):
    """Prints the module's children with their parameters and size, on rank 0 at the start of training.

    If the module has an `example_input_array`, the summary also has input and output shapes and the FLOPs of a forward
    pass in eval mode, as counted by `torch.utils.flop_counter` (matrix products, convolutions and attention). The
    shapes and FLOPs are derived with fake tensors, so they are also available for sharded modules and on the meta
    device. If ``forward`` cannot run on fake tensors, for example because it branches on values, the summary shows the
    reason. The derivation takes one or two seconds, plus a few milliseconds per layer.

    Args:
        max_depth: the number of levels to show. 1 shows the children, -1 all levels, and 0 only the totals.

    Raises:
        ConfigurationError: ``max_depth`` is not an integer of at least -1.
    """

    _key_arguments = ("max_depth",)

    def __init__(self, max_depth: int = 1) -> None:
        check_count("ModelSummary", "max_depth", max_depth, -1, "the number of levels to show, or -1 for all")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Print the summary."""
        if trainer.is_global_zero:
            summary = summarize(module, self.max_depth, trainer.strategy.device)
            width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
            trainer.print(as_text(summary, width))


def summarize(module: torch.nn.Module, max_depth: int = 1, device: torch.device | None = None) -> Summary:
    """Return the summary of ``module``, with shapes and FLOPs if the module has an `example_input_array`.

    Sharded parameters count with their whole size, and parameters on the meta device as if they were materialized. Lazy
    parameters count as zero until they have a shape.

    Args:
        module: any module.
        max_depth: the number of levels to show. 1 shows the children, -1 all levels, and 0 only the totals.
        device: the device on which the module computes; None is the device of the module's first parameter.
    """
    shared = _names_of_shared(module)
    rows = [
        _row(child, name, depth, shared)
        for name, child, depth in _walk(module, "", 0)
        if max_depth < 0 or depth < max_depth
    ]
    total, trainable, size = _count(module)
    modes = [child.training for child in module.modules()]
    flops, missing_reason = None, ""
    example = getattr(module, "example_input_array", None)
    if example is not None:
        from drivetrain.callbacks._forward_shapes import forward_shapes  # Imported only if there is an example.

        if device is None:
            device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        shapes = forward_shapes(module, example, device)
        missing_reason = shapes.missing_reason
        if not missing_reason:
            flops = shapes.flops[""]
            rows = [
                replace(
                    row,
                    inputs=shapes.inputs.get(row.name),
                    outputs=shapes.outputs.get(row.name),
                    flops=shapes.flops.get(row.name),
                )
                for row in rows
            ]
    return Summary(tuple(rows), total, trainable, size, sum(modes), len(modes) - sum(modes), flops, missing_reason)


def _walk(module: torch.nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, torch.nn.Module, int]]:
    for name, child in module.named_children():
        yield prefix + name, child, depth
        yield from _walk(child, f"{prefix}{name}.", depth + 1)


def _row(child: torch.nn.Module, name: str, depth: int, shared: dict[int, list[str]]) -> SummaryRow:
    total, trainable, size = _count(child)
    parameters = list(child.parameters())
    notes = []
    if tied := sorted({first for p in parameters for first in shared.get(id(p), ()) if not _is_inside(first, name)}):
        notes.append(f"tied to {', '.join(tied)}")
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        notes.append("lazy")
    if any(p.is_meta for p in parameters):
        notes.append("meta")
    return SummaryRow(
        name, plain_class(child).__name__, depth, total, trainable, size, "; ".join(notes), child.training
    )


def _names_of_shared(module: torch.nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: shared for key, shared in names.items() if len(shared) > 1}


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _count(module: torch.nn.Module) -> tuple[int, int, int]:
    """Return the number of parameters, the number of trainable parameters, and the bytes of parameters and buffers."""
    parameters = list(module.parameters())
    total = sum(map(_numel, parameters))
    trainable = sum(_numel(p) for p in parameters if p.requires_grad)
    return total, trainable, _bytes([*parameters, *module.buffers()])


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_numel(tensor) * tensor.dtype.itemsize for tensor in tensors)


def _numel(tensor: torch.Tensor) -> int:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return 0
    # Parameters partitioned by ZeRO 3 are empty; ds_numel is the whole size.
    return int(getattr(tensor, "ds_numel", tensor.numel()))
