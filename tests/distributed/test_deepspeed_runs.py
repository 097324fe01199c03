"""Whole runs under DeepSpeed: refusals, cleanup, optimizers of every kind: rows E-02 to E-12."""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Deep, DeepRegression, trained_in_plain_torch
from small_runs import FEATURES, SHARD_EVERYTHING, TIGHT, Saver, each, loader, quiet, refusal, seeded, trained, weights
from torch import nn

from captured_warnings import captured_warnings
from cpu_kernels import FP16
from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import DeepSpeedStrategy
from drivetrain_strategies.deepspeed._library import import_library
from oracle.check import check
from oracle.program import Data, Evaluation, Log, Net, Optimizer, Program, Turn, Validation
from worlds import on_ranks

UNTESTED: dict[str, Any] = {"config": {"zero_allow_untested_optimizer": True}}


def _with(build: Callable[[Any], Any], **attributes: Any) -> DeepRegression:
    """Return a module whose configure_optimizers is ``build``."""
    module = DeepRegression()
    module.configure_optimizers = lambda: build(module)  # type: ignore[method-assign]
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class UserAdamW(torch.optim.AdamW):
    """A user-defined optimizer. Torch knows its class only as a base class."""


def _two(module: Any) -> Any:
    return [torch.optim.AdamW(part.parameters()) for part in (module.net.stem, module.net.head)]


def _frozen_group(module: Any) -> Any:
    module.net.head.requires_grad_(False)
    return torch.optim.AdamW([{"params": module.net.blocks.parameters()}, {"params": module.net.head.parameters()}])


def _scheduled(module: Any) -> Any:
    optimizer = torch.optim.AdamW(module.parameters())
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Sparse(DeepRegression):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, **options)


ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-5, "weight_decay": 0.1, "torch_adam": True}}
RISING: dict[str, Any] = {"warmup_num_steps": 4, "warmup_max_lr": 0.01, "warmup_type": "linear"}
WARM_UP = {"type": "WarmupLR", "params": RISING}


class RequiresClosure(torch.optim.SGD):
    """Requires a closure, whatever its signature says."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        return super().step(closure)


class StepsWithClosure(DeepRegression):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return RequiresClosure(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step(lambda: loss)


def _with_device_map() -> DeepRegression:
    module = DeepRegression()
    module.net.hf_device_map = {"": 0}
    return module


def _declares_closure(module: Any) -> Any:
    return {"optimizer": RequiresClosure(module.parameters(), lr=0.1), "closure": True}


def _used_optimizer(in_a_run: bool) -> DeepRegression:
    """Return a module whose optimizer has made steps, in a run under DeepSpeed or by hand."""
    module = DeepRegression()
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    if in_a_run:
        trained(module, loader(16, 4), strategy=DeepSpeedStrategy(stage=2))
    else:
        module.loss(next(iter(loader(8, 8)))).backward()
        optimizer.step()
    return module


class Refused(NamedTuple):
    """A part of the error, what is trained, settings of the strategy and of `Fit`, and stages that refuse it."""

    text: str
    build: Callable[[], Any] = DeepRegression
    options: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    stages: tuple[int, ...] = (2, 3)


def _by(build: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a function that builds a module whose optimizer ``build`` makes from its parameters."""
    return lambda: _with(lambda module: build(list(module.parameters())))


def _config(**config: Any) -> dict[str, Any]:
    return {"config": config}


