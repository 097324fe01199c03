"""What is drawn: a training program as plain values, which prints as the call that makes it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Net:
    """A network of some family.

    Attributes:
        family: "mlp" on numbers; "gru" or "transformer" on tokens, of which a sample has between one and five.
        norm: "none", "batch" or "layer"; for the mlp.
        dropout: probability.
        buffer: a running mean that the forward reads and training moves: "none", "in_place" or "reassigned".
        scale: a parameter of one element that multiplies the output.
        frozen: the part that is frozen as the run begins: "", "body" or "head".
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


@dataclass(frozen=True)
class Data:
    """What is trained on.

    Attributes:
        kind: "map", "sampler" (backwards), "batch_sampler" (batches of different sizes), "iterable" (a part of each
            rank's own), "sharded" (an iterable of samples, which workers share), "reused" (an iterable that fills
            one buffer again and again), "stateful" (a loader of the user's own with ``state_dict``) or "combined" (an
            iterable and a stateful loader, in pairs).
        samples: in the data set; for iterable kinds those of all ranks together.
        batch: samples of a rank's micro-batch.
        shuffle: for "map".
        drop_last: for "map".
        spoils: the step takes the batch, a dict, to pieces, and that of validation too.
        claims: what ``len(loader)`` says beyond what is there, where it is the user's own; None for no length.
        workers: processes that read.
        rising: of iterable kinds: rank 0 has the least, instead of the most.
    """

    kind: str = "map"
    samples: int = 8
    batch: int = 2
    shuffle: bool = False
    drop_last: bool = False
    spoils: bool = False
    claims: int | None = 0
    workers: int = 0
    rising: bool = False


OWN_PARTS = ("iterable", "sharded", "reused", "stateful", "combined")
"""Kinds of data of which each rank reads a part of its own."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        kind: "sgd", "momentum", "adamw", "lbfgs" or "sam"; or one that keeps a reference to ``parameter.grad``:
            "optimistic" and "heun" from one step to the next, "sam_sum" from one evaluation to the next.
        of: which parameters it trains: "all", "body" or "head".
        lr: learning rate; of AdamW ten times as much.
        weight_decay: None for the kind's own.
        split: biases and the like are in a second group, which has half the learning rate.
        amsgrad: for "adamw".
        closure: automatic optimization gives it a closure, which it could do without.
    """

    kind: str = "sgd"
    of: str = "all"
    lr: float = 0.1
    weight_decay: float | None = None
    split: bool = False
    amsgrad: bool = False
    closure: bool = False

    @property
    def evaluates_again(self) -> bool:
        """Whether its step calls the closure more than once."""
        return self.kind in ("lbfgs", "sam", "sam_sum")

    @property
    def is_torch(self) -> bool:
        """Whether the class is torch's own."""
        return self.kind in ("sgd", "momentum", "adamw", "lbfgs")


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
        what: "loss"; "number" (a Python float); "numpy" (a scalar of NumPy's); "large" (an int that float32 cannot
            hold); "forward" (the loss of fixed samples, by a forward of the module in eval mode within the hook);
            "parameter" (the one element that is trained); "buffer"; "metric" (a mean); "pearson" (a metric whose ranks'
            states cannot be added up).
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
    """Validation within fit; ``interval`` is ``val_check_interval``, what is not told here is as in `Data`."""

    kind: str = "map"
    samples: int = 4
    batch: int = 2
    interval: int | float | None = None
    every_n_epochs: int = 1
    sanity: int = 0
    inference_mode: bool = True
    draws: bool = False  # the validation step draws from torch's generator
    claims: int | None = 0
    workers: int = 0

    @property
    def data(self) -> Data:
        """What it reads."""
        return Data(self.kind, self.samples, self.batch, claims=self.claims, workers=self.workers)


@dataclass(frozen=True)
class Turn:
    """In manual optimization: so many forwards, backwards and steps of one optimizer.

    Attributes:
        optimizer: its number.
        repeats: how often.
        clips: how often gradients are clipped before a step.
        toggles: within ``toggled_optimizer``.
        closure: by ``optimizer.step(closure)``.
    """

    optimizer: int = 0
    repeats: int = 1
    clips: int = 0
    toggles: bool = False
    closure: bool = False


