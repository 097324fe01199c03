"""Opens checkpoints and reads their parts lazily."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard, Region
from drivetrain._format.checkpoint_folder import existing_folder, read_if_there
from drivetrain._format.documents import MAX_DOCUMENT_BYTES, decode, loads
from drivetrain._format.flattened_tensor import FlattenedTensor
from drivetrain._format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, Part, decode_manifest
from drivetrain._format.tensor_reader import CastSource, CheckedFile, TensorSource, damage_error, tensors_in
from drivetrain._runtime.plain_names import plain_name
from drivetrain._storage.folder import Folder
from drivetrain.errors import CheckpointError, listed


class CheckpointReader:
    """A checkpoint opened for reading, as returned by `load`. Only the manifest is read until other parts are needed.

    Args:
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.path = folder.path
        self.readers = folder.readers
        self.manifest = manifest
        self._folder = folder
        self._files: dict[str, CheckedFile] = {}
        self.renames: Mapping[str, str] = {}
        """New names of saved parameters, for the optimizers' states and groups."""

    @property
    def progress(self) -> dict[str, Any]:
        """The saved counters: epoch, steps, samples."""
        return dict(self.manifest.metadata.progress)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The arguments that the module was built with."""
        return dict(self.manifest.metadata.hyper_parameters)

    @property
    def weights_only(self) -> bool:
        """Whether the checkpoint holds only weights, so that no run can resume from it."""
        return self.manifest.metadata.weights_only

    def weights(self) -> Weights:
        """Return every parameter and buffer by name, including tied names. Each value is read when it is accessed.

        These are the trained weights, also if the checkpoint has averages, which `averages` returns.
        """
        part = self.manifest.weights
        sources = self.tensors(part)
        other_values = {} if part.document is None else _read_tensors(self.document(part, sources), {}, self.readers)
        if not isinstance(other_values, dict) or not all(isinstance(name, str) for name in other_values):
            raise damage_error(self.path, f"{part.document} is not a dict of names")
        tensors = {name: source for name, source in sources.items() if name not in self._document_tensor_names(part)}
        values = {plain_name(name): value for name, value in {**tensors, **other_values}.items()}
        return Weights(values, self.manifest.aliases, self.readers)

    def averages(self) -> Weights:
        """Return the weights of the module with the averages: `weights`, with averages in place of what was averaged.

        Averages are converted to the dtypes of their weights. `callback_tensors` returns them as they are stored, in at
        least float32.

        Raises:
            CheckpointError: the checkpoint records no averages.
        """
        record = self.manifest.metadata.averages
        if record is None:
            raise CheckpointError(
                f"{self.path!r} holds no averages of its weights.",
                "the run averaged no weights, or averaging had not begun, or the checkpoint was saved after fit, with "
                "what the module held then.",
                "use its weights, or its callback_tensors.",
            )
        return self.weights().with_values(self.callback_tensors(record.callback).sources())

    def optimizer_state(self, index: int = 0, regions: Mapping[str, Region] | None = None) -> dict[str, Any]:
        """Return an optimizer's state, keyed by parameter name.

        Args:
            index: index of the optimizer.
            regions: the region to read of each parameter, by parameter name. State tensors that have the parameter's
                shape are read in this region and returned as `ParameterShard`; all other tensors are returned whole.

        Raises:
            CheckpointError: the checkpoint has no optimizer with this index, or the optimizer's state is damaged.
        """
        count = len(self.manifest.optimizers)
        if index >= count:
            raise CheckpointError(
                f"{self.path!r} holds the state of {count} optimizer(s), and none with index {index}.",
                "only weights were saved." if self.weights_only else "the run had no other optimizers.",
                "use another checkpoint, or load only the weights.",
            )
        document = self.optimizer_document(index)
        # If no regions are given, the files of the weights need not be opened.
        shapes = {name: value.shape for name, value in self.weights().sources().items()} if regions else {}
        wanted_regions: dict[int, Region] = {}
        for name, values in document["state"].items():
            region = None if regions is None else regions.get(name)
            sources: dict[int, TensorSource] = {}
            _collect_sources(values, sources, within_subclasses=False)
            for key, value in sources.items():
                if region is not None and value.shape == shapes.get(name):
                    wanted_regions[key] = region
        state: dict[str, Any] = _read_tensors(document, wanted_regions, self.readers)
        return state

    def optimizer_settings(self, index: int = 0) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimizer with parameter names as ``params``, without reading its state."""
        groups: list[dict[str, Any]] = _read_tensors(self.optimizer_document(index)["param_groups"], {}, self.readers)
        return groups

    def optimizer_document(self, index: int) -> dict[str, Any]:
        """Return an optimizer's state with a `TensorSource` in place of each tensor; no tensor is read.

        Raises:
            CheckpointError: the document does not have the structure of an optimizer's state.
        """
        part = self.manifest.optimizers[index]
        document: dict[str, Any] = {} if part.document is None else self.document(part)
        try:
            values = map(dict, document["state"].values())
            document["state"] = dict(zip(self.renamed(document["state"]), values, strict=True))
            for group in document["param_groups"]:
                group["params"] = self.renamed(group["params"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            name, problem = part.document or f"optimizer {index}", f"{type(error).__name__}: {error}"
            raise damage_error(self.path, f"{name} is not an optimizer's state: {problem}") from error
        return document

    def renamed(self, names: Iterable[str]) -> list[str]:
        """Return the names under which the module of this run has the saved parameters."""
        return [self.renames.get(plain_name(name), plain_name(name)) for name in names]

    def callback_tensors(self, key: str) -> Weights:
        """Return the tensors of the callback with this key by name; empty if the callback saved none."""
        part = self.manifest.callbacks.get(key)
        sources = {} if part is None else self.tensors(part)
        return Weights({plain_name(name): source for name, source in sources.items()}, {}, self.readers)

    def state(self) -> Any:
        """Return the run's state, which rank 0 saved; None if no state was saved."""
        state = self._read_document(self.manifest.state)
        with self.reading("components or trainables"):
            return self._with_renames(state) if isinstance(state, dict) else state

    def _with_renames(self, state: dict[str, Any]) -> dict[str, Any]:
        for key, names in (state.get("trainables") or {}).items():
            state["trainables"][key] = self.renamed(names)
        for groups in (state.get("components") or {}).get("optimizer_groups") or ():
            for group in groups:
                group["params"] = self.renamed(group["params"])
        return state

    def rank_state(self, rank: int) -> Any:
        """Return the state that the given rank saved; None if the rank saved none."""
        return self._read_document(self.manifest.ranks[rank] if rank < len(self.manifest.ranks) else None)

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Raise a `CheckpointError` that names ``key`` if a built-in error shows that its value is malformed."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"The checkpoint {self.path!r} is malformed: {key!r} cannot be restored: "
                f"{type(error).__name__}: {error}.",
                "the value does not have the form that the object's state_dict returns.",
                "use another checkpoint, or load the weights alone with load_from_checkpoint.",
            ) from error

    def close(self) -> None:
        """Free the blocks of files that are kept for the next read."""
        self._files.clear()

    # Access to the files, documents and tensors of parts

    def file(self, name: str) -> CheckedFile:
        """Return the file ``name``, opened on first use."""
        if name not in self._files:
            self._files[name] = CheckedFile(self._folder, name, self.manifest.files[name], self.manifest.block_size)
        return self._files[name]

    def document(self, part: Part, tensors: Mapping[str, TensorSource] | None = None) -> Any:
        """Return a part's document with a `TensorSource` in place of each tensor; no tensor is read.

        Args:
            part: a part that has a document.
            tensors: the part's `tensors`, if they are known.
        """
        return self._decode(part, (self.tensors(part) if tensors is None else tensors).__getitem__)

    def tensors(self, part: Part) -> dict[str, TensorSource]:
        """Return a `TensorSource` for each tensor of a part by stored name; no tensor is read."""
        merged: dict[str, TensorSource] = {}
        for sources in map_in_threads(lambda name: tensors_in(self.file(name)), part.tensors, self.readers):
            duplicates = merged.keys() & sources.keys()
            if duplicates:
                raise damage_error(
                    self.path, f"{listed(sorted(duplicates))} is in more than one of {listed(part.tensors)}"
                )
            merged.update(sources)
        return merged

    def _load_json(self, part: Part) -> Any:
        assert part.document is not None
        file = self.file(part.document)
        if file.size > MAX_DOCUMENT_BYTES:
            raise damage_error(
                self.path, f"{file.name} has {file.size} bytes, and a document has at most {MAX_DOCUMENT_BYTES}"
            )
        return loads(file.read(0, file.size), part.document)

    def _read_document(self, part: Part | None) -> Any:
        """Return a part's document with its tensors; None if there is no document."""
        return None if part is None or part.document is None else _read_tensors(self.document(part), {}, self.readers)

    def _decode(self, part: Part, tensor: Callable[[str], Any]) -> Any:
        document = self._load_json(part)
        try:
            return decode(document, tensor)
        except KeyError as error:
            raise damage_error(self.path, f"{part.document} names the tensor {error}, which does not exist") from error
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise damage_error(self.path, f"{part.document} cannot be read: {error}") from error

    def _document_tensor_names(self, part: Part) -> set[str]:
        names: set[str] = set()
        if part.document is not None:
            self._decode(part, names.add)
        return names


class Weights(Mapping[str, Any]):
    """A mapping of names to parameters and buffers. Each value is read and verified when it is accessed.

    Args:
        values: stored values, with a `TensorSource` for each tensor.
        aliases: ``{tied: first}`` for tied names.
        readers: number of parallel reads.
    """

    def __init__(self, values: Mapping[str, Any], aliases: Mapping[str, str], readers: int) -> None:
        self._values = dict(values)
        self._aliases = {
            tied: first for tied, first in aliases.items() if first in self._values and tied not in self._values
        }
        self._readers = readers

    def __getitem__(self, name: str) -> Any:
        value = self.stored(name)
        return value.read() if isinstance(value, TensorSource) else value

    def __iter__(self) -> Iterator[str]:
        yield from self._values
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._values) + len(self._aliases)

    def sources(self) -> dict[str, TensorSource]:
        """Return a `TensorSource` (with shape and dtype) per tensor, including tied names; nothing is read."""
        return {name: source for name in self if isinstance(source := self.stored(name), TensorSource)}

    def with_values(self, others: Mapping[str, TensorSource]) -> Weights:
        """Return these weights with the values of ``others`` of equal name and shape, converted to the same dtypes."""
        values = dict(self._values)
        for name, source in others.items():
            own = values.get(name)
            # A buffer that has changed its shape since the last update of the averages has no average.
            if isinstance(own, TensorSource) and own.shape == source.shape:
                values[name] = source if source.dtype == own.dtype else CastSource(source.file, source.entry, own.dtype)
        return Weights(values, self._aliases, self._readers)

    def with_hooked(self, values: Mapping[str, Any], replaced: Container[str]) -> Weights:
        """Return these weights with ``values`` in place of those whose names are in ``replaced``."""
        if not values:
            return self
        kept = {name: self.stored(name) for name in self if name not in replaced}
        return Weights({**kept, **values}, {}, self._readers)

    def staged(self, regions: Mapping[str, Region] | None = None) -> dict[str, Any]:
        """Read all values, or only the given regions of some tensors. Tied names share one object.

        Args:
            regions: the regions to read, by name. A tensor with a region is returned as a `ParameterShard`, and any
                other tensor is returned whole.

        Raises:
            CheckpointError: the stored bytes are damaged.
        """
        wanted_regions = {} if regions is None else dict(regions)

        def read(name: str) -> Any:
            value, region = self.stored(name), wanted_regions.get(name)
            if not isinstance(value, TensorSource):
                return value
            return value.read() if region is None else ParameterShard(value.read(region), value.shape, region)

        stored = list(self._values)
        loaded = dict(zip(stored, map_in_threads(read, stored, self._readers), strict=True))
        return {**loaded, **{tied: loaded[first] for tied, first in self._aliases.items()}}

    def stored(self, name: str) -> Any:
        """Return a value as it is stored: a `TensorSource` for a tensor of a file, which is not read."""
        return self._values[self._aliases.get(name, name)]


