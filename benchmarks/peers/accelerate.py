"""Accelerate: the user's own loop, over objects returned by ``accelerator.prepare``.

The loop itself decides when to log: at the interval that other frameworks have by default. Typical adds a CSV file
(Accelerate has no CSV tracker), its tqdm bar showing the value at the same steps, and a check whether to save.
"""

from __future__ import annotations

from contextlib import nullcontext

from accelerate import Accelerator
from accelerate.utils import tqdm

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.peers.csv_rows import CSVRows
from benchmarks.work import EVERY, NEVER, Way, Work


def train(work: Work, way: Way, steps: int) -> float:
    with on_a_terminal() if way.typical else nullcontext("") as folder:
        accelerator = Accelerator(cpu=True)
        net = work.net()
        model, optimizer, batches = accelerator.prepare(net, work.optimizer(net), work.loader(steps))
        loss_of, names = work.loss, way.names
        rows = CSVRows(folder, names) if way.typical else None
        if way.typical:
            batches = tqdm(batches)
        for step, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            if names and step % EVERY == 0:
                values = {name: loss.detach() for name in names}
                accelerator.log(values, step)
                if rows is not None:
                    rows.row(step, values)
                    batches.set_postfix(loss=loss.item())
            if way.typical and step % NEVER == 0:
                accelerator.save_state(folder)
        if rows is not None:
            rows.close()
    return checksum(net)
