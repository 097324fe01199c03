"""LimitedSource: a source of batches, and how many of its micro-batches a run reads."""

from __future__ import annotations

from drivetrain._data.batch_source import BatchSource
from drivetrain.errors import ConfigurationError


class LimitedSource:
    """A source of batches, and how many of its micro-batches a run reads. `measure` sets the limit and the lengths.

    Args:
        source: yields this rank's batches.
        setting: the limit as a number of micro-batches or as a fraction; None for no limit.
        name: the name of the setting, for errors.
    """

    limit: int | None
    """The limit of micro-batches of an epoch; None if the epoch ends with its data."""
    length: int | None
    """The expected micro-batches of an epoch; None if they are unknown."""
    length_is_exact: bool
    """Whether ``length`` is exact, rather than a loader's estimate."""

    def __init__(self, source: BatchSource, setting: int | float | None, name: str) -> None:
        self.source = source
        self._setting = setting
        self._name = name

    def measure(self, length: int | None) -> None:
        """Set the limit and the expected length.

        Args:
            length: the loader's number of micro-batches, which is the same on all ranks; None if it is unknown.

        Raises:
            ConfigurationError: the limit is a fraction of an unknown length, or rounds down to 0.
        """
        limit = self._limit_of(length)
        expected = limit if length is None else length if limit is None else min(limit, length)
        self.limit, self.length = limit, expected
        is_exact = self.source.shards_known and self.source.length_is_exact
        self.length_is_exact = is_exact or (limit is not None and limit == expected)

    def _limit_of(self, length: int | None) -> int | None:
        setting, name = self._setting, self._name
        if setting is None or (isinstance(setting, float) and setting == 1.0):
            return None
        if isinstance(setting, int):
            return setting
        if setting == 0.0:
            return 0
        if length is None:
            raise ConfigurationError(
                f"{name}={setting} with a loader of unknown length.",
                "a fraction of an unknown length cannot be computed.",
                f"give the number of micro-batches as an int, such as {name}=100.",
            )
        limit = int(length * setting)
        if limit == 0:
            raise ConfigurationError(
                f"{name}={setting} of {length} micro-batches rounds down to 0.",
                "nothing would be trained or measured.",
                f"raise {name} to at least {1 / length:.3g}, or use 0 to leave the loader out.",
            )
        return limit
