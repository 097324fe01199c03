"""What goes into a checkpoint, as this rank has it: encoded, checked and, where asked for, copied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard, Region, Span
from drivetrain.checkpoint._format.documents import dumps, encode
from drivetrain.checkpoint._format.manifest import CheckpointMetadata
from drivetrain.checkpoint._format.pinned_copies import pinned_copies
from drivetrain.checkpoint._format.tensor_file import Spec, check_storable, in_file_order
from drivetrain.checkpoint._format.write_plan import DEFAULT_SIZES, PlannedFile, Sizes, plan_files
from drivetrain.errors import CheckpointError

TensorOrShard = torch.Tensor | ParameterShard


@dataclass(slots=True)
class Contents:
    """What one rank has of a checkpoint. Every rank gives the same names in the same order, and its own values.

    Attributes:
        weights: by parameter name: tensors that every rank holds whole, or what it holds of them; what is no tensor
            (an ``_extra_state``) is kept too.
        facts: what goes into the manifest.
        aliases: tied names and what they are tied to, ``{tied: first}``; the tied ones are left out of the weights.
        optimizers: their states by name, ``{"state": {name: {key: value}}, "param_groups": [...]}``.
        callbacks: tensors by the callback's key and their name; as the weights, whole or spread over the ranks.
        state: nested JSON-able values and tensors; rank 0's is stored. None for no such document.
        rank_state: the same, of which every rank's own is stored.
        digest: of each file, besides its checksums; rank 0's choice counts.
    """

    weights: Mapping[str, Any]
    metadata: CheckpointMetadata = field(default_factory=CheckpointMetadata)
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: Sequence[Mapping[str, Any]] = ()
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    state: Any = None
    rank_state: Any = None
    digest: str | None = None


@dataclass(slots=True)
class StagedPart:
    """A document and the tensors that were set aside from it.

    Attributes:
        stem: how the names of its files begin.
        role: "weights", "optimizer", "callback", "state" or "rank".
        document: the text of the JSON file; None where there is none, or another rank writes it.
        tensors: by name, in order.
        key: the callback's.
        specs: of the tensors, made once: there may be many.
    """

    stem: str
    role: str
    document: bytes | None
    tensors: dict[str, TensorOrShard]
    sizes: Sizes
    key: str = ""
    specs: list[Spec] = field(init=False)

    def __post_init__(self) -> None:
        self.specs = [Spec(name, held.dtype, tuple(held.shape)) for name, held in self.tensors.items()]

    def shards(self) -> dict[str, ParameterShard]:
        return {name: held for name, held in self.tensors.items() if isinstance(held, ParameterShard)}

    def digest(self) -> str:
        """What all ranks must have alike: everything, but of rank 0's state only what is spread over the ranks."""
        lines = [
            f"{spec.name} {spec.dtype} {list(spec.shape)} {isinstance(self.tensors[spec.name], ParameterShard)}"
            for spec in self.specs
            if self.role != "state" or isinstance(self.tensors[spec.name], ParameterShard)
        ]
        return hashlib.sha256("\n".join([self.stem, self.key, *lines]).encode()).hexdigest()

    def planned(self, rank: int, world_size: int, specs: Sequence[Spec] | None = None) -> list[PlannedFile]:
        """Return the files of the tensors (or of ``specs`` instead), and who writes them."""
        specs = self.specs if specs is None else specs
        if self.role in ("weights", "optimizer", "callback"):
            return plan_files(self.stem, specs, world_size, self.sizes)
        owner = 0 if self.role == "state" else rank
        return [PlannedFile(f"{self.stem}.safetensors", owner, tuple(in_file_order(specs)))] if specs else []


@dataclass(slots=True)
class StagedCheckpoint:
    """A checkpoint that is ready to be written.

    Attributes:
        parts: what this rank has.
        facts: for the manifest.
        aliases: for the manifest.
        sizes: how it is split.
        digest: of each file, besides its checksums.
        problem: why this rank has nothing to write; told to the others when they meet.
    """

    parts: list[StagedPart]
    metadata: CheckpointMetadata
    aliases: dict[str, str]
    sizes: Sizes
    digest: str | None = None
    problem: CheckpointError | None = None

    def total(self, world_size: int) -> tuple[int, int]:
        """Return how many bytes all ranks together are going to write, in how many files, as rank 0 can tell.

        What each rank keeps of its own is taken to be as large as rank 0's.
        """
        nbytes = files = 0
        for part in self.parts:
            ranks = world_size if part.role == "rank" else 1
            planned = part.planned(0, world_size)
            nbytes += ranks * sum(spec.nbytes for file in planned for spec in file.specs)
            nbytes += ranks * len(part.document or b"")
            files += ranks * (len(planned) + 1)
        return nbytes, files + 1


