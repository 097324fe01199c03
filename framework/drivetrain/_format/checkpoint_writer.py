"""Writes a checkpoint collectively and atomically: either the whole checkpoint is committed, or nothing is."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from drivetrain._distributed.control_plane import ControlPlane, digest_of, refuse_differences
from drivetrain._distributed.shards import region_from
from drivetrain._format.checkpoint_folder import begin_checkpoint, join_checkpoint
from drivetrain._format.collective_errors import gather_or_raise, run_collectively
from drivetrain._format.file_writer import write_whole_file
from drivetrain._format.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    Part,
    encode_manifest,
    files_in_manifest,
)
from drivetrain._format.prepared_checkpoint import PreparedCheckpoint, PreparedPart, StateToSave, prepare_checkpoint
from drivetrain._format.tensor_file import DTYPES, NAMES, Spec
from drivetrain._format.tensor_writer import Regions, TensorOrShard, TensorWriter
from drivetrain._storage.publication import Publication
from drivetrain.errors import CheckpointError


def save(
    path: str,
    contents: StateToSave,
    control: ControlPlane,
    shards_of: Callable[[Mapping[str, Any]], dict[str, TensorOrShard]] = dict,
) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: a path or an fsspec URL. An existing checkpoint at this path is replaced atomically.
        contents: this rank's contents.
        control: the control plane.
        shards_of: returns tensors by name with a `ParameterShard` in place of each that is sharded.

    Raises:
        CheckpointError: the save failed. The error is raised on every rank and names the failed rank and the cause. An
            existing checkpoint at ``path`` is unchanged.
    """
    write_checkpoint(path, prepare_checkpoint(contents, control.rank, control.world_size, shards_of), control)


def write_checkpoint(path: str, prepared: PreparedCheckpoint, control: ControlPlane) -> None:
    """Write a prepared checkpoint. Collective; may run in a background thread that has its own ``control``.

    Raises:
        CheckpointError: see `save`.
    """
    publication: Publication | None = None
    problem: Exception | None = prepared.problem
    if control.rank == 0 and problem is None:
        try:
            publication = begin_checkpoint(path, *prepared.estimate_size(control.world_size))
        except Exception as error:
            problem = error
    try:
        agreement = _agree(path, prepared, publication, problem, control)
        if publication is None:
            publication = join_checkpoint(path, agreement.token)
        written, parts = _write(path, prepared, agreement, publication, control)
        _publish(path, prepared, publication, written, parts, control)
    except BaseException:
        if publication is not None:
            publication.abandon()
        raise


# Agreement before writing: the ranks compare what they save, and tell each other who writes which regions


@dataclass(frozen=True, slots=True)
class _Agreement:
    """What the ranks write together.

    Attributes:
        token: the token of rank 0's publication.
        regions: for each shared part, the regions that each rank contributes.
        hash_algorithm: name of the hash to store for each file, which rank 0 chooses; None for none.
    """

    token: str
    regions: list[list[Regions]]
    hash_algorithm: str | None


def _agree(
    path: str,
    prepared: PreparedCheckpoint,
    publication: Publication | None,
    problem: Exception | None,
    control: ControlPlane,
) -> _Agreement:
    """Check that what the ranks save fits together, and take the files of the state from rank 0. Collective."""
    shared = [part for part in prepared.parts if part.role != "rank"]
    values = {**_values_to_compare(shared), "the path": path} if control.world_size > 1 else {}
    state = [(spec.name, NAMES[spec.dtype], spec.shape, spec.nbytes) for part in shared[-1:] for spec in part.specs]
    request = (
        digest_of(values) if values else "",
        "" if publication is None else publication.token,
        [{name: region and astuple(region) for name, region in part.regions.items()} for part in shared],
        state if control.rank == 0 else [],
        prepared.hash_algorithm,
    )
    requests = gather_or_raise(control, f"The checkpoint {path!r} could not be written", request, problem)
    if any(other[0] != requests[0][0] for other in requests):
        refuse_differences(
            control.gather_objects(values),
            "the ranks write one checkpoint together, and each rank writes its shard of every tensor.",
            "build the same module, optimizers and callbacks on every rank, and the path on rank 0, which broadcasts "
            "it: a path that contains the time differs between ranks.",
            CheckpointError,
        )
    _, token, _, state, hash_algorithm = requests[0]
    shared[-1].specs = [Spec(name, DTYPES[dtype], shape, nbytes) for name, dtype, shape, nbytes in state]
    shared[-1].plan(control.rank, control.world_size)
    regions: list[list[Regions]] = [
        [{name: bounds and region_from(bounds) for name, bounds in other[2][number].items()} for other in requests]
        for number in range(len(shared))
    ]
    for part, regions_of_part in zip(shared, regions, strict=True):
        _check_coverage(path, part.specs, regions_of_part)
    return _Agreement(token, regions, hash_algorithm)


def _values_to_compare(shared: Sequence[PreparedPart]) -> dict[str, str]:
    """Return what must be the same on all ranks. Of the state, only the sharded tensors must be."""
    values: dict[str, str] = {}
    for part in shared:
        values[part.stem] = f"{part.role} {part.key}"
        values |= {
            f"{part.stem}: {spec.name}": f"{spec.dtype} of shape {spec.shape}"
            + (", sharded" if spec.name in part.regions else "")
            for spec in part.specs
            if part.role != "state" or spec.name in part.regions
        }
    return {**values, "the order of tensors": digest_of(list(values))}


