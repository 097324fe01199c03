"""A training program as plain values, which prints as the call that makes it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Net:
    # "mlp", "deep_mlp" (two layers in the body) or "gan" (the body generates, the head discriminates) on numbers;
    # "gru", "transformer", "mixer" or "bag" (a sparse embedding) on tokens, of which a sample has between one and five
    family: str = "mlp"
    norm: str = "none"  # "none", "batch" or "layer"; for "mlp" and "deep_mlp"
    dropout: float = 0.0  # probability
    buffer: str = "none"  # a running mean that the forward reads and training moves: "none", "in_place" or "reassigned"
    scale: bool = False  # a parameter of one element that multiplies the output
    frozen: str = ""  # the part that is frozen at first: "", "body", "head" or "first" (the body's first layer)
    unused: bool = False  # there is a parameter that no loss depends on
    tied: bool = False  # the head shares the embedding's weight; for families on tokens
    hooked: bool = False  # a hook halves the gradient of the head's weight, and an attribute its learning rate

    @property
    def on_tokens(self) -> bool:
        return self.family in ("gru", "transformer", "mixer", "bag")


@dataclass(frozen=True)
class Data:
    # "map", "sampler" (backwards), "batch_sampler" (batches of different sizes), "iterable" (a part of each rank's
    # own), "sharded" (an iterable of samples, which workers share), "reused" (an iterable that fills one buffer again
    # and again), "stateful" (a loader of the user's own with ``state_dict``) or "combined" (an iterable and a stateful
    # loader, in pairs)
    kind: str = "map"
    samples: int = 8  # in the data set; for iterable kinds those of all ranks together
    batch: int = 2  # samples of a rank's micro-batch
    shuffle: bool = False  # for "map"
    drop_last: bool = False  # for "map"
    consumes_batch: bool = False  # training and validation steps remove the entries of the batch, a dict
    length_error: int | None = 0  # how far a ``len(loader)`` of its own exceeds the true length; None for no length
    workers: int = 0  # worker processes of the loader
    fewest_on_rank_0: bool = False  # for iterable kinds, rank 0 has the fewest samples; otherwise it has the most
    without_tokens: tuple[tuple[int, int], ...] = ()  # ranges of samples whose tokens are all padding
    overflows: int | None = None  # the sample that overflows in fp16, if there is one


OWN_PARTS = ("iterable", "sharded", "reused", "stateful", "combined")
"""Kinds of data of which each rank reads its own part."""


@dataclass(frozen=True)
class Optimizer:
    # "sgd", "momentum", "adamw", "muon", "lbfgs", "line_search" (LBFGS with one) or "sam"; or one that keeps a
    # reference to ``parameter.grad``: "optimistic" and "heun" from one step to the next, "sam_sum" from one evaluation
    # to the next
    kind: str = "sgd"
    of: str = "all"  # the parameters that it trains: "all", "body", "head", "matrices" or "vectors"
    lr: float = 0.1  # learning rate; AdamW's is a tenth of it
    weight_decay: float | None = None  # None for the default of the kind
    split: bool = False  # biases are in a second group, with half the learning rate and, for "adamw", no weight decay
    fused: bool = False  # for "adamw"
    eps: float | None = None  # for "adamw"; None for a large one: rounding of gradients near zero then matters less
    holds_frozen: bool = False  # it gets frozen parameters too
    amsgrad: bool = False  # for "adamw"
    closure: bool = False  # automatic optimization passes it a closure, although it does not need one

    @property
    def evaluates_again(self) -> bool:
        return self.kind in ("lbfgs", "line_search", "sam", "sam_sum")

    @property
    def is_torch(self) -> bool:
        return self.kind in ("sgd", "momentum", "adamw", "muon", "lbfgs", "line_search")


@dataclass(frozen=True)
class Scheduler:
    # "step" (halves), "warmup" (from a tenth), "plateau" or "linear" (to zero, in the steps that the run should take)
    kind: str = "step"
    interval: str = "epoch"
    frequency: int = 1


@dataclass(frozen=True)
class Log:
    where: str = "training_step"  # the step or hook that logs
    # the value: "loss"; "number" (a Python float); "numpy" (a scalar of NumPy's); "large" (an int that float32 cannot
    # hold); "forward" (the loss of fixed samples, by a forward of the module in eval mode within the hook); "parameter"
    # (the one element that is trained); "buffer"; "metric" (a mean); "pearson" (a metric whose ranks' states cannot be
    # added up)
    what: str = "loss"
    on_step: bool = True  # see ``log``
    on_epoch: bool = False  # see ``log``
    reduce_fx: str = "mean"  # see ``log``
    batch_size: int | None = None  # see ``log``
    sync_dist: bool | None = None  # see ``log``


@dataclass(frozen=True)
class Validation:
    """Validation within fit; ``interval`` is ``val_check_interval``, other fields are as in `Data`."""

    kind: str = "map"
    samples: int = 4
    batch: int = 2
    interval: int | float | None = None
    every_n_epochs: int = 1
    sanity: int = 0
    inference_mode: bool = True
    draws: bool = False  # the validation step draws from torch's generator
    length_error: int | None = 0
    workers: int = 0

    @property
    def data(self) -> Data:
        return Data(self.kind, self.samples, self.batch, length_error=self.length_error, workers=self.workers)


@dataclass(frozen=True)
class Turn:
    """In manual optimization: forwards, backwards and steps of one optimizer."""

    optimizer: int = 0  # the optimizer's index
    repeats: int = 1  # number of steps
    clips: int = 0  # number of times that gradients are clipped before a step
    toggles: bool = False  # it runs within ``toggled_optimizer``
    closure: bool = False  # it steps by ``optimizer.step(closure)``


@dataclass(frozen=True)
class Change:
    what: str = "unfreeze"  # "unfreeze", "freeze" or "group" (unfreeze, and ``add_param_group``)
    part: str = "head"  # "body" or "head"
    hook: str = "on_train_epoch_start"  # this, or "on_train_batch_start", "on_train_batch_end" or "on_train_epoch_end"
    epoch: int = 1  # the epoch of the change
    batch: int = 0  # for hooks of a batch, its index


@dataclass(frozen=True)
class Write:
    """A hook that writes weights or gradients of the head."""

    # "weights" (in place, without gradients), "data" (in place, through ``.data``), "assigned" (another tensor to
    # ``.data``), "gradients" (in place) or "rebound" (another tensor to ``.grad``)
    what: str = "weights"
    # for weights "on_train_batch_end" or "on_train_epoch_start"; for gradients "on_after_backward" or
    # "on_before_optimizer_step"
    hook: str = "on_train_batch_end"
    at: int = 0  # the index of the call of the hook, counted over the run

    @property
    def of_gradients(self) -> bool:
        return self.what in ("gradients", "rebound")


@dataclass(frozen=True)
class Stop:
    """How the run ends early."""

    # "should_stop" (set in ``hook``), "max_steps", "skip" (-1 from ``on_train_batch_start`` at ``at`` in every epoch)
    # or "raise" (in ``on_train_batch_start``)
    how: str = "max_steps"
    hook: str = "on_train_epoch_end"  # "on_train_batch_end", "on_train_epoch_end" or "on_validation_end"
    at: int = 1  # the index of the call of the hook, counted over the run; for "max_steps" the number of steps


@dataclass(frozen=True)
class Resume:
    """A checkpoint is saved in a hook, and a new module, optimizer and trainer resume from it."""

    hook: str = "on_train_epoch_end"  # this, "on_train_batch_end", "on_validation_end" or one of `WITHIN_STEPS`
    at: int = 0  # the index of the call of the hook, counted over the run
    ranks: int = 1  # number of ranks of the resumed run
    strategy: str = "single_device"  # strategy of the resumed run
    # what is different in the first optimizer of the resumed run: "" (nothing), "lr" or "weight_decay" (a number),
    # "groups" (one more or less), "members" (trains the head too, or no longer), "amsgrad" or "class"
    changed: str = ""
    allow: bool = False  # with ``fit(allow=("optimizer",))``

    def optimizers(self, saved: tuple[Optimizer, ...]) -> tuple[Optimizer, ...]:
        """Return the resumed run's optimizers; ``saved`` are those of the run that saved."""
        first, *rest = saved
        changes: dict[str, dict[str, Any]] = {
            "lr": {"lr": first.lr / 2},
            "weight_decay": {"weight_decay": 0.3},
            "groups": {"split": not first.split},
            "members": {"of": "body" if first.of == "all" else "all"},
            "amsgrad": {"amsgrad": not first.amsgrad},
            "class": {"kind": "momentum" if first.kind == "adamw" else "adamw", "amsgrad": False},
        }
        return (replace(first, **changes.get(self.changed, {})), *rest)

    @property
    def refused(self) -> bool:
        """Whether the resume must be refused, because ``allow`` does not permit the changed optimizer."""
        return self.changed not in ("", *NUMBERS) and not self.allow

    @property
    def restarted(self) -> bool:
        """Whether the first optimizer starts without state and with the resumed run's settings."""
        return bool(self.changed) and self.allow


