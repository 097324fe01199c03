"""Reads the environment variables in which launchers and clusters say who a process is."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from drivetrain.errors import ConfigurationError

# Below Linux's ephemeral ports (32768 and up), above those that services have.
_FIRST_PORT, _PORTS = 20_000, 10_000


class Variables:
    """The variables of one environment, read with errors that name them.

    Args:
        variables: as in ``os.environ``.
        launcher: who should have set them, for the error.
    """

    __slots__ = ("_launcher", "_values")

    def __init__(self, variables: Mapping[str, str], launcher: str) -> None:
        self._values = dict(variables)
        self._launcher = launcher

    def text(self, *names: str) -> str | None:
        """Return the value of the first of ``names`` that is set and not empty."""
        return next((self._values[name] for name in names if self._values.get(name)), None)

    def integer(self, *names: str) -> int:
        """Return the value of the first of ``names`` that is set.

        Raises:
            ConfigurationError: none is set, or the value is not a whole number from 0 up.
        """
        for name in names:
            if self._values.get(name):
                return self._parse(name, self._values[name])
        raise ConfigurationError(
            f"{' or '.join(names)} is not set",
            f"this process was taken for one that {self._launcher} started, which sets it",
            "start the processes with that launcher, or name another one with Fit(environment=...)",
        )

    def integer_or(self, default: int, *names: str) -> int:
        """Return the value of the first of ``names`` that is set, else ``default``."""
        return default if self.text(*names) is None else self.integer(*names)

    def port(self) -> int | None:
        """Return ``MASTER_PORT`` where it is set.

        Raises:
            ConfigurationError: it is no port.
        """
        if self.text("MASTER_PORT") is None:
            return None
        port = self.integer("MASTER_PORT")
        if not 0 < port < 2**16:
            raise ConfigurationError(
                f"MASTER_PORT={port} is not a port", "ports are from 1 to 65535", "set it to one that is free"
            )
        return port

    def refuse(self, names: Iterable[str], why: str, fix: str) -> ConfigurationError:
        """Return the error that shows the variables ``names`` with their values."""
        shown = ", ".join(f"{name}={self._values[name]}" for name in names if name in self._values)
        return ConfigurationError(f"{shown} cannot be right", why, fix)

    def _parse(self, name: str, value: str) -> int:
        if not value.strip().isdecimal():
            raise ConfigurationError(
                f"{name}={value!r} is not a number",
                f"{self._launcher} sets it to a whole number from 0 up",
                f"correct {name}, or unset it where the launcher should set it",
            )
        return int(value)


def job_port(*job: str) -> int:
    """Return a port that all processes of a job compute alike and two jobs on one node hardly share."""
    return _FIRST_PORT + zlib.crc32("/".join(job).encode()) % _PORTS
