"""Reading a checkpoint with arbitrary bytes ends in a value or a CheckpointError, in bounded time and memory (J-10).

A run resumes from some of them, up to its first step.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing_run import QUIET, Augmented, Drawing

from drivetrain import CheckpointError, ConfigurationError, Fit
from drivetrain._format.file_writer import BlockChecksums
from drivetrain.callbacks import Checkpoint, EarlyStopping, LambdaCallback
from drivetrain.checkpoint import load, show, verify
from newest_checkpoint import newest

FAULTS = int(os.environ.get("FAULTS", "0"))
COUNT = 500 * FAULTS or 1000
RUNS = 25 * FAULTS or 50
SEED = int(os.environ.get("FAULTS_SEED", "5"))
OLDER = Path(__file__).parents[1] / "unit" / "checkpoint" / "older"
SECONDS = 10.0
MEBIBYTES = 200


def _nested(levels: int) -> Any:
    return json.loads("[" * levels + "[]" + "]" * levels)


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**70, 10**400, 0.5, -0.0, 1e20, 1e308, float("nan")),
    *("", "x", "\ud800", "../../etc/passwd", "manifest.json", "x" * 5000, "inf", "__metadata__"),
    *([], {}, [1, 2], [[]], {"a": 1}, [2**70, 0], [0, 2**62], [-8, 0], _nested(60), _nested(300), _nested(700)),
    *({"$tensor": "nowhere"}, {"$tensor": 3}, {"$tuple": 3}, {"$tuple": []}, {"$float": "1e5"}, {"$float": []}),
    *({"$pairs": [[[], 1]]}, {"$pairs": [1]}, {"$pairs": [[1, 2, 3]]}, {"$pairs": [[1, 2]]}, {"$counter": {}}),
)
_WHOLE_FILES = (b"", b"\0", b"null", b"[]", b"{}", b"[" * 5000, b"1" * 5000, b'{"format": 1}')


def _dumps(document: Any, **options: Any) -> bytes:
    """Return JSON of any depth, since hostile values may be nested in each other."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(document, **options).encode()
    finally:
        sys.setrecursionlimit(before)


