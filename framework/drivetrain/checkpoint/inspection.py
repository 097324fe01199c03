"""Describes checkpoints as text."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain._format import CheckpointReader, load
from drivetrain._format.tensor_file import NAMES
from drivetrain._runtime.size_format import format_size


def show(path: str | os.PathLike[str]) -> str:
    """Return a text description of a checkpoint: its origin, sizes, and a table of its tensors."""
    checkpoint = load(path)
    manifest, metadata = checkpoint.manifest, checkpoint.manifest.metadata
    written = datetime.datetime.fromtimestamp(manifest.written).astimezone().isoformat(" ", "seconds")
    weights = checkpoint.weights()
    sources = weights.sources()
    count = sum(source.numel for name, source in sources.items() if name not in manifest.aliases)
    precision = metadata.precision or "unknown"
    lines = [
        f"{checkpoint.path}: {'weights only' if checkpoint.weights_only else 'a full checkpoint'}, written {written}",
        f"  by      {metadata.strategy or 'unknown'} on {manifest.world_size} rank(s), {precision}",
        f"  with    {', '.join(f'{name} {text}' for name, text in manifest.versions.items())}",
        f"  at      {_pairs(metadata.progress)}",
        f"  from    {_pairs(metadata.hyper_parameters)}",
        *([f"  without {', '.join(metadata.left_out)}"] if metadata.left_out else []),
        *([f"  on      a base of {len(metadata.base)} weights, which are not in it"] if metadata.base else []),
        *([f"  models  {_list_models(metadata.pretrained)}"] if metadata.pretrained else []),
        f"  weights {count:,} numbers, {format_size(_total_bytes(checkpoint, manifest.weights.files()))}",
    ]
    for index, part in enumerate(manifest.optimizers):
        lines.append(f"  optimizer {index}: {format_size(_total_bytes(checkpoint, part.files()))}")
    for key, part in manifest.callbacks.items():
        lines.append(f"  {key}: {format_size(_total_bytes(checkpoint, part.files()))}")
    if (averages := metadata.averages) is not None:
        used = "with which the run evaluated" if averages.evaluated else "with which the run did not evaluate"
        lines.append(f"  averages of the weights, {used}: {averages.callback}")
    nbytes = sum(record.size for record in manifest.files.values())
    lines.append(f"  in all  {format_size(nbytes)} in {len(manifest.files)} files")
    rows = [
        (name, NAMES[source.dtype], "x".join(map(str, source.shape)) or "()", source.file.name)
        for name, source in sources.items()
    ]
    for tied, first in manifest.aliases.items():
        rows = [(*row[:3], f"tied to {first}") if row[0] == tied else row for row in rows]
    return "\n".join([*lines, "", *_table(("name", "type", "shape", "file"), rows)])


def _list_models(models: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} ({model.get('class', 'unknown')})" for name, model in models.items())


def _total_bytes(checkpoint: CheckpointReader, names: Iterable[str]) -> int:
    return sum(checkpoint.manifest.files[name].size for name in names)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) or "unknown"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    all_rows = [header, *rows]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]
