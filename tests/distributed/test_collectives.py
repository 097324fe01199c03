"""Communication between ranks: its amount, and agreements of them. Rows A-08, A-10, B-02, B-19, H-01, I-17, K-04."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from small_runs import Regression, counting_collectives, data, failing, loader, quiet, refusal, seeded, trained, weights
from torch import nn
from torch.utils.data import DataLoader, random_split

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain._distributed.control_group import GroupControl  # its calls are counted
from drivetrain._engine.ranks import collective_calls  # to shorten its timeout, which is no setting
from drivetrain._loops import train  # likewise
from drivetrain.callbacks import EarlyStopping, LambdaCallback
from worlds import on_ranks


def _by_hand(steps: int, **options: Any) -> Counter[str]:
    # Written by hand: the collectives of torch's own wrapper are counted.
    module = Regression()
    ddp = nn.parallel.DistributedDataParallel(module.net, **options)
    optimizer = module.configure_optimizers()
    with counting_collectives() as counts:
        for x, y in [next(iter(loader(4, 4)))] * steps:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
    return counts


class Logging(Regression):
    """Logs in every step, and has a buffer."""

    def __init__(self, epoch: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.epoch = epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "norm": 1.0}, on_epoch=self.epoch)
        return loss


class Window(Callback):
    """Counts collectives between the first step of an epoch and the end of its last micro-batch."""

    def __init__(self) -> None:
        self.counts: list[Counter[str]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._counting = counting_collectives()
        self.counts.append(self._counting.__enter__())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - 1:
            self._counting.__exit__(None, None, None)


def _counted() -> dict[str, Any]:
    found: dict[str, Any] = {"by hand": _by_hand(10), "static by hand": _by_hand(10, static_graph=True)}
    for name, module, strategy, accumulated in (
        ("bare", Regression(), "ddp", 1),
        ("logged", Logging(), "ddp", 1),
        ("accumulated", Regression(), "ddp", 4),
        ("static", Regression(), "ddp_static_graph", 4),
    ):
        window = Window()
        settings: dict[str, Any] = {"callbacks": window, "accumulate_grad_batches": accumulated, "max_epochs": 2}
        trained(module, loader(80, 4), strategy=strategy, **settings)
        found[name] = window.counts
    for name, module in (("whole run", Regression()), ("whole run, logged by epoch", Logging(epoch=True))):
        with counting_collectives() as found[name]:
            trained(module, loader(80, 4), strategy="ddp", max_epochs=2)
    with counting_collectives() as found["set-up by hand"]:
        nn.parallel.DistributedDataParallel(Regression().net)
    return found


def test_a_bare_fit_issues_only_ddps_collectives() -> None:  # H-01, B-02, B-12
    for found in on_ranks(_counted, 2):
        by_hand = found["by hand"]
        assert by_hand["allreduce"] == 10
        for name in ("bare", "logged"):
            # From the second epoch on, to exclude DDP's setup in its first steps.
            assert found[name][0]["allreduce"] == 10
            assert found[name][1] - Counter(broadcast=10) == Counter(allreduce=10), name
            assert sum(found[name][0].values()) <= sum(by_hand.values()) + found[name][0]["broadcast"]
        assert sum(found["bare"][0].values()) == sum(by_hand.values())
        assert found["bare"][1] == Counter(allreduce=10)
        # C-02: one for each of three steps, none within a window; a static graph is planned in the first
        assert found["accumulated"][0]["allreduce"] == found["accumulated"][1]["allreduce"] == 3
        assert found["static"][0]["allreduce"] == 3 + found["static by hand"]["allreduce"] - 10
        assert found["static"][1]["allreduce"] == 3
        # A whole run, which consists of set-up and steps.
        extra = found["whole run"] - found["set-up by hand"] - by_hand - Counter(allreduce=10)
        assert not extra, extra
        # Two keys, two epochs: one packed collective each.
        assert found["whole run, logged by epoch"]["allgather"] == found["whole run"]["allgather"] + 2


def _stop_at(step: int, *ranks: int) -> Callback:
    def request(trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == step and trainer.global_rank in ranks:
            trainer.should_stop = True

    return LambdaCallback(on_train_batch_end=request)


def _stopping() -> dict[str, Any]:
    of_this_rank = timedelta(microseconds=1 if dist.get_rank() else 3600 * 10**6)
    found: dict[str, Any] = {}
    cases: dict[str, tuple[Callback, dict[str, Any]]] = {
        "rank 1": (_stop_at(5, 1), {}),
        "both": (_stop_at(5, 0, 1), {}),
        "late": (_stop_at(30, 0), {}),
        "min_steps": (_stop_at(5, 1), {"min_steps": 60}),
        "min_epochs": (_stop_at(5, 1), {"min_epochs": 2, "max_epochs": 4}),
        "max_time on rank 1": (Callback(), {"max_time": of_this_rank, "max_epochs": -1}),
        "end of the epoch": (_stop_at(100, 1), {"max_epochs": 3}),
    }
    for name, (stop, settings) in cases.items():
        trainer, module = quiet(strategy="ddp", callbacks=stop, **settings), Regression()
        trainer.fit(module, loader(400, 2))
        found[name] = (trainer.global_step, trainer.current_epoch, weights(module))
    return found


def test_a_stop_requested_on_one_rank_stops_all_after_the_same_step() -> None:  # B-19, H-01
    first, second = on_ranks(_stopping, 2)
    for name, (steps, epochs, after) in first.items():
        assert (steps, epochs) == second[name][:2], name
        assert torch.equal(after, second[name][2]), name
    for name, step in (("rank 1", 5), ("both", 5), ("late", 30), ("max_time on rank 1", 1)):
        assert step <= first[name][0] <= step + 1, (name, first[name][0])
    assert first["min_steps"][0] == 60
    assert first["min_epochs"][:2] == (200, 2)
    assert first["end of the epoch"][:2] == (100, 1)


class NeverSteps(Regression):
    """Uses manual optimization without a step, and has a validation_step without a loader."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def _request_on_rank_1(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    if batch_idx == 1 and trainer.global_rank == 1:
        trainer.request_stop("a value of rank 1's")