class Mutator:
    """Changes one of the files in a checkpoint's folder at a time, and puts it back."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._draw = random.Random(seed)
        self._whole = {path.name: path.read_bytes() for path in folder.iterdir()}

    def mutations(self, count: int) -> Iterator[str]:
        """Yield a description of each of ``count`` mutations, while the checkpoint has it."""
        by_type = {".json": [self._document] * 3, ".safetensors": [self._header] * 3}
        for number in range(count):
            name = self._draw.choice(sorted(self._whole))
            way = self._draw.choice([self._bytes, *by_type.get(Path(name).suffix, [])])
            content = way(self._whole[name])
            sealed = self._draw.random() < 0.85
            (self._folder / name).write_bytes(content)
            if sealed:
                self._seal(name, content)
            yield f"{number}: {way.__name__} of {name}, {'sealed' if sealed else 'as it is'}"
            for changed in {name, "manifest.json"}:
                (self._folder / changed).write_bytes(self._whole[changed])

    def _bytes(self, content: bytes) -> bytes:
        draw, changed = self._draw, bytearray(content)
        start, length = draw.randrange(len(changed)), draw.randrange(1, 40)
        way = draw.choice(("flip", "cut", "drop", "insert", "zeros", "all"))
        if way == "flip":
            changed[start] ^= 1 << draw.randrange(8)
        elif way == "cut":
            del changed[start:]
        elif way == "drop":
            del changed[start : start + length]
        elif way == "insert":
            changed[start:start] = draw.randbytes(length)
        elif way == "zeros":
            changed[start : start + length] = bytes(length)
        return draw.choice(_WHOLE_FILES) if way == "all" else bytes(changed)

    def _document(self, content: bytes) -> bytes:
        document = json.loads(content)
        document.pop("crc32", None)
        for _ in range(self._draw.choice((1, 1, 1, 3))):
            document = self._with_a_change(document)
        return _dumps(document, indent=1)

    def _header(self, content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        text = _dumps(self._with_a_change(json.loads(content[8 : 8 + length])))
        if self._draw.random() < 0.5:
            text += b" " * (-len(text) % 64)
        size = self._draw.choice((len(text),) * 8 + (0, 2**63, len(text) + 1))
        return size.to_bytes(8, "little") + text + content[8 + length :]

    def _with_a_change(self, document: Any) -> Any:
        """Replace, remove, rename or double one value anywhere in the document."""
        draw, places = self._draw, list(_places(document))
        hostile = json.loads(json.dumps(draw.choice(HOSTILE)))  # a copy, since later mutations may change it
        if not places or draw.random() < 0.02:
            return hostile
        holder, key = draw.choice(places)
        way = draw.random()
        if way < 0.6:
            holder[key] = hostile
        elif way < 0.7 and isinstance(holder[key], int | float):
            holder[key] = draw.choice((holder[key] + 1, holder[key] - 1, holder[key] * 2, -holder[key]))
        elif way < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw.choice(("x", "$tuple", "$pairs", "state", "params", "__metadata__"))] = holder.pop(key)
        else:
            holder.append(holder[key])
        return document

    def _seal(self, name: str, content: bytes) -> None:
        """Write matching checksums for the file and the manifest."""
        if name == "manifest.json":
            body, _, _ = content.rstrip().rpartition(b"\n}")
            body = body.partition(b',\n "crc32"')[0]
        else:
            document = json.loads(self._whole["manifest.json"])
            del document["crc32"]
            sums = BlockChecksums()
            sums.update(content)
            document["files"][name] = {"size": sums.size, "crc32": sums.text()}
            body = _dumps(document, indent=1).removesuffix(b"\n}")
        sealed = body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()
        (self._folder / "manifest.json").write_bytes(sealed)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    left = [value]
    while left:
        holder = left.pop()
        keys: Any = holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            left.append(holder[key])


def _read_all(path: Path) -> None:
    checkpoint = load(path)
    checkpoint.weights().staged()
    for index in range(len(checkpoint.manifest.optimizers)):
        checkpoint.optimizer_settings(index)
        checkpoint.optimizer_state(index)
    checkpoint.state()
    for rank in range(len(checkpoint.manifest.ranks)):
        checkpoint.rank_state(rank)


def _verify(path: Path) -> None:
    """Check that verifying raises nothing, and that everything can be read if it finds no problem."""
    if not verify(path):
        _read_all(path)


def _newest(path: Path) -> None:
    newest([str(path.parent)])


READINGS: tuple[Callable[[Path], object], ...] = (_read_all, _verify, show, _newest)


def _bounded(read: Callable[[Path], object], path: Path, what: str, *also: type[Exception]) -> bool:
    """Return whether it ended in a value; it may end in a CheckpointError."""
    began = time.process_time()
    try:
        read(path)
    except (CheckpointError, *also):  # type: ignore[misc]  # mypy takes no star here
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        assert time.process_time() - began < SECONDS, what
    return True


@pytest.mark.timeout(300 + 5 * FAULTS)
@pytest.mark.parametrize("kind", ["single_device", "ddp"])
def test_reading_ends_in_a_value_or_a_checkpoint_error(kind: str, tmp_path: Path) -> None:  # J-10
    path = tmp_path / "checkpoints" / kind
    shutil.copytree(OLDER / kind, path)
    (path.parent / "latest").write_bytes(b"\xff\0../..")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = errors = 0
    for what in Mutator(path, SEED).mutations(COUNT // 2):
        for read in READINGS:
            ended = _bounded(read, path, f"{what}, {read.__name__}")
            values, errors = values + ended, errors + (not ended)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert values > COUNT // 20, "nothing came through"
    assert errors > COUNT // 20, "nothing was refused"
    assert grown < MEBIBYTES
    assert verify(path) == []


class _ReachedError(Exception): ...


class _Validated(Drawing):
    def __init__(self) -> None:
        super().__init__(lambda *words: None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[:, 1:]).square().mean())


def _stop(*_: Any) -> None:
    raise _ReachedError


def _fit(folder: Path, start: Path | None, **hooks: Any) -> Fit:
    monitors = EarlyStopping("val", patience=9), Checkpoint(folder / "kept", monitor="val", every_n_epochs=1)
    settings: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 0, "max_epochs": 2}
    fit = Fit(callbacks=[*monitors, LambdaCallback(**hooks)], **settings, **QUIET)
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=8, shuffle=True)
    fit.fit(_Validated(), loader, torch.utils.data.DataLoader(Augmented(), batch_size=41), ckpt_path=start)
    return fit


@pytest.mark.timeout(300 + 5 * FAULTS)
def test_a_run_resumes_or_names_what_is_malformed(tmp_path: Path) -> None:  # J-10
    path = tmp_path / "checkpoint"

    def save(fit: Fit, *_: Any) -> None:
        if fit.global_step == 6:
            fit.save_checkpoint(path)

    def resume(path: Path) -> None:
        try:
            fit = _fit(tmp_path / "resumed", path, on_train_batch_start=_stop)
        except _ReachedError:
            return
        # The validation that was due at the save comes before the first step, and the weights may be of any size.
        assert fit.early_stopping_callback is not None
        assert "is not finite" in str(fit.early_stopping_callback.stopping_reason)

    _fit(tmp_path, None, on_train_batch_end=save)
    resume(path)
    ended = [_bounded(resume, path, what, ConfigurationError) for what in Mutator(path, SEED).mutations(RUNS)]
    assert sum(ended) >= RUNS // 50, "no run went on"
    assert sum(ended) < RUNS - RUNS // 20, "nothing was refused"
