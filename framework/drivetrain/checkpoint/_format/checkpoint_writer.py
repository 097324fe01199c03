"""Writes a checkpoint: all ranks together, and either all of it or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain.checkpoint._format.checksums import sums_of
from drivetrain.checkpoint._format.collective_errors import agreed, tell
from drivetrain.checkpoint._format.gathered_writes import Gathering, Regions
from drivetrain.checkpoint._format.local_storage import LocalPlace
from drivetrain.checkpoint._format.manifest import FileRecord, Manifest, Part, seal, versions
from drivetrain.checkpoint._format.object_storage import ObjectPlace
from drivetrain.checkpoint._format.pieces import covered
from drivetrain.checkpoint._format.staging import Contents, Held, Staged, StagedPart, speaks_for, stage
from drivetrain.checkpoint._format.storage import Storage, Ticket, filesystem_of
from drivetrain.checkpoint._format.tensor_file import Spec
from drivetrain.checkpoint._format.write_handshake import Greeting, Outcome
from drivetrain.checkpoint._format.write_plan import USUAL, PlannedFile, Sizes
from drivetrain.errors import CheckpointError


def save(
    path: str,
    contents: Contents,
    control: ControlPlane,
    shard_of: Callable[[Any], Held] = lambda held: held,
    sizes: Sizes = USUAL,
) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: a path or an fsspec URL; a checkpoint that is there is replaced in one step.
        contents: what this rank has.
        control: between the ranks.
        shard_of: the strategy's.
        sizes: how it is split.

    Raises:
        CheckpointError: on every rank, with the rank and the cause; what was at ``path`` is as it was.
    """
    commit(path, stage(contents, control.rank, control.world_size, shard_of, sizes=sizes), control)


def commit(path: str, staged: Staged, control: ControlPlane) -> None:
    """Write what was staged. Collective; may run in a thread with a ``control`` of its own.

    Raises:
        CheckpointError: as `save` does.
    """
    place: Storage | None = None
    problem: Exception | None = staged.problem
    if control.rank == 0 and problem is None:
        try:
            place = _begin(path, staged, control.world_size)
        except Exception as error:
            problem = error
    try:
        meeting = _meet(path, staged, place, problem, control)
        if place is None:
            place = _join(path, meeting.ticket)
        written, parts = _write(path, staged, meeting, place, control)
        _conclude(path, staged, place, written, parts, control)
    except BaseException:
        if place is not None:
            place.abandon()
        raise


def _begin(path: str, staged: Staged, world_size: int) -> Storage:
    filesystem, root = filesystem_of(path)
    if filesystem is not None:
        return ObjectPlace.begin(filesystem, root)
    needed, files = staged.total(world_size)
    return LocalPlace.begin(root, needed, files)


def _join(path: str, ticket: Ticket) -> Storage:
    filesystem, root = filesystem_of(path)
    return LocalPlace.join(root, ticket) if filesystem is None else ObjectPlace.join(filesystem, root, ticket)


# The meeting: what each rank brings


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What the ranks told each other before anything was written.

    Attributes:
        ticket: to the place that rank 0 began.
        regions: for each part that is dealt among the ranks, what each rank brings.
        state: what rank 0's state holds.
        digest: what all of them compute of each file besides its checksums.
    """

    ticket: Ticket
    regions: list[list[Regions]]
    state: list[Spec]
    digest: str | None


def _meet(
    path: str, staged: Staged, place: Storage | None, problem: Exception | None, control: ControlPlane
) -> _Meeting:
    shared = _shared(staged)
    greeting = Greeting(
        path=path,
        ticket=None if place is None else place.ticket,
        digests=[part.digest() for part in shared],
        regions=[{name: speaks_for(shard) for name, shard in part.shards().items()} for part in shared],
        state=shared[-1].specs if shared and control.rank == 0 else [],
        digest=staged.digest,
    )
    words = tell(control, f"The checkpoint {path!r} could not be written", greeting.said(), problem)
    told = [Greeting.decode(one) for one in words]
    paths = [one.path for one in told]
    if len(set(paths)) > 1:
        raise CheckpointError(
            "The ranks save to different paths: "
            + ", ".join(f"rank {rank} to {other!r}" for rank, other in enumerate(paths[:8]))
            + ".",
            "they write one checkpoint together.",
            "make the path on rank 0 and broadcast it; a path with the time in it differs.",
        )
    if any(one.digests != told[0].digests for one in told):
        _name_the_difference(shared, control)
    assert told[0].ticket is not None
    regions = [[one.regions[number] for one in told] for number in range(len(shared))]
    state = told[0].state
    for part, brought in zip(shared, regions, strict=True):
        _check_cover(path, state if part.role == "state" else part.specs, brought)
    return _Meeting(told[0].ticket, regions, state, told[0].digest)


def _shared(staged: Staged) -> list[StagedPart]:
    return [part for part in staged.parts if part.role != "rank"]


def _name_the_difference(shared: Sequence[StagedPart], control: ControlPlane) -> NoReturn:
    mine = {
        f"{part.stem}: {spec.name}": f"{spec.dtype} of shape {spec.shape}"
        + (", sharded" if spec.name in part.shards() else "")
        for part in shared
        for spec in part.specs
        if part.role != "state" or spec.name in part.shards()
    }
    everyone = control.gather_objects(mine)
    lines = []
    for rank, theirs in enumerate(everyone):
        for name in list(dict.fromkeys([*everyone[0], *theirs])):
            if everyone[0].get(name) != theirs.get(name):
                lines.append(
                    f"{name}: {everyone[0].get(name, 'lacks')} on rank 0, {theirs.get(name, 'lacks')} on {rank}"
                )
    raise CheckpointError(
        "The ranks have different things to save: " + ("; ".join(lines[:5]) or "the same names in another order") + ".",
        "they write one checkpoint together, each its part of every tensor.",
        "build the same module, optimizers and callbacks on every rank.",
    )


def _check_cover(path: str, specs: Sequence[Spec], brought: Sequence[Regions]) -> None:
    for spec in specs:
        if spec.name not in brought[0]:
            continue
        count = covered([regions[spec.name] for regions in brought])
        if count != spec.numel:
            raise CheckpointError(
                f"The checkpoint {path!r} cannot be written: of {spec.name!r}, {spec.numel} elements, the ranks hold "
                f"{count}.",
                "each element must be spoken for by exactly one rank.",
                "this is an error of the strategy's shard_of.",
            )


# The files


def _write(
    path: str, staged: Staged, meeting: _Meeting, place: Storage, control: ControlPlane
) -> tuple[dict[str, FileRecord], list[tuple[str, Part]]]:
    """Write this rank's share; return its files, and the parts of the checkpoint as this rank knows them."""
    written: dict[str, FileRecord] = {}
    parts: list[tuple[str, Part]] = []
    problem: Exception | None = None
    dealt = iter(meeting.regions)
    for part in staged.parts:
        specs = meeting.state if part.role == "state" else None
        files = part.planned(control.rank, control.world_size, specs)
        files = [replace(file, name=place.named(file.name)) for file in files]
        regions = [{}] * control.world_size if part.role == "rank" else next(dealt)
        document = None if part.document is None else place.named(f"{part.stem}.json")
        try:
            # In step with the other ranks, hence whatever has happened so far.
            gathering = Gathering(part.tensors, regions, control, place, staged.sizes.piece, meeting.digest)
            written.update(gathering.write(files))
            if part.document is not None and document is not None and problem is None:
                written[document] = _put(place, document, part.document, meeting.digest)
            index = _index(part, files)
            if index is not None and control.rank == 0 and problem is None:
                name = place.named(f"{part.stem}.safetensors.index.json")
                written[name] = _put(place, name, index, meeting.digest)
        except Exception as error:
            problem = problem or error
        index_name = place.named(f"{part.stem}.safetensors.index.json") if len(files) > 1 else None
        parts.append((part.role, Part(document, tuple(file.name for file in files), index_name)))
    words = tell(control, f"The checkpoint {path!r} could not be written", Outcome(written, parts).said(), problem)
    told = [Outcome.decode(one) for one in words]
    everything: dict[str, FileRecord] = {}
    for one in told:
        everything.update(one.written)
    ranks = [part for one in told for part in one.parts if part[0] == "rank"]
    return everything, [part for part in told[0].parts if part[0] != "rank"] + ranks


