"""LogQueue: what loggers get, in order, without a step that waits for its numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain._metrics.packing import Readback
from drivetrain.loggers import Logger


class LogQueue:
    """Rows for the loggers, each handed on once its numbers have come from their device, and none before another.

    On the CPU a row is handed on at once. On CUDA the copy of its numbers is queued behind the work that is under way,
    and looked at when the next row comes.
    """

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque()

    def put(self, loggers: Sequence[Logger], values: Mapping[str, Tensor | float], step: int) -> None:
        """Add a row, and hand on those that are complete.

        Args:
            loggers: who gets it.
            values: numbers and one-element tensors by name.
            step: the optimizer step that they belong to.
        """
        self._rows.append(_Row(loggers, values, step))
        self.hand_on()

    def hand_on(self, wait: bool = False) -> None:
        """Hand on the rows that are complete; where ``wait``, wait for the others.

        Raises:
            Exception: the first that a logger raised, once all of these rows were offered to all loggers.
        """
        rows = self._rows
        problem: Exception | None = None
        while rows and (wait or rows[0].is_complete):
            found = rows.popleft().hand_on()
            problem = problem or found
        if problem is not None:
            raise problem


class _Row:
    def __init__(self, loggers: Sequence[Logger], values: Mapping[str, Tensor | float], step: int) -> None:
        self._loggers = list(loggers)
        self._values: dict[str, Any] = dict(values)
        self._step = step
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._names = list(tensors)
        self._readback = Readback(list(tensors.values())) if tensors else None

    @property
    def is_complete(self) -> bool:
        return self._readback is None or self._readback.has_arrived

    def hand_on(self) -> Exception | None:
        if self._readback is not None:
            self._values.update(zip(self._names, self._readback.numbers(), strict=True))
        problem = None
        for logger in self._loggers:
            try:
                logger.log_metrics(self._values, self._step)
            except Exception as error:  # the others are to have the row
                problem = problem or error
        return problem
