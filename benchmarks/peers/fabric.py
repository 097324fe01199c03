"""Lightning's Fabric: the user's own loop, over objects returned by ``fabric.setup``.

The loop itself decides when to log: at the interval that other frameworks have by default. Typical adds Fabric's CSV
logger, a tqdm bar showing the value at the same steps, and a check whether to save.
"""

from __future__ import annotations

from contextlib import nullcontext

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from tqdm import tqdm

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.work import EVERY, NEVER, Way, Work


def train(work: Work, way: Way, steps: int) -> float:
    with on_a_terminal() if way.typical else nullcontext("") as folder:
        fabric = Fabric(accelerator="cpu", devices=1, loggers=[CSVLogger(folder)] if way.typical else None)
        net = work.net()
        model, optimizer = fabric.setup(net, work.optimizer(net))
        batches = fabric.setup_dataloaders(work.loader(steps))
        loss_of, names = work.loss, way.names
        if way.typical:
            batches = tqdm(batches)
        for step, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            fabric.backward(loss)
            optimizer.step()
            if names and step % EVERY == 0:
                fabric.log_dict({name: loss.detach() for name in names}, step)
                if way.typical:
                    batches.set_postfix(loss=loss.item())
            if way.typical and step % NEVER == 0:
                fabric.save(f"{folder}/checkpoint.pt", {"model": model, "optimizer": optimizer})
    return checksum(net)
