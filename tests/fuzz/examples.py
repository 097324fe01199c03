"""Programs with past findings, shrunk; `make test` runs each of them."""

from __future__ import annotations

from typing import NamedTuple

from cpu_kernels import FP16
from oracle.program import (
    Average,
    Change,
    Data,
    Evaluation,
    Log,
    Net,
    Optimizer,
    Program,
    Resume,
    Scheduler,
    Stop,
    Turn,
    Validation,
)


class Example(NamedTuple):
    """A program, and its finding."""

    name: str
    found: str
    program: Program


EXAMPLES = (
    Example(
        "a loss that is added to after it was logged",
        "I-01: loss_0 was 1.1466 for 1.1377",
        Program(data=Data(samples=4, batch=4), adds_to_loss=True, logs=(Log(on_step=False, on_epoch=True),)),
    ),
    Example(
        "a value of the ranks that have data, logged in the hook that ends the epoch",
        "I-01: it was not reduced over the ranks, so rank 0 without data logged an earlier one",
        Program(
            strategy="ddp",
            ranks=3,
            data=Data(kind="sharded", samples=12, batch=1, workers=2, fewest_on_rank_0=True),
            logs=(Log("on_train_batch_start", "number", sync_dist=True),),
            stop=Stop(how="skip", at=2),
        ),
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
        Program(data=Data(kind="batch_sampler", samples=4, batch=1, length_error=-2)),
    ),
    Example(
        "samples that workers share, fewer on one rank than on the other",
        "I-04: torch's estimate ended the epoch, in training and in validation",
        Program(
            strategy="fsdp",
            ranks=2,
            data=Data(kind="sharded", samples=14, workers=2),
            validation=Validation(kind="sharded", samples=10, workers=2),
            logs=(Log("validation_step", on_step=False, on_epoch=True),),
        ),
    ),
    Example(
        "a schedule that goes by a length that is too short",
        "I-04: it ran out, and training went on with a rate of nothing",
        Program(
            strategy="ddp",
            ranks=2,
            data=Data(kind="batch_sampler", samples=9, length_error=-2),
            schedulers=(Scheduler("linear", "step"),),
        ),
    ),
    Example(
        "a rank that joins in validation, whose batch was taken to pieces before",
        "I-04, I-07: a KeyError under FSDP",
        Program(
            strategy="fsdp",
            ranks=2,
            data=Data(consumes_batch=True),
            validation=Validation(kind="iterable", samples=9, batch=1, length_error=2),
        ),
    ),
    Example(
        "a run without a step is asked to stop",
        "I-05: it went on to the epoch's end",
        Program(data=Data(samples=9), missing_loss="always", stop=Stop("should_stop", "on_train_batch_end", 0)),
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
            data=Data(kind="iterable", samples=8, fewest_on_rank_0=True),
            epochs=2,
        ),
    ),
    Example(
        "a joiner's batch was taken to pieces before",
        "I-07: a KeyError at the end of an uneven epoch",
        Program(strategy="ddp", ranks=2, data=Data(kind="iterable", samples=8, consumes_batch=True)),
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
        Program(strategy="ddp", ranks=2, configure_model=True, launcher="fork"),
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
    Example(
        "LBFGS with a rank that only joins, in double precision",
        "B-16: it exchanged its loss in another dtype, and the process aborted",
        Program(
            strategy="ddp",
            ranks=2,
            precision="64-true",
            data=Data(kind="sampler", samples=5, batch=1),
            optimizers=(Optimizer("lbfgs"),),
        ),
    ),
    Example(
        "a step's value to be reduced, in an epoch without a step",
        "H-03: each rank logged its own",
        Program(
            strategy="ddp",
            ranks=2,
            precision="16-mixed",
            data=Data(samples=4, batch=1),
            logs=(Log(on_step=False, on_epoch=True), Log(sync_dist=True)),
        ),
    ),
    Example(
        "layers of configure_model in another dtype than the precision's",
        "D-03: under FSDP they were all zeros",
        Program(strategy="fsdp", ranks=2, precision="64-true", data=Data(samples=4, batch=1), configure_model=True),
    ),
    Example(
        "attention with dropout in manual optimization",
        "I-02: backward ran within autocast, which cast products that the forward had made in float32",
        Program(
            strategy="ddp",
            precision="bf16-mixed",
            net=Net(family="transformer", dropout=0.3),
            data=Data(samples=4, batch=1),
            optimizers=(Optimizer("momentum"),),
            manual=(Turn(repeats=2),),
            epochs=2,
        ),
    ),
    Example(
        "an overflow at a loss scale of one",
        "the loop took a scale of one for none, and stepped on NaN",
        Program(
            strategy="ddp",
            ranks=2,
            precision="16-mixed",
            net=Net(buffer="in_place"),
            data=Data(kind="reused", samples=15, batch=1),
            optimizers=(Optimizer(of="body"), Optimizer(of="head")),
            manual=(Turn(repeats=2, clips=1), Turn(optimizer=1, repeats=2)),
            epochs=2,
        ),
    ),
    Example(
        "a group added by a hook that is called again",
        "the program added it twice, which torch refuses",
        Program(
            net=Net(frozen="body"),
            data=Data(samples=4, batch=1),
            optimizers=(Optimizer(lr=0.1),),
            epochs=2,
            validation=Validation(samples=1, batch=1, interval=1),
            changes=(Change("group", "body", "on_validation_end", 0),),
        ),
    ),
    Example(
        "weights that run away in bfloat16",
        "three ranks' gradients are rounded in another order, and a rounding grows to a tenth in six steps",
        Program(
            strategy="ddp",
            ranks=3,
            precision="bf16-true",
            net=Net(buffer="in_place"),
            data=Data(kind="sampler", batch=1),
            optimizers=(Optimizer(of="body"), Optimizer(of="head")),
            manual=(Turn(), Turn(optimizer=1), Turn(repeats=2), Turn(optimizer=1)),
            epochs=2,
            broadcast=True,
        ),
    ),
    Example(
        "SAM beside a buffer that changes",
        "what DDP gives out before an evaluation",
        Program(
            strategy="ddp",
            ranks=2,
            net=Net(buffer="in_place"),
            data=Data(samples=4, batch=1),
            optimizers=(Optimizer("sam"),),
        ),
    ),
    Example(
        "an epoch's end is logged, and the run goes on on more ranks",
        "the new rank was said to log other keys",
        Program(
            data=Data(samples=4, batch=1),
            epochs=2,
            logs=(Log(where="on_train_epoch_end", what="number", on_step=False, on_epoch=True),),
            resume=Resume(ranks=2, strategy="ddp"),
        ),
    ),
    Example(
        "a static graph's buffers, accumulated and resumed",
        "they were given out before each micro-batch of the first window, in a resumed run once more",
        Program(
            strategy="ddp_static_graph",
            ranks=2,
            net=Net(buffer="in_place"),
            data=Data(samples=8, batch=1),
            accumulate=2,
            epochs=2,
            resume=Resume(ranks=2, strategy="ddp_static_graph"),
        ),
    ),
    Example(
        "buffers that ranks have apart, and the run goes on",
        "F-02: all ranks went on with rank 0's, weights 0.0017 off",
        Program(
            strategy="ddp",
            ranks=2,
            net=Net(buffer="in_place"),
            broadcast=False,
            resume=Resume("on_train_batch_end", 0, 2, "ddp"),
        ),
    ),
    Example(
        "an epoch's start is logged, and the run goes on within it on more ranks",
        "H-03: the new rank was said to log other keys",
        Program(
            data=Data(samples=4, batch=1),
            logs=(Log(where="on_train_epoch_start", what="number", on_step=False, on_epoch=True),),
            resume=Resume("on_train_batch_end", ranks=2, strategy="ddp"),
        ),
    ),
    Example(
        "three ranks in half precision under ZeRO 2",
        "gradients were divided by three in bfloat16 before they were added up, 0.006 off",
        Program(
            strategy="deepspeed_stage_2",
            ranks=3,
            precision="bf16-mixed",
            data=Data(kind="reused", samples=12, batch=1),
            optimizers=(Optimizer("momentum"),),
            seed=1,
        ),
    ),
    Example(
        "optimistic gradients, which keep a reference to the last ones",
        "Q-02: DDP overwrote them in its buckets, 0.055 off",
        Program(strategy="ddp", ranks=2, optimizers=(Optimizer("optimistic"),), epochs=2),
    ),
    Example(
        "optimistic gradients that ask for a closure",
        "Q-02: DDP overwrote them in its buckets, 0.055 off",
        Program(strategy="ddp", ranks=2, optimizers=(Optimizer("optimistic", closure=True),), epochs=2),
    ),
    Example(
        "Heun's method by hand",
        "Q-02: the first gradient was the second one",
        Program(strategy="ddp", ranks=2, optimizers=(Optimizer("heun"),), manual=(Turn(repeats=2),), epochs=2),
    ),
    Example(
        "SAM that adds up the gradients at both points",
        "Q-02: the first gradient was the second one, 0.002 off",
        Program(strategy="ddp", ranks=2, optimizers=(Optimizer("sam_sum"),)),
    ),
    Example(
        "SAM that adds up the gradients at both points, by hand",
        "Q-02: the first gradient was the second one, 0.002 off",
        Program(strategy="ddp", ranks=2, optimizers=(Optimizer("sam_sum"),), manual=(Turn(closure=True),)),
    ),
    Example(
        "a resume with another learning rate",
        "Q-04: the checkpoint's goes on",
        Program(epochs=2, resume=Resume(changed="lr")),
    ),
    *(
        Example(
            f"a resume with other {changed} of the optimizer",
            "Q-04: it was not refused",
            Program(optimizers=(Optimizer("adamw"),), epochs=2, resume=Resume(changed=changed)),
        )
        for changed in ("groups", "members", "amsgrad")
    ),
    *(
        Example(
            f"a resume that may have other {changed} of the optimizer",
            "Q-04: the optimizer went on as it was saved",
            Program(optimizers=(Optimizer("adamw"),), epochs=2, resume=Resume(changed=changed, allow=True)),
        )
        for changed in ("lr", "groups", "members", "amsgrad")
    ),
    Example(
        "one of two optimizers starts anew, on two ranks with shards",
        "Q-04: the other one lost its state too",
        Program(
            optimizers=(Optimizer("adamw", of="body"), Optimizer("adamw", of="head")),
            epochs=2,
            resume=Resume(ranks=2, strategy="fsdp", changed="class", allow=True),
        ),
    ),
    *(
        Example(
            f"a checkpoint of a run with averages, by {by}",
            "Q-01: it was evaluated with the trained weights",
            Program(epochs=2, average=Average(), evaluation=Evaluation(by, "on_train_epoch_end")),
        )
        for by in ("validate", "test", "load")
    ),
    Example(
        "the trained weights of a run that has ended with averages",
        "Q-01: there was no way to choose them",
        Program(average=Average(), evaluation=Evaluation(averaged=False, ranks=2, strategy="fsdp")),
    ),
    Example(
        "the averages of a run that does not evaluate with them",
        "Q-01: there was no way to choose them",
        Program(
            average=Average(evaluates=False),
            evaluation=Evaluation("load", "on_train_epoch_end", averaged=True),
        ),
    ),
    Example(
        "a rank's own buffer is logged after the rank has joined",
        "the loop took what DDP had given it for its own",
        Program(
            strategy="ddp",
            ranks=2,
            net=Net(buffer="reassigned"),
            data=Data(kind="iterable", samples=12),
            epochs=2,
            logs=(Log("on_train_batch_start", "buffer", on_epoch=True),),
        ),
    ),
    Example(
        "a key that all ranks log again after a resume on more ranks",
        "F-02: an epoch later it was said to be logged on the new rank only",
        Program(
            strategy="fsdp",
            ranks=2,
            data=Data(kind="sampler", samples=4, batch=1),
            epochs=3,
            logs=(Log(where="on_train_epoch_end", what="number", on_step=False, on_epoch=True),),
            resume=Resume(ranks=3, strategy="ddp"),
        ),
    ),
    Example(
        "a value of the sanity check on a rank without samples",
        "S-04: the rank kept the value, with which ReduceLROnPlateau stepped in an epoch without validation",
        Program(
            strategy="ddp",
            ranks=2,
            data=Data(samples=4, batch=1),
            schedulers=(Scheduler(kind="plateau"),),
            epochs=2,
            logs=(Log(where="validation_step", on_step=False, on_epoch=True),),
            validation=Validation(samples=1, batch=1, every_n_epochs=2, sanity=1),
        ),
    ),
    *(
        [
            Example(
                "step values of a resumed run that were not reduced yet, on fewer ranks",
                "F-02: loss_1_step was rank 0's, and not the mean over the saved ranks",
                Program(
                    strategy="fsdp",
                    ranks=2,
                    precision="16-mixed",
                    data=Data(samples=4, batch=1),
                    logs=(Log(on_step=False, on_epoch=True), Log(on_epoch=True, sync_dist=True)),
                    validation=Validation(samples=1, batch=1),
                    resume=Resume(hook="on_validation_end"),
                ),
            ),
            Example(
                "step values that were logged since the last flush before a save",
                "F-02: loss_2 was not reduced, and its row was missing",
                Program(
                    strategy="ddp",
                    ranks=2,
                    precision="16-mixed",
                    data=Data(kind="reused", fewest_on_rank_0=True),
                    logs=(
                        Log(on_step=False, on_epoch=True),
                        Log(on_step=False, on_epoch=True),
                        Log(sync_dist=True),
                    ),
                    resume=Resume(hook="on_train_batch_end", at=2, ranks=2, strategy="ddp"),
                ),
            ),
            Example(
                "a run in fp16 that goes on without ZeRO",
                "F-12: torch's scaler missed its growth factor in what DeepSpeed's had left",
                Program(
                    strategy="deepspeed_stage_1",
                    ranks=2,
                    precision="16-mixed",
                    data=Data(samples=4, batch=1),
                    validation=Validation(samples=1, batch=1),
                    epochs=2,
                    resume=Resume(),
                ),
            ),
        ]
        if FP16
        else []
    ),
)