WITHIN_STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks within a step, in which ``save_checkpoint`` saves at the end of the step."""

NUMBERS = ("lr", "weight_decay")
"""Changes of an optimizer that the checkpoint's values override, unless ``allow`` permits them."""


@dataclass(frozen=True)
class Average:
    """An exponential moving average, which is left in the module."""

    decay: float = 0.5  # see ``EMAWeightAveraging``
    start: int = 0  # the first step that updates it
    evaluates: bool = True  # validation within the run uses it


@dataclass(frozen=True)
class Evaluation:
    """The run saves a checkpoint, which a new module and trainer evaluate."""

    by: str = "validate"  # "validate", "test" (both with ``ckpt_path``) or "load" (``load_from_checkpoint``)
    hook: str = "on_fit_end"  # saved in "on_train_batch_end", "on_train_epoch_end", "on_validation_end" or "on_fit_end"
    at: int = 0  # the index of the call of the hook, counted over the run
    averaged: bool | None = None  # see ``validate``; False: the trained weights, True: the averages
    callbacks: bool = False  # the evaluation has the averaging callback too
    ranks: int = 1  # number of ranks of the evaluation
    strategy: str = "single_device"  # strategy of the evaluation


EVALUATED = Validation(samples=5)
"""The data on which a checkpoint is evaluated."""


