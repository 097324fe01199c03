"""Encodes and validates this rank's contents before writing and, for background saves, copies the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard, Region
from drivetrain._format.documents import dumps, encode
from drivetrain._format.manifest import CheckpointMetadata
from drivetrain._format.pinned_copies import pinned_copies
from drivetrain._format.tensor_file import Spec, check_storable, in_file_order
from drivetrain._format.tensor_writer import TensorFile, TensorOrShard, plan_files
from drivetrain.errors import CheckpointError


@dataclass(slots=True)
class StateToSave:
    """What one rank contributes to a checkpoint. All ranks pass the same names in the same order.

    Attributes:
        weights: unsharded tensors, shards, or other values (an ``_extra_state``), by parameter name.
        metadata: metadata for the manifest.
        aliases: maps each tied name to the first name of its tensor; values are stored only under first names.
        optimizers: optimizer states by parameter name, ``{"state": {name: {key: value}}, "param_groups": [...]}``.
        callbacks: tensors by the callback's key and by name, unsharded or sharded.
        state: nested JSON-able values and tensors; only those of rank 0 are stored. None if there is no state.
        rank_state: nested JSON-able values and tensors, stored for each rank. None if there is no such state.
        hash_algorithm: name of the hash to store for each file; None for none. The value on rank 0 is used.
    """

    weights: Mapping[str, Any]
    metadata: CheckpointMetadata = field(default_factory=CheckpointMetadata)
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: Sequence[Mapping[str, Any]] = ()
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    state: Any = None
    rank_state: Any = None
    hash_algorithm: str | None = None


@dataclass(slots=True)
class PreparedPart:
    """One part of a checkpoint: an encoded document and the tensors that it refers to.

    Attributes:
        stem: beginning of the names of the part's files.
        role: "weights", "optimizer", "callback", "state" or "rank".
        document: text of the JSON file; None if there is none, or another rank writes it.
        tensors: tensors and shards by name, in order.
        key: the callback's key; "" in other roles.
        specs: names, dtypes and shapes of the tensors.
        regions: the regions of the sharded tensors that this rank writes, by name; None for a region that is empty or
            that another rank writes.
        files: the files for the tensors.
    """

    stem: str
    role: str
    document: bytes | None
    tensors: dict[str, TensorOrShard]
    key: str
    specs: list[Spec]
    regions: dict[str, Region | None]
    files: list[TensorFile] = field(default_factory=list)

    def plan(self, rank: int, world_size: int) -> None:
        """Assign the tensors to files and the files to ranks."""
        if self.role in ("weights", "optimizer", "callback"):
            self.files = plan_files(self.stem, self.specs, self.tensors, world_size)
        elif self.specs:
            owner = 0 if self.role == "state" else rank
            self.files = [TensorFile(self.stem, owner, in_file_order(self.specs), self.tensors)]


@dataclass(slots=True)
class PreparedCheckpoint:
    """A checkpoint that is ready to be written.

    Attributes:
        parts: this rank's parts.
        metadata: metadata for the manifest.
        aliases: maps each tied name to the first name of its tensor.
        hash_algorithm: name of the hash to store for each file; None for none.
        problem: the error on this rank, which `write_checkpoint` raises on all ranks; None if there was none.
    """

    parts: list[PreparedPart]
    metadata: CheckpointMetadata
    aliases: dict[str, str]
    hash_algorithm: str | None = None
    problem: Exception | None = None

    def estimate_size(self, world_size: int) -> tuple[int, int]:
        """Return rank 0's estimate of the number of bytes and the number of files that all ranks will write.

        The rank states of the other ranks are assumed to be as large as the rank state of rank 0.
        """
        nbytes = files = 0
        for part in self.parts:
            ranks = world_size if part.role == "rank" else 1
            nbytes += ranks * (sum(spec.nbytes for spec in part.specs) + len(part.document or b""))
            files += ranks * (len(part.files) + 1)
        return nbytes, files + 1


def prepare_checkpoint(
    contents: StateToSave,
    rank: int,
    world_size: int,
    shards_of: Callable[[Mapping[str, Any]], dict[str, TensorOrShard]] = dict,
    copy: bool = False,
) -> PreparedCheckpoint:
    """Prepare a checkpoint's contents for writing. Not collective.

    Contents that cannot be stored do not raise an error here, because the other ranks would wait forever. Instead,
    `write_checkpoint` raises the error on all ranks.

    Args:
        contents: this rank's contents.
        rank: this rank.
        world_size: the number of ranks.
        shards_of: returns tensors by name with a `ParameterShard` in place of each that is sharded.
        copy: copy what this rank will write, so that training can continue during the write.
    """
    try:
        parts = list(_parts_of(contents, rank, shards_of))
        for part in parts:
            part.plan(rank, world_size)
        if copy:
            _copy_tensors(parts, rank)
    except Exception as error:
        return PreparedCheckpoint([], contents.metadata, {}, problem=error)
    return PreparedCheckpoint(parts, contents.metadata, dict(contents.aliases), contents.hash_algorithm)


def _parts_of(
    contents: StateToSave, rank: int, shards_of: Callable[[Mapping[str, Any]], dict[str, TensorOrShard]]
) -> Iterator[PreparedPart]:
    is_rank_0 = rank == 0

    def part(stem: str, role: str, document: Any, tensors: Mapping[str, Any], key: str = "") -> PreparedPart:
        text = None if document is None else dumps(document)
        values = shards_of(tensors)
        specs = check_storable(values, stem)
        regions = {name: _own_region(value) for name, value in values.items() if isinstance(value, ParameterShard)}
        if role == "rank" and regions:
            raise CheckpointError(
                f"{stem}: {next(iter(regions))!r} is sharded.",
                "each rank stores its own tensors in this part.",
                "save a local tensor instead.",
            )
        return PreparedPart(stem, role, text, values, key, specs, regions)

    tensors: dict[str, Any] = {}
    other_values: dict[str, Any] = {}
    for name, value in contents.weights.items():
        if name in contents.aliases:
            continue
        (tensors if isinstance(value, torch.Tensor | ParameterShard) else other_values)[name] = value
    document = encode(other_values, tensors)
    yield part("model", "weights", document if other_values and is_rank_0 else None, tensors)
    for number, state in enumerate(contents.optimizers):
        tensors = {}
        try:
            document = {
                "state": encode(state["state"], tensors),
                "param_groups": encode(state["param_groups"], tensors, "param_groups"),
            }
        except CheckpointError as error:
            raise CheckpointError(f"Optimizer {number}: {error.what}", error.why, error.fix) from error
        yield part(f"optimizer-{number}", "optimizer", document if is_rank_0 else None, tensors)
    for number, (key, value) in enumerate(contents.callbacks.items()):
        yield part(f"callback-{number}", "callback", None, value, key)
    # Every rank has this part, because tensors of the state may be sharded.
    tensors = {}
    document = encode(contents.state, tensors)
    yield part("state", "state", document if is_rank_0 and contents.state is not None else None, tensors)
    tensors = {}
    document = encode(contents.rank_state, tensors)
    yield part(f"rank-{rank:05d}", "rank", None if contents.rank_state is None else document, tensors)


def _own_region(shard: ParameterShard) -> Region | None:
    return shard.region if shard.is_primary and shard.region.numel else None


def _copy_tensors(parts: list[PreparedPart], rank: int) -> None:
    """Replace the tensors that this rank writes by copies in host memory, and wait for the copies."""
    sources: list[tuple[PreparedPart, str, torch.Tensor]] = []
    for part in parts:
        owned_names = {spec.name for file in part.files if file.owner == rank for spec in file.specs}
        for name, value in part.tensors.items():
            if isinstance(value, ParameterShard):
                part.tensors[name] = replace(value, gather=None)
                if part.regions[name] is not None:
                    sources.append((part, name, value.local))
            elif name in owned_names:
                sources.append((part, name, value))
    on_device = [tensor for _, _, tensor in sources if tensor.device.type == "cuda"]
    pinned = iter(pinned_copies(on_device))
    for part, name, tensor in sources:
        if tensor.device.type == "cuda":
            copy = next(pinned)
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        value = part.tensors[name]
        part.tensors[name] = replace(value, local=copy) if isinstance(value, ParameterShard) else copy
    for device in {tensor.device for tensor in on_device}:
        torch.cuda.synchronize(device)
