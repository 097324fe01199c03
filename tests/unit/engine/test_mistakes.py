"""Newcomers' mistakes get a clear message in time (I-10, I-17)."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from mistakes import BATCHES, BUILT, EPOCH, FIRST, MISTAKES, START, Mistake

from drivetrain import DrivetrainError

_WHEN = {0: START, 1: FIRST, BATCHES: EPOCH}


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if not one.is_warning], ids=lambda one: one.name)
def test_a_mistake_is_refused_in_time(tmp_path: Path, mistake: Mistake) -> None:  # I-10, I-17
    try:
        run = mistake.make(tmp_path)
    except DrivetrainError as found:
        when, error = BUILT, found
    else:
        assert run is not None
        with pytest.raises(DrivetrainError) as caught:
            run.trainer.fit(run.module, *run.loaders, **run.more)
        when, error = _WHEN[len(getattr(run.module, "seen", []))], caught.value
    assert when == mistake.when
    assert mistake.value in error.what
    assert mistake.why in error.why
    assert mistake.fix in error.fix


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if one.is_warning], ids=lambda one: one.name)
def test_a_mistake_is_warned_about_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Mistake
) -> None:  # I-10, I-17
    run = mistake.make(tmp_path)
    assert run is not None
    found: list[tuple[str, int]] = []

    def record(record: logging.LogRecord) -> bool:
        if mistake.value in record.getMessage():
            found.append((record.getMessage(), len(run.module.seen)))
        return True

    logger = logging.getLogger("drivetrain")
    monkeypatch.setattr(logger, "filters", [*logger.filters, record])
    # Some messages of the first window announce that the epoch's end will refuse the run.
    with suppress(DrivetrainError) if mistake.when == FIRST else nullcontext():
        run.trainer.fit(run.module, *run.loaders, **run.more)
    ((line, steps),) = found
    assert _WHEN[steps] == mistake.when
    assert mistake.why in line
    assert mistake.fix in line


def test_there_are_sixty_mistakes() -> None:
    assert len({one.name for one in MISTAKES}) == len(MISTAKES) >= 60
    assert all(one.value and one.why and one.fix for one in MISTAKES)