def load(path: str | os.PathLike[str]) -> CheckpointReader:
    """Open a checkpoint at a path or URL. Only its manifest is read.

    Raises:
        CheckpointError: there is no checkpoint at the path, or the checkpoint is incomplete or has another format.
        StorageError: the storage failed or did not answer; a subclass of `CheckpointError`.
    """
    folder = existing_folder(os.fspath(path))
    content = read_if_there(folder, MANIFEST, MAX_MANIFEST_BYTES + 1)
    if content is None:
        raise CheckpointError(
            f"{folder.path!r} is not a complete checkpoint: {MANIFEST} is missing, or not a regular file.",
            "a checkpoint is a folder whose manifest is written last, so without it the save did not finish.",
            "check the path, or use an earlier checkpoint; for files of another library, see "
            "drivetrain.checkpoint.convert.",
        )
    return CheckpointReader(folder, decode_manifest(content, folder.path))


def _read_tensors(value: Any, wanted_regions: Mapping[int, Region], readers: int) -> Any:
    """Return a decoded document with each `TensorSource` replaced by its tensor, or by the wanted region of its tensor.

    ``wanted_regions`` maps the `id` of a `TensorSource` to the region to read.
    """
    sources: dict[int, TensorSource] = {}
    _collect_sources(value, sources)

    def read(source: TensorSource) -> torch.Tensor | ParameterShard:
        region = wanted_regions.get(id(source))
        values = source.read(region)
        return values if region is None else ParameterShard(values, source.shape, region)

    values = map_in_threads(read, sources.values(), readers)
    return _replace_sources(value, dict(zip(sources, values, strict=True)))


def _collect_sources(value: Any, sources: dict[int, TensorSource], within_subclasses: bool = True) -> None:
    if isinstance(value, TensorSource):
        sources[id(value)] = value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _collect_sources(part, sources, within_subclasses)
    elif isinstance(value, FlattenedTensor) and within_subclasses:
        _collect_sources(dict(value.tensors), sources)


def _replace_sources(value: Any, replacements: Mapping[int, Any]) -> Any:
    if isinstance(value, TensorSource):
        return replacements[id(value)]
    if isinstance(value, dict):
        return type(value)({key: _replace_sources(part, replacements) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_replace_sources(part, replacements) for part in value)
    if isinstance(value, FlattenedTensor):
        return value.map(lambda part: _replace_sources(part, replacements)).restore()
    return value


def map_in_threads(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    """Return ``[work(item) for item in items]``, computed in up to ``threads`` threads."""
    items = list(items)
    threads = min(threads, len(items))
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, "checkpoint-read") as pool:
        return list(pool.map(work, items))