def _index(part: StagedPart, files: Sequence[PlannedFile]) -> bytes | None:
    """The index that Hugging Face's libraries read, where there are several files."""
    if len(files) < 2:
        return None
    place = {spec.name: file.name for file in files for spec in file.specs}
    total = sum(spec.nbytes for file in files for spec in file.specs)
    index = {"metadata": {"total_size": total}, "weight_map": {name: place[name] for name in part.tensors}}
    return (json.dumps(index, indent=1) + "\n").encode()


def _put(place: Storage, name: str, content: bytes, digest: str | None) -> FileRecord:
    sums = sums_of(content)
    with place.open(name) as sink:
        sink.writelines([content])
    return FileRecord(sums.size, sums.text(), "" if digest is None else hashlib.new(digest, content).hexdigest())


def _conclude(
    path: str,
    staged: Staged,
    place: Storage,
    written: dict[str, FileRecord],
    parts: Sequence[tuple[str, Part]],
    control: ControlPlane,
) -> None:
    """Write the manifest, which makes it a checkpoint."""
    identifier = staged.facts.identifier or secrets.token_hex(16)

    def sealed() -> bytes:
        if control.rank != 0:
            return b""
        for name, record in written.items():
            _check_size(path, place, name, record.size, alone=control.world_size == 1)
        of_role: dict[str, list[Part]] = {"weights": [], "optimizer": [], "callback": [], "state": [], "rank": []}
        for role, part in parts:
            of_role[role].append(part)
        keys = [part.key for part in staged.parts if part.role == "callback"]
        manifest = Manifest(
            identifier=identifier,
            world_size=control.world_size,
            facts=staged.facts,
            files=written,
            weights=of_role["weights"][0],
            aliases=staged.aliases,
            optimizers=tuple(of_role["optimizer"]),
            callbacks=dict(zip(keys, of_role["callback"], strict=True)),
            state=next((part for part in of_role["state"] if part.files()), None),
            ranks=tuple(of_role["rank"]) if any(part.files() for part in of_role["rank"]) else (),
            versions=versions(),
        )
        return seal(manifest)

    content = agreed(control, f"The checkpoint {path!r} could not be written", sealed)
    # Whether the manifest is out, not even rank 0 knows where its answer is lost: nothing of it may be removed now.
    place.keep()
    agreed(
        control,
        f"The checkpoint {path!r} could not be written, or nobody knows",
        lambda: place.commit(content, identifier) if control.rank == 0 else None,
    )


def _check_size(path: str, place: Storage, name: str, size: int, alone: bool) -> None:
    try:
        seen = place.size(name)
    except FileNotFoundError:
        seen = None
    if seen == size:
        return
    there = "nothing" if seen is None else seen
    what = f"{path!r} could not be written: {name} had {size} bytes, and rank 0 sees {there}."
    if alone:
        raise CheckpointError(what, "something else removed or changed it.", "save where nothing else clears up.")
    raise CheckpointError(
        what,
        "all ranks must write to the same place.",
        f"save to a disk that all nodes share, or to an object store; this host is {os.uname().nodename}.",
    )
