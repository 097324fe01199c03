"""ModelSummary: what the module is made of, printed once as training starts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from drivetrain._runtime.lazy_names import is_installed
from drivetrain._runtime.terminal_output import is_terminal
from drivetrain._runtime.user_class import plain_class
from drivetrain.callback import Callback
from drivetrain.callbacks._summary_table import Summary, SummaryRow, as_rich, as_text
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_WIDEST = 120  # characters; beyond it the eye loses the line


class ModelSummary(Callback):
    """Prints the tree of the module's children with their parameters and size, on rank 0 as training starts.

    Where the module has an `example_input_array`, also the shapes that go in and out and the FLOPs of a forward pass,
    in eval mode: of matrix products, convolutions and attention, as `torch.utils.flop_counter` counts them. They are
    found without computing anything, under strategies that shard and on the meta device too; a ``forward`` that cannot
    run so (it branches on values, or talks to other ranks) is named with the reason. It takes a second or two, once,
    and a few milliseconds a layer beyond that.

    On a terminal where rich is installed it draws the table.

    Args:
        max_depth: how deep to go: 1 shows the children, -1 everything, 0 the totals alone.

    Raises:
        ConfigurationError: ``max_depth`` is no whole number from -1 on.
    """

    def __init__(self, max_depth: int = 1) -> None:
        given: Any = max_depth
        if not isinstance(given, int) or given < -1:
            raise ConfigurationError(
                f"ModelSummary(max_depth={max_depth!r})",
                "a depth counts levels of children",
                "give 0 or more, or -1 for all levels",
            )
        self.max_depth = max_depth

    @property
    def state_key(self) -> str:
        """The class and the depth."""
        return f"{type(self).__qualname__}{{'max_depth': {self.max_depth!r}}}"

    def on_fit_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Print the summary."""
        if trainer.is_global_zero:
            summary = summarize(module, self.max_depth, trainer.strategy.device)
            width = min(shutil.get_terminal_size().columns, _WIDEST)
            trainer.print(as_rich(summary, width) if _draws() else as_text(summary, width))


def summarize(module: torch.nn.Module, max_depth: int = 1, device: torch.device | None = None) -> Summary:
    """Return what ``module`` is made of, and, where it has an `example_input_array`, what goes through it.

    Sharded parameters count whole. Parameters on the meta device count as if they had memory; a lazy one counts zero
    until it has a shape.

    Args:
        module: any module.
        max_depth: how deep to go: 1 shows the children, -1 everything, 0 the totals alone.
        device: where it computes; None is where its first parameter is.
    """
    shared = _names_of_shared(module)
    rows = [
        _row(child, name, depth, shared)
        for name, child, depth in _walk(module, "", 0)
        if max_depth < 0 or depth < max_depth
    ]
    total, trainable, size = _count(module)
    modes = [child.training for child in module.modules()]
    flops, missing = None, ""
    example = getattr(module, "example_input_array", None)
    if example is not None:
        from drivetrain.callbacks._forward_shapes import forward_shapes  # by modules that have one

        if device is None:
            device = next((one.device for one in module.parameters()), torch.device("cpu"))
        found = forward_shapes(module, example, device)
        missing = found.missing
        if not missing:
            flops = found.flops[""]
            rows = [
                replace(
                    row,
                    inputs=found.inputs.get(row.name),
                    outputs=found.outputs.get(row.name),
                    flops=found.flops.get(row.name),
                )
                for row in rows
            ]
    return Summary(tuple(rows), total, trainable, size, sum(modes), len(modes) - sum(modes), flops, missing)


def _draws() -> bool:
    """Whether standard output is a terminal that shows what rich draws, and rich is there."""
    out = sys.stdout
    return is_terminal(out) and (out.encoding or "").lower().startswith("utf") and is_installed("rich")


def _walk(module: torch.nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, torch.nn.Module, int]]:
    for name, child in module.named_children():
        yield prefix + name, child, depth
        yield from _walk(child, f"{prefix}{name}.", depth + 1)


def _row(child: torch.nn.Module, name: str, depth: int, shared: dict[int, list[str]]) -> SummaryRow:
    total, trainable, size = _count(child)
    parameters = list(child.parameters())
    notes = []
    if tied := sorted({first for p in parameters for first in shared.get(id(p), ()) if not _below(first, name)}):
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
    return {key: found for key, found in names.items() if len(found) > 1}


def _below(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _count(module: torch.nn.Module) -> tuple[int, int, int]:
    """Parameters, trainable parameters, and bytes of parameters and buffers; each tensor once."""
    parameters = list(module.parameters())
    total = sum(map(_numel, parameters))
    trainable = sum(_numel(p) for p in parameters if p.requires_grad)
    return total, trainable, _bytes([*parameters, *module.buffers()])


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_numel(tensor) * tensor.dtype.itemsize for tensor in tensors)


def _numel(tensor: torch.Tensor) -> int:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return 0
    # A parameter partitioned by ZeRO 3 holds nothing itself and tells its whole size here.
    return int(getattr(tensor, "ds_numel", tensor.numel()))