@dataclass(frozen=True)
class Program:
    """A training run. Every default is the plainest choice."""

    strategy: str = "single_device"
    ranks: int = 1
    tensor_parallel: int = 1  # Processes of each rank, over which the strategy splits layers; they read the same data
    precision: str = "32-true"
    net: Net = field(default_factory=Net)
    data: Data = field(default_factory=Data)
    optimizers: tuple[Optimizer, ...] = (Optimizer(),)
    schedulers: tuple[Scheduler, ...] = ()
    manual: tuple[Turn, ...] = ()
    epochs: int = 1
    accumulate: int = 1
    clip: float | None = None
    clip_by: str = "norm"
    token_weighted: bool = False  # The module's ``batch_weight`` weights a mean over tokens by their number
    adds_to_loss: bool = False  # The step adds a term to the loss (``loss += ...``) after logging it
    missing_loss: str = "never"  # When the step returns None: "never", for "odd" batches, "always"; or "nan" always
    logs: tuple[Log, ...] = ()
    log_every: int = 1
    validation: Validation | None = None
    changes: tuple[Change, ...] = ()
    writes: Write | None = None
    stop: Stop | None = None
    resume: Resume | None = None
    broadcast: bool | None = None  # DDP's ``broadcast_buffers``
    average: Average | None = None
    evaluation: Evaluation | None = None
    configure_model: bool = False  # The layers are built in ``configure_model``
    launcher: str = ""  # A launcher of `Fit` that starts the ranks, "fork"; by default they are those of the test
    measures_norms: bool = False  # Gradient norms are recorded before every optimizer step
    seed: int = 0

    def __repr__(self) -> str:
        return as_call(self)

    @property
    def takes_closure(self) -> bool:
        first = self.optimizers[0]
        return not self.manual and (first.evaluates_again or first.closure)

    @property
    def records_norms(self) -> bool:
        """Whether gradient norms before clipping are compared."""
        return self.clip is not None and self.clip_by == "norm" and not self.manual and not self.takes_closure

    @property
    def saving(self) -> Resume | Evaluation | None:
        return self.resume or self.evaluation


def as_call(value: Any) -> str:
    """Return a dataclass as the call that makes it, without what is at its default."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = type(value)()
        parts = [
            f"{one.name}={as_call(getattr(value, one.name))}"
            for one in fields(value)
            if getattr(value, one.name) != getattr(plain, one.name)
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(as_call, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


for _kind in (Net, Data, Optimizer, Scheduler, Log, Validation, Turn, Change, Write, Stop, Resume, Average, Evaluation):
    _kind.__repr__ = as_call  # type: ignore[method-assign]