BY_VALUE = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
CLOSURE = "RequiresClosure steps with a closure under DeepSpeed"
REFUSED = [
    # E-04, B-13
    Refused("2 optimizers (AdamW, AdamW) under DeepSpeed", lambda: _with(_two)),
    Refused("that take turns (manual optimization)", lambda: _with(_two, automatic_optimization=False)),
    # B-16, B-17
    Refused("SparseAdam under DeepSpeed", _by(torch.optim.SparseAdam)),
    Refused("UserAdamW under DeepSpeed", _by(UserAdamW)),
    Refused("LBFGS under DeepSpeed", _by(torch.optim.LBFGS)),
    Refused("Adafactor under DeepSpeed", _by(torch.optim.Adafactor)),
    Refused("ignores learning rate schedulers", _by(torch.optim.Adagrad), UNTESTED),
    # I-02, I-06
    Refused(CLOSURE, lambda: _with(_declares_closure), UNTESTED, stages=(2,)),
    Refused(CLOSURE, StepsWithClosure, UNTESTED, stages=(2,)),
    Refused("return {'optimizer': optimizer, 'closure': True} from", _by(RequiresClosure), UNTESTED, stages=(2,)),
    # E-02
    Refused("optimizer='AdamW', but configure_optimizers also returned one", options=_config(optimizer=ADAMW)),
    Refused("scheduler='WarmupLR', but configure_optimizers", lambda: _with(_scheduled), _config(scheduler=WARM_UP)),
    Refused("configure_optimizers returned None", lambda: _with(lambda module: None), stages=(3,)),
    # E-03
    Refused("Fit(gradient_clip_val=0.5)", options=_config(gradient_clipping=1.0), settings={"gradient_clip_val": 0.5}),
    Refused("Fit(accumulate_grad_batches=1)", options=_config(gradient_accumulation_steps=4)),
    Refused("the loader's batch_size=4", options=_config(train_micro_batch_size_per_gpu=8)),
    # E-09, B-05
    Refused("gradient_clip_algorithm='value' under DeepSpeed", settings=BY_VALUE),
    # E-06, E-11
    Refused("precision='64-true', a DoublePrecision, under DeepSpeed", settings={"precision": "64-true"}),
    Refused("precision='bf16-true', a HalfPrecision, under DeepSpeed", settings={"precision": "bf16-true"}),
    Refused("'net.stem.weight' has dtype torch.bfloat16", lambda: DeepRegression().bfloat16()),
    Refused("build a new one in configure_optimizers", partial(_used_optimizer, in_a_run=True)),
    Refused("AdamW has state", partial(_used_optimizer, in_a_run=False)),
    Refused("Parameter group 1 of AdamW has nothing to train: ['net.head.weight'", lambda: _with(_frozen_group)),
    # B-20, C-06
    Refused("'table' is an Embedding with sparse=True", lambda: Sparse(sparse=True)),
    Refused("'table' is an Embedding with max_norm", lambda: Sparse(max_norm=1.0)),
    Refused("loaded with a device_map", _with_device_map),
    Refused("no module of class Conv2d", options={"activation_checkpointing": [nn.Conv2d]}),
    Refused("leaf_modules: no module of class Conv2d", options={"leaf_modules": [nn.Conv2d]}, stages=(3,)),
]
if not FP16:
    REFUSED.append(Refused("precision='16-mixed' under DeepSpeed on 'cpu'", settings={"precision": "16-mixed"}))


def _refusals(stage: int) -> list[tuple[str, str]]:
    texts = []
    for case in REFUSED:
        if stage in case.stages:
            module = case.build()
            before = copy.deepcopy(module.state_dict())
            strategy = DeepSpeedStrategy(stage=stage, **case.options)
            texts.append((case.text, refusal(module, loader(16, 4), strategy=strategy, **case.settings)))
            # Nothing was wrapped: the weights are at their original location.
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            assert not any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    trained(DeepRegression(), loader(16, 4), strategy=DeepSpeedStrategy(stage=stage))  # G-07
    return texts


@pytest.mark.parametrize("stage", [2, 3])
def test_unsupported_training_is_refused_by_name(stage: int) -> None:
    # E-02, E-03, E-04, E-06, E-09, I-02, I-06, B-05, B-13, B-17, B-20
    for texts in on_ranks(_refusals, 2, stage):
        for part, text in texts:
            assert text.startswith("ConfigurationError"), (part, text)
            assert part in text


def _from_config(stage: int) -> Any:
    module = _with(lambda one: None)
    rates: list[float] = []

    def note(trainer: Any, *_: Any) -> None:
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    config = {"optimizer": ADAMW, "scheduler": WARM_UP, "gradient_clipping": 0.1}
    strategy = DeepSpeedStrategy(stage=stage, config=config)
    callback = LambdaCallback(on_train_batch_end=note)
    quiet(strategy=strategy, callbacks=callback, accumulate_grad_batches=2).fit(module, loader(48, 4))
    return weights(module), rates, strategy.resolved_config