def stage(
    contents: Contents,
    rank: int,
    world_size: int,
    shard_of: Callable[[Any], TensorOrShard] = lambda held: held,
    snapshot: bool = False,
    sizes: Sizes = DEFAULT_SIZES,
) -> StagedCheckpoint:
    """Make a checkpoint's contents ready to be written. Talks to nobody.

    What cannot be stored is not raised here, where the other ranks would wait, but by `commit`, on all of them.

    Args:
        contents: what this rank has.
        rank: this rank.
        world_size: among how many.
        shard_of: the strategy's: turns a sharded value into the `ParameterShard` that this rank holds.
        snapshot: copy what this rank is going to write, so that training may go on meanwhile.
        sizes: how it is split.
    """
    try:
        parts = list(_parts(contents, rank, shard_of, sizes))
        unexpected: dict[str, Any] = {}
        encode(contents.metadata.progress, unexpected, "progress")
        encode(contents.metadata.hyper_parameters, unexpected, "hyper_parameters")
        encode(contents.metadata.data_hyper_parameters, unexpected, "data_hyper_parameters")
        for part in parts:
            for name, held in part.tensors.items():
                _check(part, name, held)
        if snapshot:
            _copy(parts, rank, world_size)
    except CheckpointError as error:
        return StagedCheckpoint([], contents.metadata, {}, sizes, problem=error)
    return StagedCheckpoint(parts, contents.metadata, dict(contents.aliases), sizes, contents.digest)


def _check(part: StagedPart, name: str, held: TensorOrShard) -> None:
    if not isinstance(held, ParameterShard):
        check_storable(f"{part.stem}: {name}", held)
        return
    check_storable(f"{part.stem}: {name}", held.local)
    if part.role == "rank":
        raise CheckpointError(
            f"{part.stem}: {name!r} is spread over the ranks.",
            "this part is each rank's own.",
            "keep a local tensor in it.",
        )


def _parts(
    contents: Contents, rank: int, shard_of: Callable[[Any], TensorOrShard], sizes: Sizes
) -> Iterator[StagedPart]:
    first = rank == 0

    def part(stem: str, role: str, document: Any, tensors: Mapping[str, Any], key: str = "") -> StagedPart:
        text = None if document is None else dumps(document)
        return StagedPart(stem, role, text, {name: shard_of(value) for name, value in tensors.items()}, sizes, key)

    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in contents.weights.items():
        if name in contents.aliases:
            continue
        (tensors if isinstance(value, torch.Tensor | ParameterShard) else others)[name] = value
    document = encode(others, tensors)
    yield part("model", "weights", document if others and first else None, tensors)
    for number, state in enumerate(contents.optimizers):
        tensors = {}
        document = {
            "state": encode(state["state"], tensors),
            "param_groups": encode(state["param_groups"], tensors, "param_groups"),
        }
        yield part(f"optimizer-{number}", "optimizer", document if first else None, tensors)
    for number, (key, held) in enumerate(contents.callbacks.items()):
        yield part(f"callback-{number}", "callback", None, held, key)
    # What other ranks have of it may be spread over all of them too, hence every rank has this part.
    tensors = {}
    document = encode(contents.state, tensors)
    yield part("state", "state", document if first and contents.state is not None else None, tensors)
    tensors = {}
    document = encode(contents.rank_state, tensors)
    yield part(f"rank-{rank:05d}", "rank", None if contents.rank_state is None else document, tensors)


def contributed_region(shard: ParameterShard) -> Region | None:
    """Return the region that this rank brings to a checkpoint; None where it has nothing, or another speaks for it."""
    region = shard.region
    empty = region.start >= region.stop if isinstance(region, Span) else 0 in region.sizes
    return None if empty or not shard.speaks else region


def _copy(parts: list[StagedPart], rank: int, world_size: int) -> None:
    """Put copies in the host's memory in the place of what this rank writes, and wait for them."""
    places: list[tuple[StagedPart, str, torch.Tensor]] = []
    for part in parts:
        mine = {spec.name for file in part.planned(rank, world_size) if file.owner == rank for spec in file.specs}
        for name, held in part.tensors.items():
            if isinstance(held, ParameterShard):
                part.tensors[name] = replace(held, gather=None)
                if contributed_region(held) is not None:
                    places.append((part, name, held.local))
            elif name in mine:
                places.append((part, name, held))
    on_device = [tensor for _, _, tensor in places if tensor.device.type == "cuda"]
    pinned = iter(pinned_copies(on_device))
    for part, name, tensor in places:
        if tensor.device.type == "cuda":
            copy = next(pinned)
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        held = part.tensors[name]
        part.tensors[name] = replace(held, local=copy) if isinstance(held, ParameterShard) else copy
    for device in {tensor.device for tensor in on_device}:
        torch.cuda.synchronize(device)
