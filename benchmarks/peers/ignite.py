"""Ignite: the user's own step, run by an `Engine`.

A step returns its values, and a handler records them at the interval that other frameworks have by default. Typical
adds Ignite's progress bar, a CSV file (Ignite has no CSV logger), and a `Checkpoint` that is never due.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.tqdm_logger import ProgressBar

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.peers.csv_rows import CSVRows
from benchmarks.work import EVERY, NEVER, Way, Work


def train(work: Work, way: Way, steps: int) -> float:
    with on_a_terminal() if way.typical else nullcontext("") as folder:
        net = work.net()
        optimizer = work.optimizer(net)
        loss_of, names = work.loss, way.names
        rows = CSVRows(folder, names) if way.typical else None
        seen: dict[str, float] = {}

        def step(engine: Engine, batch: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            return {name: loss.detach() for name in names} if names else None

        def take(engine: Engine) -> None:
            seen.update((name, value.item()) for name, value in engine.state.output.items())
            if rows is not None:
                rows.row(engine.state.iteration, seen)

        trainer = Engine(step)
        if names:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=EVERY), take)
        if way.typical:
            ProgressBar().attach(trainer, output_transform=lambda output: output)
            saver = Checkpoint({"model": net, "optimizer": optimizer}, DiskSaver(folder))
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=NEVER), saver)
        trainer.run(work.loader(steps), max_epochs=1)
        if rows is not None:
            rows.close()
    return checksum(net)
