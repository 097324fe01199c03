"""Job: identifies a job, because two jobs may be given the same rendezvous address and port."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

from drivetrain._config.secret_values import arguments_without_secrets
from drivetrain._runtime.working_directory import working_directory

# Names of options whose values differ from rank to rank.
_RANK_OPTION = re.compile(r"rank|(node|host|machine|process|proc|worker|task)[-_]?(id|index|number)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Job:
    """The properties that all processes of a job share.

    Attributes:
        name: the name of the job, equal on all of its processes; "" if the job has no name.
        user: the numeric id of the user; "" if the job has a name.
        folder: the working directory; "" if the job has a name.
        command: for each word of the command line, the digest of the word and whether the word is a number that
            identifies the rank. Only digests go over the network. Secrets are replaced before the digest is computed,
            because the digest of a short secret could be guessed.
    """

    name: str = ""
    user: str = ""
    folder: str = ""
    command: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def new(cls) -> Self:
        """Return a job with a unique name, for a process that starts all processes of the job."""
        return cls(os.urandom(8).hex())

    @classmethod
    def of_this_process(cls, name: str | None, ranks: Collection[int], command: Sequence[str] | None = None) -> Self:
        """Return the job of this process.

        Args:
            name: the name of the job, or None.
            ranks: numbers that identify this process within its job and may appear in its command line.
            command: the command line to use instead of ``sys.argv``.
        """
        if name:
            return cls(name)
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
        folder = working_directory() or ""
        words, _ = arguments_without_secrets(sys.argv if command is None else command)
        return cls("", user, folder, tuple(_digest_words(words, ranks)))

    def encode(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Return the job from the result of `encode`."""
        job = cls(**json.loads(text))
        return replace(job, command=tuple((digest, identifies_rank) for digest, identifies_rank in job.command))

    def describe_difference(self, other: Job) -> str:
        """Return how ``other`` differs from this job, or "" if both are the same job."""
        if self.name or other.name:
            if self.name == other.name:
                return ""
            other_name, own_name = (repr(job.name) if job.name else "a job without a name" for job in (other, self))
            return f"the other job is {other_name}, and this job is {own_name}"
        if self.user != other.user:
            return f"the other job belongs to user {other.user}, and this job to user {self.user}"
        if self.folder != other.folder:
            return f"the other job was started in {other.folder}, and this job in {self.folder}"
        if len(self.command) != len(other.command):
            return "the other job was started with another command line"
        for (digest, identifies_rank), (other_digest, other_identifies_rank) in zip(
            self.command, other.command, strict=True
        ):
            if digest != other_digest and not (identifies_rank and other_identifies_rank):
                return "the other job was started with another command line"
        return ""


def _digest_words(command: Sequence[str], ranks: Collection[int]) -> Iterator[tuple[str, bool]]:
    option = None  # the preceding option if the current word may be its value, else None
    for word in command:
        name, has_value, value = word.partition("=")
        if has_value:
            identifies_rank = _is_one_of(value, ranks) and _RANK_OPTION.search(name) is not None
            yield _digest(name if identifies_rank else word), identifies_rank
            option = None
        elif word.startswith("-"):
            yield _digest(word), False
            option = word
        else:
            identifies_rank = _is_one_of(word, ranks) and (option is None or _RANK_OPTION.search(option) is not None)
            yield _digest(word), identifies_rank
            option = None


def _is_one_of(word: str, ranks: Collection[int]) -> bool:
    return word.isdecimal() and int(word) in ranks


def _digest(word: str) -> str:
    return hashlib.blake2b(word.encode(errors="surrogateescape"), digest_size=8).hexdigest()