def _stop_on_rank_1(trainer: Any, module: Any) -> None:
    trainer.should_stop = trainer.global_rank == 1


def _messages() -> list[list[str]]:
    within = LambdaCallback(on_train_batch_end=_request_on_rank_1)
    between = LambdaCallback(on_train_epoch_end=_stop_on_rank_1)
    found = []
    for module, callback, epochs in ((Regression(), within, 9), (Regression(), between, 9), (NeverSteps(), [], 1)):
        with captured_warnings(logging.INFO) as lines:
            quiet(strategy="ddp", callbacks=callback, max_epochs=epochs).fit(module, loader(200, 2))
        found.append([line for line in lines if not line.startswith("Precision")])
    return found


def test_a_message_is_logged_once_whichever_rank_caused_it() -> None:  # I-17
    (within, between, never_steps), silent = on_ranks(_messages, 2)
    for lines, part in (
        (within, "The run ended: a value of rank 1's (0 epochs, "),
        (between, "The run ended: trainer.should_stop was set in _stop_on_rank_1 (1 epoch, "),
        (never_steps, "did not call step() of any"),
        (never_steps, "no validation loader"),
        (never_steps, "The run ended: max_epochs=1 is reached"),
    ):
        assert sum(part in line for line in lines) == 1, lines
    assert silent == [[], [], []]


