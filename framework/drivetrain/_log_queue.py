"""LogQueue: delivers logged rows to loggers in order, without making a step wait for values on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain._metrics.packing import Readback
from drivetrain.loggers import Logger


class LogQueue:
    """Holds rows until their values are on the host, and delivers them to the loggers in order.

    A row of CPU tensors and numbers is delivered immediately. The copy of CUDA tensors to the host is queued behind the
    current work of the device. Whether it is complete is checked when the next row is added.
    """

    def __init__(self) -> None:
        self.rows: deque[_Row] = deque()
        """The rows that are not delivered yet."""

    def put(
        self, loggers: Sequence[Logger], values: Mapping[str, Tensor | float], step: int, takes_step: bool = False
    ) -> None:
        """Add a row and deliver the rows that are complete.

        Args:
            loggers: the loggers that receive the row.
            values: numbers and one-element tensors by name.
            step: the optimizer step that the values belong to.
            takes_step: whether a value that is called "step" replaces ``step``, as in Lightning.
        """
        self.rows.append(_Row(loggers, values, step, takes_step))
        self.deliver()

    def deliver(self, wait: bool = False) -> None:
        """Deliver the rows whose values are on the host. With ``wait``, wait for the other rows and deliver them too.

        Raises:
            Exception: the first error of a logger, after the rows were delivered to all loggers.
        """
        rows = self.rows
        first_error: Exception | None = None
        while rows and (wait or rows[0].is_complete):
            error = rows.popleft().deliver()
            first_error = first_error or error
        if first_error is not None:
            raise first_error


class _Row:
    def __init__(
        self, loggers: Sequence[Logger], values: Mapping[str, Tensor | float], step: int, takes_step: bool = False
    ) -> None:
        self._loggers = list(loggers)
        self._takes_step = takes_step
        self._values: dict[str, Any] = dict(values)
        self._step = step
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._names = list(tensors)
        self._readback = Readback(list(tensors.values())) if tensors else None

    @property
    def is_complete(self) -> bool:
        return self._readback is None or self._readback.has_arrived

    def deliver(self) -> Exception | None:
        if self._readback is not None:
            self._values.update(zip(self._names, self._readback.numbers(), strict=True))
        first_error = None
        values, step = self._values, self._step
        if self._takes_step and "step" in values:
            values = dict(values)
            step = int(values.pop("step"))
        for logger in self._loggers:
            try:
                logger.log_metrics(values, step)
            except Exception as error:  # the other loggers still receive the row
                first_error = first_error or error
        return first_error
