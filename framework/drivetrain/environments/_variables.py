"""Reads the environment variables that launchers and clusters set."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from drivetrain.errors import ConfigurationError

# The range of ports for jobs lies below Linux's ephemeral ports, which start at 32768, and above the ports of services.
_FIRST_PORT, _PORT_COUNT = 20_000, 10_000


class Variables:
    """The environment variables of a launcher or cluster. Errors name the variable that is wrong.

    Args:
        variables: the variables, as in ``os.environ``.
        launcher: the name of the launcher that sets the variables, for errors.
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
            ConfigurationError: none of the variables is set, or the value is not a non-negative integer.
        """
        for name in names:
            if self._values.get(name):
                return self._parse(name, self._values[name])
        raise ConfigurationError(
            f"{' or '.join(names)} is not set",
            f"{self._launcher} was detected or chosen as the environment, and sets this variable",
            "start the processes with that launcher, or choose another with Fit(environment=...)",
        )

    def integer_or(self, default: int, *names: str) -> int:
        """Return the value of the first of ``names`` that is set, or ``default`` if none is set."""
        return default if self.text(*names) is None else self.integer(*names)

    def port(self) -> int | None:
        """Return the value of ``MASTER_PORT``, or None if the variable is not set.

        Raises:
            ConfigurationError: the value is not a port.
        """
        if self.text("MASTER_PORT") is None:
            return None
        port = self.integer("MASTER_PORT")
        if not 0 < port < 2**16:
            raise ConfigurationError(
                f"MASTER_PORT={port} is not a port", "ports are from 1 to 65535", "set MASTER_PORT to a free port"
            )
        return port

    def refuse(self, names: Iterable[str], why: str, fix: str) -> ConfigurationError:
        """Return an error that shows the values of the variables ``names``."""
        shown = ", ".join(f"{name}={self._values[name]}" for name in names if name in self._values)
        return ConfigurationError(f"{shown} cannot be right", why, fix)

    def _parse(self, name: str, value: str) -> int:
        if not value.strip().isdecimal():
            raise ConfigurationError(
                f"{name}={value!r} is not a number",
                f"{self._launcher} sets {name} to a non-negative integer",
                f"correct {name}, or unset {name} so that the launcher sets the variable",
            )
        return int(value)


def job_port(*job: str) -> int:
    """Return a port that is derived from ``job``, the words of a job's name. Two jobs rarely get the same port."""
    return _FIRST_PORT + zlib.crc32("/".join(job).encode()) % _PORT_COUNT
