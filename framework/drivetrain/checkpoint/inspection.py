"""Checkpoints as text: what one holds, and what two have in common."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from drivetrain._config.secret_values import without_secrets
from drivetrain._runtime.size_format import format_size
from drivetrain.checkpoint._format import Checkpoint, load
from drivetrain.checkpoint._format.tensor_file import DTYPES
from drivetrain.checkpoint._format.tensor_reader import TensorSource

_TYPES = {dtype: name for name, dtype in DTYPES.items()}


def show(path: str | os.PathLike[str]) -> str:
    """Return what a checkpoint says of itself: where it comes from, how large it is, and a table of its tensors."""
    checkpoint = load(path)
    manifest, facts = checkpoint.manifest, checkpoint.manifest.facts
    written = datetime.datetime.fromtimestamp(manifest.written).astimezone().isoformat(" ", "seconds")
    weights = checkpoint.weights()
    sources = weights.sources()
    arguments, in_it = without_secrets(facts.hyper_parameters)  # earlier versions wrote them all
    secrets = dict.fromkeys([*facts.left_out, *in_it])
    count = sum(source.spec.numel for name, source in sources.items() if name not in manifest.aliases)
    lines = [
        f"{checkpoint.path}: {'weights alone' if checkpoint.weights_only else 'a whole checkpoint'}, written {written}",
        f"  by      {facts.strategy or 'unknown'} on {manifest.world_size} rank(s), {facts.precision or 'unknown'}",
        f"  with    {', '.join(f'{name} {text}' for name, text in manifest.versions.items())}",
        f"  at      {_pairs(facts.progress)}",
        f"  from    {_pairs(arguments)}",
        *([f"  without {', '.join(secrets)}"] if secrets else []),
        *([f"  on      a base of {len(facts.base)} weights, which are not in it"] if facts.base else []),
        *([f"  models  {_named_models(facts.pretrained)}"] if facts.pretrained else []),
        f"  weights {count:,} numbers, {format_size(_bytes(checkpoint, manifest.weights.files()))}",
    ]
    for index, part in enumerate(manifest.optimizers):
        lines.append(f"  optimizer {index}: {format_size(_bytes(checkpoint, part.files()))}")
    for key, part in manifest.callbacks.items():
        lines.append(f"  {key}: {format_size(_bytes(checkpoint, part.files()))}")
    nbytes = sum(record.size for record in manifest.files.values())
    lines.append(f"  in all  {format_size(nbytes)} in {len(manifest.files)} files")
    rows = [(name, *_described(source), source.file.name) for name, source in sources.items()]
    for tied, first in manifest.aliases.items():
        rows = [(row[0], row[1], row[2], f"tied to {first}") if row[0] == tied else row for row in rows]
    return "\n".join([*lines, "", *_table(("name", "type", "shape", "file"), rows)])


def _named_models(models: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} ({one.get('class', 'unknown')})" for name, one in models.items())


def diff(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[str]:
    """Compare the weights and the optimizers' states of two checkpoints by name.

    Returns:
        A line for each name that only one of them has, or that they have otherwise; nothing where they are equal.
    """
    one, two = load(path), load(other)
    lines = list(_different("", one.weights().sources(), two.weights().sources()))
    counts = (len(one.manifest.optimizers), len(two.manifest.optimizers))
    if counts[0] != counts[1]:
        lines.append(f"optimizers: {counts[0]} against {counts[1]}")
    for index in range(min(counts)):
        parts = (one.manifest.optimizers[index], two.manifest.optimizers[index])
        lines += _different(f"optimizer {index}: ", one.tensors(parts[0]), two.tensors(parts[1]))
        groups = [each.optimizer_state(index)["param_groups"] for each in (one, two)]
        if repr(groups[0]) != repr(groups[1]):
            lines.append(f"optimizer {index}: param_groups: {groups[0]} against {groups[1]}")
    for key in dict.fromkeys([*one.manifest.callbacks, *two.manifest.callbacks]):
        lines += _different(f"{key}: ", one.callback_tensors(key).sources(), two.callback_tensors(key).sources())
    return lines


def _different(prefix: str, one: Mapping[str, TensorSource], two: Mapping[str, TensorSource]) -> Iterator[str]:
    for name in dict.fromkeys([*one, *two]):
        if name not in two or name not in one:
            yield f"{prefix}{name}: only in the {'first' if name in one else 'second'}"
        elif one[name].spec != two[name].spec:
            yield f"{prefix}{name}: {' '.join(_described(one[name]))} against {' '.join(_described(two[name]))}"
        else:
            distance = _distance(one[name].read(), two[name].read())
            if distance is not None:
                yield f"{prefix}{name}: {distance}"


def _distance(one: torch.Tensor, two: torch.Tensor) -> str | None:
    if torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    off = (one.to(wide) - two.to(wide)).abs()
    return f"{int((off != 0).sum())} of {one.numel()} numbers differ, by {off.max():.3g} at most"


def _described(source: TensorSource) -> tuple[str, str]:
    return _TYPES[source.dtype], "x".join(map(str, source.shape)) or "()"


def _bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    return sum(checkpoint.manifest.files[name].size for name in names)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) or "nothing said"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    all_rows = [head, *rows]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]
