"""ModelSummary: what the module is made of, printed once as training starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One module of the tree, with everything below it.

    A parameter that is tied within the row counts once; one tied between rows counts in each of them, and once in the
    total.
    """

    name: str
    kind: str
    depth: int
    total: int
    trainable: int
    size: int
    """Bytes of parameters and buffers."""
    notes: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The tree of a module's children, and what the whole takes."""

    rows: tuple[SummaryRow, ...]
    total: int
    trainable: int
    size: int
    """Bytes of parameters and buffers."""

    def __str__(self) -> str:
        header = ("Name", "Type", "Params", "Trainable", "MB", "")
        lines = [
            ("  " * row.depth + row.name, row.kind, f"{row.total:,}", f"{row.trainable:,}", _mb(row.size), row.notes)
            for row in self.rows
        ]
        table = [header, *lines]
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        text = [_aligned(line, widths) for line in table]
        rule = "-" * max(map(len, text))
        totals = (
            f"{self.total:,} parameters, {self.trainable:,} trainable, {self.total - self.trainable:,} frozen, "
            f"{_mb(self.size)} MB with buffers"
        )
        return "\n".join([text[0], rule, *text[1:], rule, totals] if self.rows else [totals])


class ModelSummary(Callback):
    """Prints the tree of the module's children with their parameters and size, on rank 0 as training starts.

    Args:
        max_depth: how deep to go: 1 shows the children, -1 everything, 0 the totals alone.

    Raises:
        ConfigurationError: ``max_depth`` is below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
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
            trainer.print(str(summarize(module, self.max_depth)))


def summarize(module: torch.nn.Module, max_depth: int = 1) -> Summary:
    """Return what ``module`` is made of.

    Sharded parameters count whole. Parameters on the meta device count as if they had memory; a lazy one counts zero
    until it has a shape.

    Args:
        module: any module.
        max_depth: how deep to go: 1 shows the children, -1 everything, 0 the totals alone.
    """
    shared = _names_of_shared(module)
    rows = tuple(
        _row(child, name, depth, shared)
        for name, child, depth in _walk(module, "", 0)
        if max_depth < 0 or depth < max_depth
    )
    total, trainable, size = _count(module)
    return Summary(rows, total, trainable, size)


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
    return SummaryRow(name, type(child).__name__, depth, total, trainable, size, "; ".join(notes))


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


def _mb(size: int) -> str:
    return f"{size / 1e6:,.3f}" if size < 1e8 else f"{size / 1e6:,.0f}"


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    left = (0, 1, 5)
    cells = (
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
