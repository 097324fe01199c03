"""Which job a process is of: two may have been given one address and port to meet at."""

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

# Options whose value differs from rank to rank, by their names.
_OF_A_RANK = re.compile(r"rank|(node|host|machine|process|proc|worker|task)[-_]?(id|index|number)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of one job have in common.

    Attributes:
        name: what the job is called by who started its processes, the same on all of them; "" where nobody said.
        user: the number of the user; "" where there is a name.
        folder: the working directory; likewise.
        command: of each word of the command line a digest, and whether it is a number that tells the rank. Only
            digests go over the network, and of secrets, which are short at times, not even these.
    """

    name: str = ""
    user: str = ""
    folder: str = ""
    command: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def new(cls) -> Self:
        """Return a job that no other is mistaken for, for who starts all of its processes."""
        return cls(os.urandom(8).hex())

    @classmethod
    def of_this_process(cls, name: str | None, ranks: Collection[int], command: Sequence[str] | None = None) -> Self:
        """Return the job of this process.

        Args:
            name: what it is called, where it is.
            ranks: numbers that tell this process from others of its job, which may stand in its command line.
            command: in place of ``sys.argv``.
        """
        if name:
            return cls(name)
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
        try:
            folder = os.getcwd()
        except OSError:  # it has been removed
            folder = ""
        words, _ = arguments_without_secrets(sys.argv if command is None else command)
        return cls("", user, folder, tuple(_words(words, ranks)))

    def encode(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Return what `encode` gave."""
        job = cls(**json.loads(text))
        return replace(job, command=tuple((digest, tells) for digest, tells in job.command))

    def why_another(self, other: Job) -> str:
        """Say how ``other`` differs, or "" where it is the same job."""
        if self.name or other.name:
            if self.name == other.name:
                return ""
            return f"it is {other.name or 'a job without a name'!r}, and this is {self.name or 'one without a name'!r}"
        if self.user != other.user:
            return f"it is of user {other.user}, and this is of user {self.user}"
        if self.folder != other.folder:
            return f"it was started in {other.folder}, and this in {self.folder}"
        if len(self.command) != len(other.command):
            return "it was started by another command line"
        for (mine, tells), (theirs, also) in zip(self.command, other.command, strict=True):
            if mine != theirs and not (tells and also):
                return "it was started by another command line"
        return ""


def _words(command: Sequence[str], ranks: Collection[int]) -> Iterator[tuple[str, bool]]:
    option = None  # the one that a word stands behind
    for word in command:
        name, has_value, value = word.partition("=")
        if has_value:
            tells = _is_one_of(value, ranks) and _OF_A_RANK.search(name) is not None
            yield _digest(name if tells else word), tells
            option = None
        elif word.startswith("-"):
            yield _digest(word), False
            option = word
        else:
            tells = _is_one_of(word, ranks) and (option is None or _OF_A_RANK.search(option) is not None)
            yield _digest(word), tells
            option = None


def _is_one_of(word: str, ranks: Collection[int]) -> bool:
    return word.isdecimal() and int(word) in ranks


def _digest(word: str) -> str:
    return hashlib.blake2b(word.encode(errors="surrogateescape"), digest_size=8).hexdigest()
