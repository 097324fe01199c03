"""Describes and compares checkpoints as text."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from drivetrain._config.secret_values import without_secrets
from drivetrain._runtime.size_format import format_size
from drivetrain.checkpoint._format import AveragesRecord, Checkpoint, load
from drivetrain.checkpoint._format.tensor_file import DTYPES
from drivetrain.checkpoint._format.tensor_reader import TensorSource

_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def show(path: str | os.PathLike[str]) -> str:
    """Return a text description of a checkpoint: its origin, sizes, and a table of its tensors."""
    checkpoint = load(path)
    manifest, metadata = checkpoint.manifest, checkpoint.manifest.metadata
    written = datetime.datetime.fromtimestamp(manifest.written).astimezone().isoformat(" ", "seconds")
    weights = checkpoint.weights()
    sources = weights.sources()
    # Earlier versions of drivetrain stored secrets, too.
    arguments, stored_secrets = without_secrets(metadata.hyper_parameters)
    secrets = dict.fromkeys([*metadata.left_out, *stored_secrets])
    count = sum(source.spec.numel for name, source in sources.items() if name not in manifest.aliases)
    precision = metadata.precision or "unknown"
    lines = [
        f"{checkpoint.path}: {'weights only' if checkpoint.weights_only else 'a full checkpoint'}, written {written}",
        f"  by      {metadata.strategy or 'unknown'} on {manifest.world_size} rank(s), {precision}",
        f"  with    {', '.join(f'{name} {text}' for name, text in manifest.versions.items())}",
        f"  at      {_pairs(metadata.progress)}",
        f"  from    {_pairs(arguments)}",
        *([f"  without {', '.join(secrets)}"] if secrets else []),
        *([f"  on      a base of {len(metadata.base)} weights, which are not in it"] if metadata.base else []),
        *([f"  models  {_list_models(metadata.pretrained)}"] if metadata.pretrained else []),
        f"  weights {count:,} numbers, {format_size(_total_bytes(checkpoint, manifest.weights.files()))}",
    ]
    for index, part in enumerate(manifest.optimizers):
        lines.append(f"  optimizer {index}: {format_size(_total_bytes(checkpoint, part.files()))}")
    for key, part in manifest.callbacks.items():
        record = metadata.averages
        use = _describe_averages(checkpoint, record) if record is not None and record.callback == key else ""
        lines.append(f"  {key}: {use}{format_size(_total_bytes(checkpoint, part.files()))}")
    nbytes = sum(record.size for record in manifest.files.values())
    lines.append(f"  in all  {format_size(nbytes)} in {len(manifest.files)} files")
    rows = [(name, *_type_shape(source), source.file.name) for name, source in sources.items()]
    if metadata.averages is not None:
        averages = checkpoint.callback_tensors(metadata.averages.callback).sources().items()
        rows += [(f"average of {name}", *_type_shape(source), source.file.name) for name, source in averages]
    for tied, first in manifest.aliases.items():
        rows = [(*row[:3], f"tied to {first}") if row[0] == tied else row for row in rows]
    return "\n".join([*lines, "", *_table(("name", "type", "shape", "file"), rows)])


def _describe_averages(checkpoint: Checkpoint, record: AveragesRecord) -> str:
    count = len(checkpoint.callback_tensors(record.callback).keys() & checkpoint.weights().keys())
    use = "with which the run evaluated" if record.evaluated else "with which the run did not evaluate"
    return f"averages of {count} weights, {use}, "


def _list_models(models: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} ({model.get('class', 'unknown')})" for name, model in models.items())


def diff(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[str]:
    """Compare the weights, optimizer states and callback tensors of two checkpoints by name.

    Returns:
        A line for each name that only one checkpoint has, or whose values differ; an empty list if there is none.
    """
    left, right = load(path), load(other)
    lines = list(_differences("", left.weights().sources(), right.weights().sources()))
    counts = (len(left.manifest.optimizers), len(right.manifest.optimizers))
    if counts[0] != counts[1]:
        lines.append(f"optimizers: {counts[0]} against {counts[1]}")
    for index in range(min(counts)):
        parts = (left.manifest.optimizers[index], right.manifest.optimizers[index])
        lines += _differences(f"optimizer {index}: ", left.tensors(parts[0]), right.tensors(parts[1]))
        groups = [checkpoint.optimizer_settings(index) for checkpoint in (left, right)]
        if repr(groups[0]) != repr(groups[1]):
            lines.append(f"optimizer {index}: param_groups: {groups[0]} against {groups[1]}")
    for key in dict.fromkeys([*left.manifest.callbacks, *right.manifest.callbacks]):
        lines += _differences(f"{key}: ", left.callback_tensors(key).sources(), right.callback_tensors(key).sources())
    return lines


def _differences(prefix: str, left: Mapping[str, TensorSource], right: Mapping[str, TensorSource]) -> Iterator[str]:
    for name in dict.fromkeys([*left, *right]):
        if name not in right or name not in left:
            yield f"{prefix}{name}: only in the {'first' if name in left else 'second'}"
        elif left[name].spec != right[name].spec:
            yield f"{prefix}{name}: {' '.join(_type_shape(left[name]))} against {' '.join(_type_shape(right[name]))}"
        else:
            distance = _distance(left[name].read(), right[name].read())
            if distance is not None:
                yield f"{prefix}{name}: {distance}"


def _distance(left: torch.Tensor, right: torch.Tensor) -> str | None:
    if torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)):
        return None
    wide = torch.complex128 if left.is_complex() else torch.float64
    distances = (left.to(wide) - right.to(wide)).abs()
    return f"{int((distances != 0).sum())} of {left.numel()} numbers differ, by {distances.max():.3g} at most"


def _type_shape(source: TensorSource) -> tuple[str, str]:
    return _TYPE_NAMES[source.dtype], "x".join(map(str, source.shape)) or "()"


def _total_bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    return sum(checkpoint.manifest.files[name].size for name in names)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items()) or "unknown"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    all_rows = [header, *rows]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]
