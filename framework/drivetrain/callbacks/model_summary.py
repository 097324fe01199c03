"""ModelSummary: prints the module's layers, parameters and size at the start of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from drivetrain._config.argument_checks import check_count
from drivetrain._runtime.plain_names import plain_class
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.callbacks._forward_shapes import ForwardShapes, Shapes
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_RIGHT_ALIGNED = ("Params", "Size", "FLOPs")


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
            trainer.print(str(summarize(module, self.max_depth, trainer.strategy.device)))


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A module with its children, by its name in the summarized module, which itself has the name "".

    A parameter that is shared within a row is counted once. A parameter that is shared between rows is counted in each
    row, but only once in the row of the summarized module.
    """

    name: str
    type_name: str
    total: int
    """Number of parameters."""
    trainable: int
    """Number of trainable parameters."""
    size: int
    """Bytes of parameters and buffers."""
    training: bool
    """Whether the module itself is in train mode."""
    inputs: Shapes | None
    """Shapes of the tensors that the module is called with; None if they are unknown or there is no call."""
    outputs: Shapes | None
    """Shapes of the tensors that the module returns; None if they are unknown or there is no call."""
    flops: int | None
    """FLOPs of the module in a forward pass of the example; None if they are unknown."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows of a module's children, and the row of the whole module."""

    rows: Sequence[SummaryRow]
    whole: SummaryRow
    in_train_mode: int
    """Number of modules in train mode, at any depth."""
    in_eval_mode: int
    """Number of modules in eval mode, at any depth."""
    missing_reason: str
    """Why shapes and FLOPs are unknown; "" if they are known, or if there is no example."""

    def __str__(self) -> str:
        return as_text(self)


def summarize(module: torch.nn.Module, max_depth: int = 1, device: torch.device | None = None) -> Summary:
    """Return the summary of ``module``, with shapes and FLOPs if the module has an `example_input_array`.

    Sharded parameters count with their whole size, and parameters on the meta device as if they were materialized. Lazy
    parameters count as zero until they have a shape.

    Args:
        module: any module.
        max_depth: the number of levels to show. 1 shows the children, -1 all levels, and 0 only the totals.
        device: the device on which the module computes; None is the device of the module's first parameter.
    """
    shapes, example = None, getattr(module, "example_input_array", None)
    if example is not None:
        from drivetrain.callbacks._forward_shapes import forward_shapes  # Imported only if there is an example.

        if device is None:
            device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        shapes = forward_shapes(module, example, device)
    whole, *rows = (
        _row(child, name, shapes)
        for name, child in module.named_modules(remove_duplicate=False)
        if not name or max_depth < 0 or name.count(".") < max_depth
    )
    modes = [child.training for child in module.modules()]
    missing_reason = "" if shapes is None else shapes.missing_reason
    return Summary(rows, whole, sum(modes), len(modes) - sum(modes), missing_reason)


def _row(module: torch.nn.Module, name: str, shapes: ForwardShapes | None) -> SummaryRow:
    parameters = list(module.parameters())
    return SummaryRow(
        name,
        plain_class(module).__name__,
        sum(map(_numel, parameters)),
        sum(_numel(p) for p in parameters if p.requires_grad),
        sum(_numel(tensor) * tensor.dtype.itemsize for tensor in (*parameters, *module.buffers())),
        module.training,
        None if shapes is None else shapes.inputs.get(name),
        None if shapes is None else shapes.outputs.get(name),
        None if shapes is None else shapes.flops.get(name),
    )


def _numel(tensor: torch.Tensor) -> int:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return 0
    # Parameters partitioned by ZeRO 3 are empty; ds_numel is the whole size.
    return int(getattr(tensor, "ds_numel", tensor.numel()))


# The summary as text


def as_text(summary: Summary) -> str:
    """Return the summary as aligned columns."""
    rows = summary.rows
    columns = [
        ["Name", *("  " * row.name.count(".") + row.name.rpartition(".")[2] for row in rows)],
        ["Type", *(row.type_name for row in rows)],
        ["Params", *(format_count(row.total) for row in rows)],
        ["Size", *(format_bytes(row.size) for row in rows)],
    ]
    if summary.whole.flops is not None:
        columns += [
            ["In", *(_shapes(row.inputs) for row in rows)],
            ["Out", *(_shapes(row.outputs) for row in rows)],
            ["FLOPs", *(format_count(row.flops, "KMGTP") if row.flops else "-" for row in rows)],
        ]
    columns.append(["Mode", *map(_mode, rows)])
    for column in columns:
        width = max(map(len, column))
        column[:] = [cell.rjust(width) if column[0] in _RIGHT_ALIGNED else cell.ljust(width) for cell in column]
    lines = ["  ".join(cells) for cells in zip(*columns, strict=True)]
    rule = "-" * len(lines[0])
    table = [lines[0], rule, *lines[1:], rule] if rows else []
    return "\n".join(line.rstrip() for line in [*table, *_footer(summary)])


def _mode(row: SummaryRow) -> str:
    frozen = "" if row.trainable == row.total else "part frozen" if row.trainable else "frozen"
    return ", ".join(filter(None, [frozen, "" if row.training else "eval"])) or "train"


def _footer(summary: Summary) -> list[str]:
    whole, modules = summary.whole, summary.in_train_mode + summary.in_eval_mode
    lines = [
        f"{whole.total:,} parameters, {whole.trainable:,} trainable, {whole.total - whole.trainable:,} frozen; "
        f"{format_bytes(whole.size)} with buffers",
        f"{modules} modules, {summary.in_train_mode} in train mode, {summary.in_eval_mode} in eval mode",
    ]
    if whole.flops is not None:
        lines.append(f"{_with_unit(whole.flops, 'KMGTP', 'FLOPs')} in a forward pass of example_input_array")
    elif summary.missing_reason:
        lines.append(f"No shapes and no FLOPs: {summary.missing_reason}")
    return lines


def _shapes(shapes: Sequence[Sequence[int]] | None) -> str:
    if not shapes:
        return "-"
    first = "x".join(map(str, shapes[0])) or "()"
    return f"{first} +{len(shapes) - 1}" if len(shapes) > 1 else first


def format_count(number: float, units: str = "KMBT") -> str:
    """Format a number with three significant digits and a unit, such as ``"820"`` or ``"1.23 M"``."""
    if number < 1000:
        return f"{number:.0f}"
    for unit in units:
        number /= 1000
        if number < 999.5 or unit == units[-1]:
            break
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{digits}f} {unit}"


def format_bytes(size: int) -> str:
    """Format a number of bytes with a decimal prefix, such as ``"820 B"`` or ``"1.23 MB"``."""
    return _with_unit(size, "kMGTP", "B")


def _with_unit(number: int, units: str, unit: str) -> str:
    text = format_count(number, units)
    return f"{text}{unit}" if number >= 1000 else f"{text} {unit}"
