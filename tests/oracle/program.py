"""A training program as plain values, which prints as the call that makes it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Net:
    """A network of some family.

    Attributes:
        family: "mlp", "deep_mlp" (two layers in the body) or "gan" (the body generates, the head discriminates) on
            numbers; "gru", "transformer", "mixer" or "bag" (a sparse embedding) on tokens, of which a sample has
            between one and five.
        norm: "none", "batch" or "layer"; for "mlp" and "deep_mlp".
        dropout: probability.
        buffer: a running mean that the forward reads and training moves: "none", "in_place" or "reassigned".
        scale: a parameter of one element that multiplies the output.
        frozen: the part that is frozen as the run begins: "", "body", "head" or "first" (the body's first layer).
        unused: there is a parameter that no loss depends on.
        tied: the head shares the embedding's weight; for families on tokens.
        hooked: a gradient hook on the head's weight halves its gradient, and an attribute of the weight lets the
            optimizer train it at half the learning rate.
    """

    family: str = "mlp"
    norm: str = "none"
    dropout: float = 0.0
    buffer: str = "none"
    scale: bool = False
    frozen: str = ""
    unused: bool = False
    tied: bool = False
    hooked: bool = False

    @property
    def on_tokens(self) -> bool:
        """Whether it reads tokens."""
        return self.family in ("gru", "transformer", "mixer", "bag")


@dataclass(frozen=True)
class Data:
    """The training data.

    Attributes:
        kind: "map", "sampler" (backwards), "batch_sampler" (batches of different sizes), "iterable" (a part of each
            rank's own), "sharded" (an iterable of samples, which workers share), "reused" (an iterable that fills
            one buffer again and again), "stateful" (a loader of the user's own with ``state_dict``) or "combined" (an
            iterable and a stateful loader, in pairs).
        samples: in the data set; for iterable kinds those of all ranks together.
        batch: samples of a rank's micro-batch.
        shuffle: for "map".
        drop_last: for "map".
        consumes_batch: training and validation steps remove the entries of the batch, a dict.
        length_error: how far ``len(loader)`` exceeds the true length, for loaders with a length of their own; None for
            no length.
        workers: worker processes of the loader.
        without_tokens: ranges of samples whose tokens are all padding.
        overflows: the sample that overflows in fp16, if there is one.
        fewest_on_rank_0: for iterable kinds, rank 0 has the fewest samples; otherwise it has the most.
    """

    kind: str = "map"
    samples: int = 8
    batch: int = 2
    shuffle: bool = False
    drop_last: bool = False
    consumes_batch: bool = False
    length_error: int | None = 0
    workers: int = 0
    fewest_on_rank_0: bool = False
    without_tokens: tuple[tuple[int, int], ...] = ()
    overflows: int | None = None


OWN_PARTS = ("iterable", "sharded", "reused", "stateful", "combined")
"""Kinds of data of which each rank reads its own part."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        kind: "sgd", "momentum", "adamw", "muon", "lbfgs", "line_search" (LBFGS with one) or "sam"; or one
            that keeps a reference to ``parameter.grad``:
            "optimistic" and "heun" from one step to the next, "sam_sum" from one evaluation to the next.
        of: the parameters that it trains: "all", "body", "head", "matrices" or "vectors".
        lr: learning rate; AdamW's is a tenth of it.
        weight_decay: None for the default of the kind.
        split: biases and the like are in a second group, which has half the learning rate and, for "adamw", no weight
            decay.
        fused: for "adamw".
        eps: for "adamw"; None for a large one, so that rounding errors in gradients near zero matter less.
        holds_frozen: it gets frozen parameters too.
        amsgrad: for "adamw".
        closure: automatic optimization passes it a closure, although it does not need one.
    """

    kind: str = "sgd"
    of: str = "all"
    lr: float = 0.1
    weight_decay: float | None = None
    split: bool = False
    fused: bool = False
    eps: float | None = None
    holds_frozen: bool = False
    amsgrad: bool = False
    closure: bool = False

    @property
    def evaluates_again(self) -> bool:
        """Whether its step calls the closure more than once."""
        return self.kind in ("lbfgs", "line_search", "sam", "sam_sum")

    @property
    def is_torch(self) -> bool:
        """Whether the class is torch's own."""
        return self.kind in ("sgd", "momentum", "adamw", "muon", "lbfgs", "line_search")


@dataclass(frozen=True)
class Scheduler:
    """A scheduler of the first optimizer: "step" (halves), "warmup" (from a tenth), "plateau", or "linear".

    The last goes down to nothing in as many steps as the run is estimated to take.
    """

    kind: str = "step"
    interval: str = "epoch"
    frequency: int = 1


@dataclass(frozen=True)
class Log:
    """One call of ``self.log``.

    Attributes:
        where: the step or hook that logs.
        what: the value: "loss"; "number" (a Python float); "numpy" (a scalar of NumPy's); "large" (an int that
            float32 cannot hold); "forward" (the loss of fixed samples, by a forward of the module in eval mode within
            the hook); "parameter" (the one element that is trained); "buffer"; "metric" (a mean); "pearson" (a
            metric whose ranks' states cannot be added up).
        on_step: see ``log``.
        on_epoch: see ``log``.
        reduce_fx: see ``log``.
        batch_size: see ``log``.
        sync_dist: see ``log``.
    """

    where: str = "training_step"
    what: str = "loss"
    on_step: bool = True
    on_epoch: bool = False
    reduce_fx: str = "mean"
    batch_size: int | None = None
    sync_dist: bool | None = None


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
        """The data that is validated on."""
        return Data(self.kind, self.samples, self.batch, length_error=self.length_error, workers=self.workers)


@dataclass(frozen=True)
class Turn:
    """In manual optimization: forwards, backwards and steps of one optimizer.

    Attributes:
        optimizer: the optimizer's index.
        repeats: number of steps.
        clips: number of times that gradients are clipped before a step.
        toggles: it runs within ``toggled_optimizer``.
        closure: it steps by ``optimizer.step(closure)``.
    """

    optimizer: int = 0
    repeats: int = 1
    clips: int = 0
    toggles: bool = False
    closure: bool = False


@dataclass(frozen=True)
class Change:
    """A change of the trainable parameters in a hook.

    Attributes:
        what: "unfreeze", "freeze" or "group" (unfreeze, and ``add_param_group``).
        part: "body" or "head".
        hook: "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end" or "on_train_epoch_end".
        epoch: the epoch of the change.
        batch: for hooks of a batch, its index.
    """

    what: str = "unfreeze"
    part: str = "head"
    hook: str = "on_train_epoch_start"
    epoch: int = 1
    batch: int = 0


@dataclass(frozen=True)
class Write:
    """A hook that writes weights or gradients of the head.

    Attributes:
        what: "weights" (in place, without gradients), "data" (in place, through ``.data``), "assigned" (another tensor
            to ``.data``), "gradients" (in place) or "rebound" (another tensor to ``.grad``).
        hook: for weights "on_train_batch_end" or "on_train_epoch_start"; for gradients "on_after_backward" or
            "on_before_optimizer_step".
        at: the index of the call of the hook, counted over the run.
    """

    what: str = "weights"
    hook: str = "on_train_batch_end"
    at: int = 0

    @property
    def of_gradients(self) -> bool:
        """Whether it writes gradients."""
        return self.what in ("gradients", "rebound")


@dataclass(frozen=True)
class Stop:
    """How the run ends early.

    Attributes:
        how: "should_stop" (set in ``hook``), "max_steps", "skip" (-1 from ``on_train_batch_start`` at ``at`` in every
            epoch) or "raise" (in ``on_train_batch_start``).
        hook: "on_train_batch_end", "on_train_epoch_end" or "on_validation_end".
        at: the index of the call of the hook, counted over the run; for "max_steps" the number of steps.
    """

    how: str = "max_steps"
    hook: str = "on_train_epoch_end"
    at: int = 1


@dataclass(frozen=True)
class Resume:
    """A checkpoint is saved in a hook, and a new module, optimizer and trainer resume from it.

    Attributes:
        hook: "on_train_batch_end" or "on_train_epoch_end", or "on_validation_end"; or one of `WITHIN_STEPS`.
        at: the index of the call of the hook, counted over the run.
        ranks: number of ranks of the resumed run.
        strategy: strategy of the resumed run.
        changed: what is different in the first optimizer of the resumed run: "" (nothing), "lr" or "weight_decay" (a
            number), "groups" (one more or less), "members" (trains the head too, or no longer), "amsgrad" or "class".
        allow: with ``fit(allow=("optimizer",))``.
    """

    hook: str = "on_train_epoch_end"
    at: int = 0
    ranks: int = 1
    strategy: str = "single_device"
    changed: str = ""
    allow: bool = False

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
    """An exponential moving average, which is left in the module.

    Attributes:
        decay: see ``EMAWeightAveraging``.
        start: the first step that updates it.
        evaluates: validation within the run uses it.
    """

    decay: float = 0.5
    start: int = 0
    evaluates: bool = True


@dataclass(frozen=True)
class Evaluation:
    """The run saves a checkpoint, which a new module and trainer evaluate.

    Attributes:
        by: "validate", "test" (both with ``ckpt_path``) or "load" (``load_from_checkpoint``).
        hook: saved in "on_train_batch_end", "on_train_epoch_end", "on_validation_end" or "on_fit_end".
        at: the index of the call of the hook, counted over the run.
        averaged: see ``validate``; False: the trained weights, True: the averages.
        callbacks: the evaluation has the averaging callback too.
        ranks: number of ranks of the evaluation.
        strategy: strategy of the evaluation.
    """

    by: str = "validate"
    hook: str = "on_fit_end"
    at: int = 0
    averaged: bool | None = None
    callbacks: bool = False
    ranks: int = 1
    strategy: str = "single_device"


EVALUATED = Validation(samples=5)
"""The data on which a checkpoint is evaluated."""


@dataclass(frozen=True)
class Program:
    """A training run. Every default is the plainest choice."""

    strategy: str = "single_device"
    ranks: int = 1
    tensor_parallel: int = 1
    """Processes of each rank, over which the strategy splits layers; they read the same data."""
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
    token_weighted: bool = False
    """The module overrides ``batch_weight``: a mean over tokens is weighted by their number."""
    adds_to_loss: bool = False
    """The step adds a term to the loss (``loss += ...``) after logging it."""
    missing_loss: str = "never"
    """When ``training_step`` returns no loss: "never", "odd" batches (None), "always" (None), or "nan" always."""
    logs: tuple[Log, ...] = ()
    log_every: int = 1
    validation: Validation | None = None
    changes: tuple[Change, ...] = ()
    writes: Write | None = None
    stop: Stop | None = None
    resume: Resume | None = None
    broadcast: bool | None = None
    """DDP's ``broadcast_buffers``."""
    average: Average | None = None
    evaluation: Evaluation | None = None
    configure_model: bool = False
    """The layers are built in ``configure_model``."""
    launcher: str = ""
    """A launcher of `Fit` that starts the ranks, "fork"; by default the run uses the ranks of the test."""
    measures_norms: bool = False
    """Gradient norms are recorded before every optimizer step."""
    seed: int = 0

    def __repr__(self) -> str:
        return as_call(self)

    @property
    def takes_closure(self) -> bool:
        """Whether automatic optimization gives the optimizer a closure."""
        first = self.optimizers[0]
        return not self.manual and (first.evaluates_again or first.closure)

    @property
    def records_norms(self) -> bool:
        """Whether gradient norms before clipping are compared."""
        return self.clip is not None and self.clip_by == "norm" and not self.manual and not self.takes_closure

    @property
    def saving(self) -> Resume | Evaluation | None:
        """The purpose of the checkpoint that the run saves, if it saves one."""
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
