"""Newcomers' mistakes get a clear message in time (I-10, I-17)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from mistakes import BATCHES, BUILT, EPOCH, FIRST, MISTAKES, START, Mistake, Run

from drivetrain import DrivetrainError

_WHEN = {0: START, 1: FIRST, BATCHES: EPOCH}


class _RecordingHandler(logging.Handler):
    """Records messages that contain ``value``, with the number of training steps begun by then."""

    def __init__(self, value: str, module: Any) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[str, int]] = []
        self._value = value
        self._module = module

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if self._value in line:
            self.lines.append((line, len(self._module.seen)))


def _run(run: Run) -> None:
    run.trainer.fit(run.module, *run.loaders, **run.more)


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if not one.is_warning], ids=lambda one: one.name)
def test_a_mistake_is_refused_in_time(tmp_path: Path, mistake: Mistake) -> None:  # I-10, I-17
    try:
        run = mistake.make(tmp_path)
    except DrivetrainError as found:
        when, error = BUILT, found
    else:
        assert run is not None
        with pytest.raises(DrivetrainError) as caught:
            _run(run)
        when, error = _WHEN[len(getattr(run.module, "seen", []))], caught.value
    assert when == mistake.when
    assert mistake.value in error.what
    assert mistake.why in error.why
    assert mistake.fix in error.fix


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if one.is_warning], ids=lambda one: one.name)
def test_a_mistake_is_warned_about_in_time(tmp_path: Path, mistake: Mistake) -> None:  # I-10, I-17
    run = mistake.make(tmp_path)
    assert run is not None
    listening, logger = _RecordingHandler(mistake.value, run.module), logging.getLogger("drivetrain")
    logger.addHandler(listening)
    try:
        _run(run)
    except DrivetrainError:
        assert mistake.when == FIRST  # a message announced that the epoch's end would refuse it
    finally:
        logger.removeHandler(listening)
    ((line, seen),) = listening.lines
    assert _WHEN[seen] == mistake.when
    assert mistake.why in line
    assert mistake.fix in line


def test_there_are_sixty_mistakes() -> None:
    assert len({one.name for one in MISTAKES}) == len(MISTAKES) >= 60
    assert all(one.value and one.why and one.fix for one in MISTAKES)