def test_optimizer_scheduler_and_clipping_from_the_config() -> None:
    # E-02, E-09, B-05, B-09: the scheduler steps once per step, not per micro-batch
    import_library()
    from deepspeed.runtime.lr_schedules import WarmupLR

    # Written by hand: the scheduler is DeepSpeed's.
    module = DeepRegression()
    optimizer = module.configure_optimizers()
    scheduler = WarmupLR(optimizer, **RISING)
    rates = []
    for batch in loader(48, 16):
        optimizer.zero_grad()
        module.loss(batch).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        assert nn.utils.clip_grad_norm_(module.parameters(), 0.1) > 0.1
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    for found, seen, config in itertools.chain.from_iterable(on_ranks(each, 2, _from_config, (1,), (3,))):
        torch.testing.assert_close(found, weights(module), **TIGHT)
        assert seen == pytest.approx(rates)
        assert config["optimizer"] == ADAMW
        assert config["gradient_accumulation_steps"] == 1


def _compiled(parameters: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, lr=0.01)


def _bare(drive: str) -> Any:
    found = [
        trained(DeepRegression(), loader(40, 4), strategy=DeepSpeedStrategy(**options))
        for options in ({"stage": 1}, SHARD_EVERYTHING, {"stage": 2, "offload_optimizer": "cpu"})
    ]
    theirs = {"config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}}
    texts = []
    for module, options in (
        (_by(_compiled)(), {"offload_optimizer": "cpu"}),
        (_with(lambda one: None), theirs),
        (_with(lambda one: None), {"offload_optimizer": "cpu", **theirs}),
        (_with(lambda one: None), {**SHARD_EVERYTHING, **theirs}),
        (DeepRegression(), {**SHARD_EVERYTHING, "offload_optimizer": "nvme", "nvme_path": drive}),
        (DeepRegression(), {**SHARD_EVERYTHING, "offload_parameters": "nvme", "nvme_path": drive}),
    ):
        before = weights(module).clone()
        texts.append(refusal(module, loader(40, 4), strategy=DeepSpeedStrategy(**options)))
        assert torch.equal(weights(module), before)  # nothing was wrapped
    return found, texts


def test_torch_optimizers_need_no_compiler(tmp_path: Path) -> None:
    # E-10; E-07: if a compiler is needed, the message states what to install
    bare = {"PATH": "/nowhere", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    for found, texts in on_ranks(_bare, 2, str(tmp_path), env=bare):
        for actual in found:
            torch.testing.assert_close(actual, trained_in_plain_torch(DeepRegression(), 40), **TIGHT)
        for text in texts:
            assert text.startswith("ConfigurationError: DeepSpeed could not build one of its operations"), text
            assert "install g++ and ninja" in text


def _state_left_behind() -> Any:
    report: list[Any] = []
    for options in ({"stage": 2}, SHARD_EVERYTHING, {**SHARD_EVERYTHING, "offload_optimizer": "cpu"}):
        for fails in (False, True):
            module = DeepRegression(seeded(Deep))
            module.net.note = "the user's"
            parameters = list(module.parameters())
            state = _attributes(module)
            linear, environment = nn.functional.linear, dict(os.environ)
            groups = set(dist.distributed_c10d._world.pg_map)

            def fail(trainer: Any, module: Any, *_: Any, fails: bool = fails) -> None:
                module.mine = True
                if fails:
                    raise ValueError("on every rank")

            callback = LambdaCallback(on_train_batch_end=fail)
            text = refusal(module, loader(16, 4), strategy=DeepSpeedStrategy(**options), callbacks=callback)
            assert text.startswith("ValueError" if fails else "nothing was raised"), text
            assert module.mine  # attributes of the user are kept
            del module.mine
            assert _attributes(module) == state
            lost = fails and options["stage"] == 3
            assert all(parameter.is_meta is lost for parameter in module.parameters())
            assert all(lost or one is other for one, other in zip(module.parameters(), parameters, strict=True))
            assert nn.functional.linear is linear
            assert dict(os.environ) == environment
            assert set(dist.distributed_c10d._world.pg_map) == groups
            assert dist.get_world_size() == 2
            copy.deepcopy(module)
            # Later work in the process is not affected: another strategy, and the same one again.
            if lost:
                module.load_state_dict(DeepRegression().state_dict(), assign=True)
                report.append(trained(module, loader(40, 4), strategy=DeepSpeedStrategy(**options)))
            assert torch.isfinite(weights(module)).all()
            report.append(trained(DeepRegression(), loader(40, 4), strategy="fsdp" if fails else "ddp"))
    return report


def _attributes(module: nn.Module) -> Any:
    """Return everything about a module except its weights."""
    hooks = [name for name in module.__dict__ if name.endswith(("_hooks", "_with_kwargs"))]
    return [
        (
            type(child),
            type(child._parameters),
            sorted(set(child.__dict__) - {"_hyper_parameters", "_last_trainer", "_checkpoint_of_missing_weights"}),
            [len(child.__dict__[name]) for name in hooks],
            [sorted(parameter.__dict__) for parameter in child._parameters.values() if parameter is not None],
            [tuple(parameter.shape) for parameter in child._parameters.values() if parameter is not None],
        )
        for child in module.modules()
    ]


def test_nothing_is_left_behind() -> None:
    # E-12, A-02, A-03, G-07: after success and after failure, in the user's process group
    expected = trained_in_plain_torch(DeepRegression(), 40)
    for report in on_ranks(_state_left_behind, 2, timeout=150):
        assert len(report) == 8
        for entry in report:
            torch.testing.assert_close(entry, expected, **TIGHT)


def _left_over(path: str) -> Any:
    module = DeepRegression()
    limited = DeepSpeedStrategy(**SHARD_EVERYTHING, gather_limit=10)
    trained(module, loader(16, 4), strategy=limited, callbacks=Saver(path))
    assert tuple(module.net.stem.weight.shape) == (8, 4)
    every = DeepSpeedStrategy(**SHARD_EVERYTHING)
    texts = [refusal(module, loader(16, 4), strategy=strategy) for strategy in (every, "fsdp")]
    return texts, trained(module, loader(16, 4), ckpt_path=path, strategy=every, max_epochs=2)


def test_above_the_limit_the_weights_are_in_the_checkpoint(tmp_path: Path) -> None:  # I-15
    path = str(tmp_path / "end")
    wanted = trained_in_plain_torch(DeepRegression(), 16, epochs=2)
    for texts, found in on_ranks(_left_over, 2, path):
        for text in texts:
            assert "DeepRegression has no weights: its parameters are on the meta device." in text
            assert f"The newest checkpoint is {path!r}." in text
        torch.testing.assert_close(found, wanted, **TIGHT)


def _log_messages() -> Any:
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append((record.levelno, record.getMessage()))

    kept: list[tuple[int, str]] = []
    theirs = logging.getLogger("drivetrain.deepspeed")
    theirs.setLevel(logging.DEBUG)
    theirs.addHandler(Keep())
    theirs.propagate = False
    module = DeepRegression()
    for options in ({"stage": 1}, SHARD_EVERYTHING):
        quiet(strategy=DeepSpeedStrategy(**options), devices=2, precision="bf16-mixed").fit(module, loader(16, 4))
        assert not dist.is_initialized()
    assert comm.cdb is None
    assert groups._WORLD_GROUP is None
    return kept, weights(module)


def test_a_group_of_ours_ends_with_the_run_and_deepspeeds_banner_appears_on_request(capfd: Any) -> None:
    # A-02, E-12
    (kept, first), (_, second) = on_ranks(_log_messages, 2, process_group=None)
    assert torch.equal(first, second)
    assert any("DeepSpeed info: version" in text for _, text in kept)
    assert {level for level, _ in kept} == {logging.DEBUG}
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "DeepSpeed info" not in printed.err


class Infinite(DeepRegression):
    """The loss is infinite on rank 1 in a micro-batch, or everywhere."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        infinite = self.at is None or (batch_idx == self.at and self.global_rank == 1)
        return self.loss(batch) * (torch.inf if infinite else 1.0)


def _infinite(options: dict[str, Any], precision: str) -> Any:
    steps: list[int] = []
    seen: list[torch.Tensor] = []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        steps.append(trainer.global_step)
        with trainer.strategy.gathered(write=False):
            seen.append(weights(module).clone())

    callback = LambdaCallback(on_train_batch_end=look)
    strategy = DeepSpeedStrategy(**options)
    with captured_warnings() as logged:
        trained(Infinite(1), loader(32, 4), strategy=strategy, precision=precision, callbacks=callback)
    return steps, seen, logged


def test_a_step_that_deepspeed_skips_is_logged() -> None:
    # E-06, E-11: DeepSpeed skips it silently, on every rank; here it is not counted, and one line reports it
    in_half: Any = [({"stage": 1}, "bf16-mixed"), ({"stage": 2, "offload_optimizer": "cpu"}, "bf16-mixed")]
    cases = [*in_half, ({"stage": 2}, "32-true"), ({"stage": 3}, "32-true")]
    for found in on_ranks(each, 2, _infinite, *cases):
        for case, (steps, seen, logged) in zip(cases, found, strict=True):
            assert steps == [1, 1, 2, 3], case
            assert torch.equal(seen[0], seen[1]), case
            assert all(torch.isfinite(one).all() for one in seen), case
            assert len([text for text in logged if "DeepSpeed skipped the step" in text]) == 1, case


class Normed(DeepRegression):
    """The first layer is a norm whose input is the batch, in float32."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm: Any = norm(FEATURES)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.norm(batch[0]), batch[1]))


NORMS = nn.LayerNorm, partial(nn.GroupNorm, 1), nn.BatchNorm1d


def _normed(stage: int, precision: str, norm: Callable[[int], nn.Module]) -> tuple[torch.Tensor, torch.Tensor]:
    module = Normed(norm)
    found = trained(module, loader(32, 4), strategy=DeepSpeedStrategy(stage=stage), precision=precision)
    return module.norm.weight.detach().clone(), found


def test_a_norm_in_half_precision_accepts_an_input_in_float32() -> None:
    # E-06: torch's CPU kernels refuse half-precision weights with such an input; plain autocast keeps them in float32
    cases = [*itertools.product((2, 3), ("32-true", "bf16-mixed"), NORMS)]
    for ranks in on_ranks(each, 2, _normed, *cases):
        found = dict(zip(cases, ranks, strict=True))
        for stage, norm in itertools.product((2, 3), NORMS):
            (exact, all_exact), (half, all_half) = (found[stage, one, norm] for one in ("32-true", "bf16-mixed"))
            assert not torch.equal(exact, torch.ones_like(exact))
            torch.testing.assert_close(half, exact, atol=5e-3, rtol=0)
            torch.testing.assert_close(all_half, all_exact, atol=2e-2, rtol=0)


def _always_infinite(stage: int) -> Any:
    fit = quiet(strategy=DeepSpeedStrategy(stage=stage), precision="16-mixed")
    with captured_warnings() as logged:
        fit.fit(Infinite(), loader(45 * 8, 4))
    return fit.global_step, logged


@pytest.mark.skipif(not FP16, reason="ZeRO refuses fp16 on a processor without it")
def test_a_loss_scale_at_its_floor_is_logged_and_the_run_continues() -> None:
    # I-05, E-06: 2^16 halved at each of 45 overflows, until it is 2^-24, as under every other strategy
    for rank, found in enumerate(on_ranks(each, 2, _always_infinite, (1,), (3,))):
        for steps, logged in found:
            assert steps == 0
            assert sum("has fallen to its floor, 2^-24" in text for text in logged) == (rank == 0), logged


class BuiltLate(DeepRegression):
    """Its layers are built in configure_model, and initialised again by a loop over all parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = Deep()
            for name, parameter in self.net.named_parameters():
                if name.endswith("up.weight"):
                    nn.init.orthogonal_(parameter)

    def configure_optimizers(self) -> Any:
        # Selected by shape, as is common: under zero.Init every parameter would be one-dimensional.
        matrices = [one for one in self.parameters() if one.ndim >= 2]
        vectors = [one for one in self.parameters() if one.ndim < 2]
        assert matrices
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-5)


def _built(options: dict[str, Any]) -> Any:
    numels: list[int] = []

    def look(trainer: Any, module: Any) -> None:
        held = [one.untyped_storage().nbytes() // one.element_size() for one in module.parameters()]
        numels.extend([sum(held), sum(one.ds_tensor.numel() for one in module.parameters())])

    callback = LambdaCallback(on_train_start=look) if options["stage"] == 3 else None
    torch.manual_seed(100 + dist.get_rank())
    strategy = DeepSpeedStrategy(**options)
    return trained(BuiltLate(), loader(40, 4), strategy=strategy, seed=7, callbacks=callback), numels


def test_layers_built_in_configure_model() -> None:
    # E-05: initialised as in the reference, bit for bit, and no rank ever holds the whole model
    torch.manual_seed(7)
    module = BuiltLate()
    module.configure_model()
    reference = trained_in_plain_torch(module, 40)
    numel = sum(one.numel() for one in module.parameters())
    cases = [(options,) for options in ({"stage": 2}, SHARD_EVERYTHING, {**SHARD_EVERYTHING, "meta": False})]
    for found, numels in itertools.chain.from_iterable(on_ranks(each, 2, _built, *cases)):
        torch.testing.assert_close(found, reference, **TIGHT)
        if numels:
            whole, part = numels
            assert whole == 0
            assert part <= numel / 2 + len(list(module.parameters()))


PROGRAMS = {
    # E-01, E-09, B-02, B-03: SGD shows wrong gradient scales; Adam would compensate for them. Last windows are short.
    **{f"windows of {size}": Program(data=Data(samples=20), accumulate=size) for size in (1, 2, 4)},
    "weighted": Program(data=Data(samples=20), accumulate=2, token_weighted=True, net=Net(family="gru")),
    # E-11: the others stay unchanged, whichever part of them a rank holds
    "an optimizer over some of the parameters": Program(optimizers=(Optimizer("adamw", of="head"),)),
    "one process": Program(ranks=1, accumulate=2),  # E-01
    # E-04, I-02
    "manual optimization": Program(manual=(Turn(repeats=2, clips=1), Turn(toggles=True, closure=True))),
    # E-05: torch holds weak references to a GRU's weights, and does not swap referenced tensors
    "recurrent layers built in configure_model": Program(net=Net(family="gru"), configure_model=True),
    # B-04, E-05: within the run, and alone, without an optimizer
    "uneven evaluation": Program(
        validation=Validation(samples=5), logs=(Log("validation_step"),), evaluation=Evaluation(strategy="ddp", ranks=1)
    ),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_programs_equal_the_oracle(stage: int, program: Program) -> None:
    ranks = 1 if program == PROGRAMS["one process"] else 2
    assert not check(replace(program, strategy=f"deepspeed_stage_{stage}", ranks=ranks))


class StepsTwice(DeepRegression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def _in_bf16(options: dict[str, Any]) -> torch.Tensor:
    strategy = DeepSpeedStrategy(**options) if options else "ddp"
    return trained(StepsTwice(), loader(16, 4), strategy=strategy, precision="bf16-mixed")


def test_several_manual_steps_in_bf16_are_near_to_those_of_ddp() -> None:
    # I-02: the second forward uses the weights that the first step changed
    for by_ddp, *found in on_ranks(each, 2, _in_bf16, ({},), ({"stage": 1},), ({"stage": 2},), (SHARD_EVERYTHING,)):
        moved = (by_ddp - weights(StepsTwice())).norm()
        for actual in found:
            assert (actual - by_ddp).norm() < 0.05 * moved