@dataclass(frozen=True)
class Change:
    """What trains changes in a hook: "unfreeze", "freeze" or "group" (unfreeze, and ``add_param_group``).

    Attributes:
        what: which change.
        part: of which part: "body" or "head".
        hook: "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end" or "on_train_epoch_end".
        epoch: in which epoch.
        batch: for the hooks of a batch, at which one.
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
        at: the run's so manieth call of it, counted from 0.
    """

    what: str = "weights"
    hook: str = "on_train_batch_end"
    at: int = 0

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are written."""
        return self.what in ("gradients", "rebound")


@dataclass(frozen=True)
class Stop:
    """How the run ends early, if it does.

    Attributes:
        how: "should_stop" (set in ``hook``), "max_steps", "skip" (-1 from ``on_train_batch_start`` at ``at`` in every
            epoch) or "raise" (in ``on_train_batch_start``).
        hook: "on_train_batch_end", "on_train_epoch_end" or "on_validation_end".
        at: the run's so manieth call of the hook, counted from 0; steps for "max_steps".
    """

    how: str = "max_steps"
    hook: str = "on_train_epoch_end"
    at: int = 1


@dataclass(frozen=True)
class Resume:
    """Saved in a hook, and trained again from there by a new process' worth of objects.

    Attributes:
        hook: "on_train_batch_end" or "on_train_epoch_end", or "on_validation_end"; or one of `WITHIN_STEPS`.
        at: the run's so manieth call of it, counted from 0.
        ranks: on how many.
        strategy: under which.
        changed: what the new process gives the first optimizer differently: "" (nothing), "lr" or "weight_decay" (a
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
        """Return what the new process gives, where the one that saved gave ``saved``."""
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
        """Whether the change of the optimizer is a misfit to which ``allow`` does not consent."""
        return self.changed not in ("", *NUMBERS) and not self.allow

    @property
    def anew(self) -> bool:
        """Whether the first optimizer starts without state and with the new process' settings."""
        return bool(self.changed) and self.allow


WITHIN_STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks within a step, in which ``save_checkpoint`` saves at the end of the step."""

NUMBERS = ("lr", "weight_decay")
"""Changes of an optimizer after which the checkpoint's values go on, unless ``allow`` consents to them."""


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
    """The run saves a checkpoint, which a new process' worth of objects evaluates.

    Attributes:
        by: "validate", "test" (both with ``ckpt_path``) or "load" (``load_from_checkpoint``).
        hook: saved in "on_train_batch_end", "on_train_epoch_end", "on_validation_end" or "on_fit_end".
        at: the run's so manieth call of it, counted from 0.
        averaged: see ``validate``; False: the trained weights, True: the averages.
        callbacks: the new process has the callback that averages too.
        ranks: on how many.
        strategy: under which.
    """

    by: str = "validate"
    hook: str = "on_fit_end"
    at: int = 0
    averaged: bool | None = None
    callbacks: bool = False
    ranks: int = 1
    strategy: str = "single_device"


EVALUATED = Validation(samples=5)
"""What an evaluation of a checkpoint reads."""


@dataclass(frozen=True)
class Program:
    """A training run. Every default is the plainest choice."""

    strategy: str = "single_device"
    ranks: int = 1
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
    weighs: bool = False
    adds: bool = False
    """``loss += ...`` after what is logged."""
    nothing: str = "never"
    """When ``training_step`` has no loss to give: "never", "odd" batches (None), "always" (None), or "nan" always."""
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
    late: bool = False
    """The layers are built in ``configure_model``."""
    launcher: str = ""
    """Started by a launcher of its own, instead of joining the test's ranks: "fork"."""
    seed: int = 0

    def __repr__(self) -> str:
        return shown(self)

    @property
    def takes_closure(self) -> bool:
        """Whether automatic optimization gives the optimizer a closure."""
        first = self.optimizers[0]
        return not self.manual and (first.evaluates_again or first.closure)

    @property
    def saving(self) -> Resume | Evaluation | None:
        """What the run saves a checkpoint for."""
        return self.resume or self.evaluation


def shown(value: Any) -> str:
    """Return a dataclass as the call that makes it, without what is at its default."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = type(value)()
        parts = [
            f"{one.name}={shown(getattr(value, one.name))}"
            for one in fields(value)
            if getattr(value, one.name) != getattr(plain, one.name)
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


for _kind in (Net, Data, Optimizer, Scheduler, Log, Validation, Turn, Change, Write, Stop, Resume, Average, Evaluation):
    _kind.__repr__ = shown  # type: ignore[method-assign]