class Monitored(Regression):
    """Logs a value that differs between ranks, in one of several forms."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    @property
    def value(self) -> float:
        # Worse on rank 0 and better on rank 1, with a mean that gets worse.
        step = float(self.current_epoch + 1)
        return 3.0 * step if self.global_rank == 0 else -step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "a step's value":
            self.log("value", self.value)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "sync_dist=False":
            self.log("value", self.value, sync_dist=False)
        elif self.how == "reduced":
            self.log("value", self.value)
        elif self.how == "only rank 0" and self.global_rank == 0:
            self.log("value", self.value, sync_dist=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "value"}}


def _monitored() -> dict[str, Any]:
    found: dict[str, Any] = {}
    batches = loader(16, 4)
    for how in ("reduced", "sync_dist=False", "a step's value", "only rank 0"):
        stopping = EarlyStopping("value", patience=3, check_on_train_epoch_end=True)
        trainer = quiet(strategy="ddp", max_epochs=8, callbacks=stopping)
        trainer.fit(Monitored(how), batches, batches)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        found[how] = (trainer.current_epoch, rates)
    only_here = [EarlyStopping("value", patience=3)] if dist.get_rank() == 0 else []
    began = time.monotonic()
    text = refusal(Monitored("reduced"), batches, batches, strategy="ddp", max_epochs=2, callbacks=only_here)
    found["stops one rank only"] = text, time.monotonic() - began
    return found


def test_a_monitored_value_is_the_same_on_all_ranks_and_a_callback_that_stops_one_is_named() -> None:  # B-19
    first, second = ranks = on_ranks(_monitored, 2)
    for text, seconds in (found.pop("stops one rank only") for found in ranks):
        assert "\"the value of 'value', on which a decision depends\" on rank(s) [0]" in text
        assert seconds < 20
    assert first == second
    for how, (epochs, rates) in first.items():
        assert epochs == 4, how  # the first epoch is the best, and patience allows three more
        assert rates == [0.1 / 2**3], how


def _skip_at(batch_idx: int, *ranks: int) -> Callback:
    def skip(trainer: Any, module: Any, batch: Any, at: int) -> int | None:
        return -1 if at == batch_idx and trainer.global_rank in ranks else None

    return LambdaCallback(on_train_batch_start=skip)


def _skipping(folder: str) -> dict[str, Any]:
    train._SKIP_TIMEOUT = timedelta(seconds=1)
    found: dict[str, Any] = {}
    callbacks = {"both": _skip_at(2, 0, 1), "rank 1": _skip_at(2, 1), "rank 0 at the end": _skip_at(7, 0)}
    for name, callback in callbacks.items():
        options: Any = {"default_root_dir": f"{folder}/{name}", "logger": "csv"}  # so that the run has a folder
        trainer = quiet(strategy="ddp", max_epochs=2, callbacks=callback, **options)
        began = time.monotonic()
        with failing() as error:
            trainer.fit(Regression(), loader(64, 4))
        found[name] = (error, trainer.global_step, time.monotonic() - began)
    return found


def test_minus_one_on_one_rank_is_named_without_a_hang(tmp_path: Path) -> None:  # B-19, G-04
    for found in on_ranks(_skipping, 2, str(tmp_path), process_group=None):
        error, steps, _ = found["both"]
        assert error["text"] == ""
        assert steps == 4
        for name in ("rank 1", "rank 0 at the end"):
            error, _, seconds = found[name]
            assert error["type"] in ("AbsentRanksError", "RankFailedError"), error
            assert "on_train_batch_start returned -1" in error["text"], error
            assert seconds < 10
            # Both ranks have dumped their flight records, and the error names the path.
            logs = tmp_path / name / "drivetrain_logs/version_0/logs"
            assert f"The last collectives of each rank: {logs}/flight_rank_*" in error["text"], error
            for rank in (0, 1):
                assert pickle.loads((logs / f"flight_rank_{rank}").read_bytes())["entries"]
    assert not list((tmp_path / "both").rglob("flight_rank_*"))  # nothing is dumped if there is no problem


ALONE: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "all_gather": ("on_train_batch_end", lambda module, folder: module.all_gather(torch.ones(2))),
    "save_checkpoint": ("on_train_batch_end", lambda module, folder: module.trainer.save_checkpoint(f"{folder}/alone")),
    "validate": ("on_train_batch_end", lambda module, folder: module.trainer.validate(module, loader(16, 4))),
    "all_gather at the end": ("on_train_epoch_end", lambda module, folder: module.all_gather(1.0)),
}
"""The hook in which only rank 0 makes a collective call."""


def _alone(folder: str) -> dict[str, Any]:
    collective_calls._ARRIVAL_TIMEOUT = timedelta(seconds=1)
    found: dict[str, Any] = {}
    for name, (hook, call) in ALONE.items():

        def alone(trainer: Any, module: Any, *_: Any, call: Any = call) -> None:
            if trainer.is_global_zero:
                call(module, folder)

        hooks: dict[str, Any] = {hook: alone}
        began = time.monotonic()
        text = refusal(Monitored("reduced"), loader(64, 4), strategy="ddp", callbacks=LambdaCallback(**hooks))
        found[name] = text, time.monotonic() - began
    trained(Regression(), loader(64, 4), strategy="ddp")
    return found


def test_collective_calls_under_is_global_zero_are_refused(tmp_path: Path) -> None:  # A-08, G-07
    ranks = on_ranks(_alone, 2, str(tmp_path), process_group=None)
    for rank, found in enumerate(ranks):
        for call, (error, seconds) in found.items():
            assert not error.startswith("nothing was raised"), (rank, call)
            assert seconds < 15, (call, error)
            assert call.split()[0] in error, (rank, call, error)
            assert call == "validate" or "is_global_zero" in error
    assert not (tmp_path / "alone").exists()


class Shaped(Regression):
    """Differs on rank 1 in the given way."""

    def __init__(self, way: str, rank: int) -> None:
        super().__init__()
        self.odd = way if rank == 1 else ""
        if way == "shape":
            self.head = seeded(lambda: nn.Linear(1, 1 + rank))
        if way == "order":
            names = ["b", "a"] if self.odd else ["a", "b"]
            self.parts = nn.ModuleDict({name: seeded(lambda: nn.Linear(1, 1)) for name in names})
        if self.odd == "dtype":
            self.net[2].double()
        elif self.odd == "requires_grad":
            self.net[0].bias.requires_grad_(False)
        elif self.odd == "more":
            self.extra = nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        lr = 0.2 if self.odd == "lr" else 0.1
        if self.odd == "optimizer":
            return torch.optim.RMSprop(self.parameters(), lr)
        optimizer = torch.optim.SGD(self.parameters(), torch.tensor(lr), momentum=0.9)
        if self.odd == "scheduler":
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        if self.odd == "groups":
            optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
        return optimizer


FIT_SETTINGS: dict[str, tuple[Any, Any]] = {
    "accumulate_grad_batches": (1, 2),
    "precision": ("32-true", "bf16-mixed"),
    "gradient_clip_val": (None, 1.0),
    "max_epochs": (2, 3),
    "seed": (0, 1),
    "limit_val_batches": (1, 2),
}
"""Each with its value on rank 0 and on rank 1."""


def _different() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for way in NAMED:
        found[way] = refusal(Shaped(way, rank), loader(64, 4), strategy="ddp")
    for name, values in FIT_SETTINGS.items():
        found[name] = refusal(Shaped("", rank), loader(64, 4), loader(16, 4), **{"strategy": "ddp", name: values[rank]})
    # Equal numbers of micro-batches, but not of samples.
    part, _ = random_split(data(64), [48 - 8 * rank, 16 + 8 * rank])
    for name, *loaders in (
        ("training micro-batches", loader(64 + 16 * rank, 4)),
        ("validate micro-batches", loader(64, 4), loader(16 + 16 * rank, 4)),
        ("training samples", DataLoader(part, batch_size=8)),
    ):
        found[name] = refusal(Shaped("", rank), *loaders, strategy="ddp")
    with failing() as error:
        getattr(quiet(strategy="ddp"), "validate" if rank else "fit")(Shaped("", rank), loader(16, 4))
    found["stage"] = f"{error['type']}: {error['text']}"
    found["afterwards"] = trained(Regression(), loader(64, 4), strategy="ddp")
    return found


NAMED = {
    "shape": "parameter 'head.weight'",
    "dtype": "parameter 'net.2.weight'",
    "requires_grad": "parameter 'net.0.bias'",
    "more": "parameter 'extra.weight'",
    "order": "order of parameters",
    "lr": "optimizer 0, group 0, lr: 0.1",
    "optimizer": 'optimizer 0: "SGD"',
    "scheduler": "schedulers: []",
    "groups": "optimizer 0, group 0, parameters: 4",
}
"""Ways in which `Shaped` differs, and how the error names them."""


def test_differences_between_ranks_are_named_before_the_first_step() -> None:  # A-10, G-07
    ranks = on_ranks(_different, 2, process_group=None)
    assert torch.equal(*(found.pop("afterwards") for found in ranks))
    for found in ranks:
        for name, error in found.items():
            assert error.startswith("DistributedError"), (name, error)
            assert NAMED.get(name, name) in error, (name, error)
            assert "rank(s) [0]" in error, (name, error)
            assert "rank(s) [1]" in error, (name, error)


BY_ALL = "gathered.append(module.all_gather(batch_idx).tolist())"
PAIRED = {"a text for each rank", "compiled for each batch"}
OTHER = "module.all_gather(1) if module.global_rank else module.trainer.save_checkpoint('nowhere')"
WAITS_ONE_SECOND = mock.patch.object(collective_calls, "_ARRIVAL_TIMEOUT", timedelta(seconds=1))
GATHERS_ALONE = "batch_idx == 2 and module.trainer.is_global_zero and module.all_gather(1)"


class Generated(Regression):
    """Runs one line of code after each batch, of a file of this name; with ``anew``, it is compiled for each batch."""

    def __init__(self, text: str, file: str, anew: bool = False) -> None:
        super().__init__()
        self.text, self.file, self.anew = text, file, anew
        self.code = compile(text, file, "exec")
        self.gathered: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        code = compile(self.text, self.file, "exec") if self.anew else self.code
        exec(code, {"module": self, "gathered": self.gathered, "batch_idx": batch_idx, "torch": torch})


def _run(text: str, file: str = "<string>", anew: bool = False) -> dict[str, Any]:
    """Train; return what was gathered, what was raised, and the duration."""
    module = Generated(text, file, anew)
    began = time.monotonic()
    with failing() as error:
        quiet(strategy="ddp").fit(module, loader(32, 4))
    return {"gathered": module.gathered, "seconds": time.monotonic() - began, **error}


def _paired_and_alone() -> dict[str, dict[str, Any]]:
    rank = int(os.environ["RANK"])
    with WAITS_ONE_SECOND:
        return {
            "a text for each rank": _run(f"{'pass; ' * rank}{BY_ALL}", f"<cell {rank}>"),
            "compiled for each batch": _run(BY_ALL, anew=True),
            "alone": _run(f"{BY_ALL}; {GATHERS_ALONE}"),
            "alone at the end": _run(f"{BY_ALL}; {GATHERS_ALONE.replace('2', '3')}"),
            "another call": _run(OTHER),
        }


def test_calls_in_generated_code_are_paired_or_refused() -> None:
    for rank, cases in enumerate(on_ranks(_paired_and_alone, 2, process_group=None)):
        for case, found in cases.items():
            if case in PAIRED:
                assert found["type"] == "nothing was raised", (rank, case, found)
                assert found["gathered"] == [[batch, batch] for batch in range(4)], (rank, case)
                assert found["seconds"] < 5, (rank, case)
            else:
                assert found["type"] != "nothing was raised", (rank, case)
                assert found["seconds"] < 15, (rank, case, found)
                assert "rank(s) [1]" in found["text"], (rank, case, found)
                assert "is_global_zero" in found["text"], (rank, case, found)
        assert 'agree on the next call: "all_gather (training batch 3' in cases["alone at the end"]["text"]
        assert "Rank 0 reached all_gather (training batch 2, epoch 0, global step 3)" in cases["alone"]["text"]
        assert 'agree on the next call: "save_checkpoint' in cases["another call"]["text"]


class Contrastive(Regression):
    """Gathers in each ``training_step``, and after it; at one batch, rank 0 gathers or saves once more."""

    def __init__(self, alone_at: int | None = None, saves: bool = False, in_hook: bool = True) -> None:
        super().__init__()
        self.alone_at, self.saves, self.in_hook = alone_at, saves, in_hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.alone_at and self.trainer.is_global_zero:
            self.trainer.save_checkpoint("nowhere") if self.saves else self.all_gather(1)
        self._gather(batch_idx)
        return self.loss(batch)

    def _gather(self, batch_idx: int) -> None:
        assert self.all_gather(batch_idx).tolist() == [batch_idx] * 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.in_hook:
            self._gather(batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._gather(batch_idx)


def _waits(module: Contrastive, *validation: Any, **settings: Any) -> dict[str, Any]:
    """Train in windows of two batches; return the calls that waited for the other ranks, and what was raised."""
    purposes: list[str] = []
    agree = GroupControl.count_flags

    def noted(self: Any, purpose: str, *flags: bool, **options: Any) -> tuple[int, ...]:
        purposes.append(purpose)
        return agree(self, purpose, *flags, **options)

    with mock.patch.object(GroupControl, "count_flags", noted), failing() as error:
        quiet(strategy="ddp", accumulate_grad_batches=2, **settings).fit(module, loader(32, 4), *validation)
    return {"calls": [text.partition(",")[0] for text in purposes if text.startswith("all_gather")], **error}


def _steps() -> dict[str, dict[str, Any]]:
    with WAITS_ONE_SECOND:
        return {
            "everywhere": _waits(Contrastive(), loader(16, 4)),
            "in the step": _waits(Contrastive(in_hook=False)),
            "compiled": _waits(Contrastive(in_hook=False), compile={"backend": "eager"}),
            "alone": _waits(Contrastive(alone_at=1)),
            "alone, saving": _waits(Contrastive(alone_at=2, saves=True)),
        }


def test_calls_in_steps_wait_only_in_the_first_window() -> None:
    for found in on_ranks(_steps, 2, process_group=None):
        batches = [f"all_gather (training batch {number}" for number in range(4)]
        assert found["in the step"]["calls"] == found["compiled"]["calls"] == batches[:2]
        evaluated = [f"all_gather (evaluation batch {number}" for number in range(2)]
        assert found["everywhere"]["calls"] == [*(batches[0:1] * 2), *(batches[1:2] * 2), *batches[2:], *evaluated]
        for case, one in found.items():
            assert (one["type"] == "nothing was raised") == ("alone" not in case), one
            assert ("is_global_zero" in one["text"]) == ("alone" in case)
