"""Programs in which something was found, shrunken: each is run again by `make test`."""

from __future__ import annotations

from typing import NamedTuple

from fuzz.program import (
    Change,
    Data,
    Log,
    Net,
    Optimizer,
    Program,
    Resume,
    Stop,
    Turn,
    Validation,
)


class Example(NamedTuple):
    """A program, and what it found."""

    name: str
    found: str
    program: Program


EXAMPLES = (
    Example(
        "a loss that is added to after it was logged",
        "I-01: loss_0 was 1.1466 for 1.1377",
        Program(data=Data(samples=4, batch=4), adds=True, logs=(Log(on_step=False, on_epoch=True),)),
    ),
    Example(
        "a number that float32 cannot hold",
        "I-01: a sum of 50331657 was logged as 50331656",
        Program(data=Data(samples=6), logs=(Log(what="large", on_step=False, on_epoch=True, reduce_fx="sum"),)),
    ),
    Example(
        "a scalar of NumPy's",
        "I-01: it was refused",
        Program(logs=(Log("on_train_batch_end", "numpy", on_step=False, on_epoch=True),)),
    ),
    Example(
        "the one element that trains",
        "I-01: a logged parameter was what it became",
        Program(net=Net(scale=True), logs=(Log(what="parameter", on_step=False, on_epoch=True),)),
    ),
    Example(
        "a second step within training_step in fp16",
        "I-02: gradients were 65,536 times too large, weights 2,180 off",
        Program(precision="16-mixed", manual=(Turn(repeats=2),)),
    ),
    Example(
        "a forward after a step under autocast",
        "I-02: it used the weights of before, 0.66 off",
        Program(precision="bf16-mixed", data=Data(samples=4, batch=1), manual=(Turn(), Turn())),
    ),
    Example(
        "the body unfrozen as the second epoch starts",
        "I-03: replicas of a static graph ended apart, 0.12 off",
        Program(
            strategy="ddp_static_graph",
            ranks=2,
            net=Net(frozen="body"),
            data=Data(samples=4, batch=4),
            epochs=2,
            changes=(Change(part="body"),),
        ),
    ),
    Example(
        "a batch sampler that promises too little",
        "I-04: two of four batches were left out",
        Program(data=Data(kind="batch_sampler", samples=4, batch=1, claims=-2)),
    ),
    Example(
        "a run without a step is asked to stop",
        "I-05: it went on to the epoch's end",
        Program(data=Data(samples=9), nothing="always", stop=Stop("should_stop", "on_train_batch_end", 0)),
    ),
    Example(
        "an optimizer that wants its closure",
        "I-06: {'closure': True} was refused",
        Program(data=Data(samples=4, batch=4), optimizers=(Optimizer("sam"),)),
    ),
    Example(
        "an optimizer that wants its closure, by hand",
        "I-06: the closure did not reach it (AssertionError)",
        Program(optimizers=(Optimizer("sam"),), manual=(Turn(closure=True),)),
    ),
    Example(
        "rank 0 joins, and its buffer is another tensor after each forward",
        "I-07: what it made of it went to everyone",
        Program(
            strategy="ddp",
            ranks=2,
            net=Net(buffer="reassigned"),
            data=Data(kind="iterable", samples=8, rising=True),
            epochs=2,
        ),
    ),
    Example(
        "a joiner's batch was taken to pieces before",
        "I-07: a KeyError at the end of an uneven epoch",
        Program(strategy="ddp", ranks=2, data=Data(kind="iterable", samples=8, spoils=True)),
    ),
    Example(
        "a loader that fills one buffer again and again",
        "I-09: a window held its last batch twice",
        Program(data=Data(kind="reused"), accumulate=2),
    ),
    Example(
        "validation within an epoch with dropout",
        "I-13: it drew from training's generators",
        Program(
            net=Net(dropout=0.3),
            data=Data(kind="batch_sampler", samples=4, batch=1),
            validation=Validation(samples=1, batch=1, interval=1),
        ),
    ),
    Example(
        "weights of 64 bits from processes that were started",
        "I-15: they came back in float32",
        Program(strategy="ddp", ranks=2, precision="64-true", launcher="fork"),
    ),
    Example(
        "layers of configure_model from processes that were started",
        "I-15: the caller's module had none",
        Program(strategy="ddp", ranks=2, late=True, launcher="fork"),
    ),
    Example(
        "a correlation goes on on fewer ranks",
        "I-16: 0.361 for 0.330",
        Program(
            strategy="ddp",
            ranks=2,
            data=Data(samples=12, shuffle=True),
            logs=(Log(what="pearson", on_step=False, on_epoch=True),),
            resume=Resume("on_train_batch_end", 1),
        ),
    ),
    Example(
        "saved after the epoch's validation, resumed on fewer ranks",
        "validation, which was over, ran once more",
        Program(strategy="ddp", ranks=2, validation=Validation(), resume=Resume("on_validation_end")),
    ),
)