def _check_coverage(path: str, specs: Sequence[Spec], rank_regions: Sequence[Regions]) -> None:
    for spec in specs:
        if spec.name not in rank_regions[0]:
            continue
        own = [regions[spec.name] for regions in rank_regions]
        count = sum(region.numel for region in own if region is not None)
        if count != spec.numel:
            raise CheckpointError(
                f"The checkpoint {path!r} cannot be written: {spec.name!r} has {spec.numel} elements, and the "
                f"ranks contribute {count}.",
                "exactly one rank must contribute each element.",
                "this is a bug in the strategy's shard_of.",
            )


# Writing of the files, and of the manifest at the end


def _write(
    path: str, prepared: PreparedCheckpoint, agreement: _Agreement, publication: Publication, control: ControlPlane
) -> tuple[dict[str, FileRecord], list[tuple[str, Part]]]:
    """Write this rank's files; return the records of all ranks' files, and the checkpoint's parts with their roles."""
    documents: dict[str, bytes] = {}
    parts: list[tuple[str, Part]] = []
    suffix, shared_regions = publication.suffix, iter(agreement.regions)
    for part in prepared.parts:
        stem = f"{part.stem}{suffix}"
        regions = [{}] * control.world_size if part.role == "rank" else next(shared_regions)
        for file in part.files:
            file.name, file.regions = f"{file.stem}{suffix}.safetensors", regions
        document = None if part.document is None else f"{stem}.json"
        if part.document is not None and document is not None:
            documents[document] = part.document
        index = f"{stem}.safetensors.index.json" if len(part.files) > 1 else None
        if index is not None and control.rank == 0:
            documents[index] = _encode_index(part)
        parts.append((part.role, Part(document, tuple(file.name for file in part.files), index)))
    files = [file for part in prepared.parts for file in part.files]
    publication.names = [*documents, *(file.name for file in files if file.owner == control.rank)]
    writer = TensorWriter(control, publication.folder, agreement.hash_algorithm)
    writer.write(files)
    problem = writer.problem
    try:
        for name, content in documents.items() if problem is None else ():
            created = publication.folder.create(name)
            writer.records[name] = write_whole_file(created, content, agreement.hash_algorithm)
    except Exception as error:
        problem = error
    written = (
        {name: astuple(record) for name, record in writer.records.items()},
        [(role, astuple(part)) for role, part in parts],
    )
    answers = gather_or_raise(control, f"The checkpoint {path!r} could not be written", written, problem)
    records = {name: FileRecord(*record) for records_of_rank, _ in answers for name, record in records_of_rank.items()}
    all_parts = [[(role, Part(*part)) for role, part in parts_of_rank] for _, parts_of_rank in answers]
    shared = [part for part in all_parts[0] if part[0] != "rank"]
    return records, shared + [part for parts_of_rank in all_parts for part in parts_of_rank if part[0] == "rank"]


def _encode_index(part: PreparedPart) -> bytes:
    """Return the index of a part's files in the format of Hugging Face's libraries."""
    file_names = {spec.name: file.name for file in part.files for spec in file.specs}
    total = sum(spec.nbytes for spec in part.specs)
    index = {"metadata": {"total_size": total}, "weight_map": {name: file_names[name] for name in part.tensors}}
    return (json.dumps(index, indent=1) + "\n").encode()


def _publish(
    path: str,
    prepared: PreparedCheckpoint,
    publication: Publication,
    written: dict[str, FileRecord],
    parts: Sequence[tuple[str, Part]],
    control: ControlPlane,
) -> None:
    """Write the manifest, which commits the checkpoint."""
    identifier = prepared.metadata.identifier or secrets.token_hex(16)

    def build_manifest() -> bytes:
        if control.rank != 0:
            return b""
        _check_sizes(path, publication, written)

        def of_role(role: str) -> tuple[Part, ...]:
            return tuple(part for each, part in parts if each == role)

        keys = [part.key for part in prepared.parts if part.role == "callback"]
        manifest = Manifest(
            identifier=identifier,
            world_size=control.world_size,
            metadata=prepared.metadata,
            files=written,
            weights=of_role("weights")[0],
            aliases=prepared.aliases,
            optimizers=of_role("optimizer"),
            callbacks=dict(zip(keys, of_role("callback"), strict=True)),
            state=next((part for part in of_role("state") if part.document), None),
            ranks=of_role("rank") if any(part.document for part in of_role("rank")) else (),
        )
        return encode_manifest(manifest)

    content = run_collectively(control, f"The checkpoint {path!r} could not be written", build_manifest)
    # If the reply to the upload is lost, rank 0 cannot know whether the manifest was stored, so all files are kept.
    publication.names.clear()
    run_collectively(
        control,
        f"The checkpoint {path!r} may not have been written",
        lambda: publication.publish(MANIFEST, content, files_in_manifest) if control.rank == 0 else None,
    )


def _check_sizes(path: str, publication: Publication, written: Mapping[str, FileRecord]) -> None:
    sizes = publication.folder.sizes(written)
    for name, record in written.items():
        if sizes.get(name) != record.size:
            raise CheckpointError(
                f"{path!r} could not be written: {name} has {record.size} bytes, and rank 0 sees "
                f"{sizes.get(name, 'nothing')}.",
                "all ranks must write to the same storage, where no other process may change the files.",
                f"save to a disk that all nodes share, or to an object store; this host is {os.uname().nodename}.",
            )
