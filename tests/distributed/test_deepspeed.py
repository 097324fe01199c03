"""DeepSpeedStrategy: rows E-01, E-05, E-08, E-09, E-11, E-13, B-02, B-03, B-08, C-05, D-11 (unused parameters)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, DeepRegression, Experts, Tied, one_expert_per_rank, trained_in_plain_torch
from small_runs import (
    FEATURES,
    SHARD_EVERYTHING,
    STRATEGIES,
    TIGHT,
    TIGHTER,
    Saver,
    data,
    each,
    failing,
    loader,
    seeded,
    train_by_hand,
    trained,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.data import DataLoader

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain._distributed.shards import ParameterShard, Span, cut  # a state's form has no public name
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import load
from drivetrain.launchers import RankFailedError
from drivetrain.testing import assert_close_states
from drivetrain_strategies import DeepSpeedStrategy
from drivetrain_strategies.deepspeed._library import import_library
from worlds import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1, offload": {"stage": 1, "offload_optimizer": "cpu"},
    "stage 2, offload": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 2, small buckets": {"stage": 2, "reduce_bucket_size": 100, "allgather_bucket_size": 100},
    "stage 2, overlapped": {"stage": 2, "overlap_comm": True, "contiguous_gradients": False},
    "stage 2, checkpointed": {"stage": 2, "activation_checkpointing": [Block]},
    "stage 3, small parameters whole": {"stage": 3},
    "stage 3, nothing whole": SHARD_EVERYTHING,
    "stage 3, offload": {**SHARD_EVERYTHING, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "stage 3, small groups": {**SHARD_EVERYTHING, "sub_group_size": 100, "reduce_bucket_size": 100},
    "stage 3, no prefetch": {**SHARD_EVERYTHING, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0},
    "stage 3, checkpointed": {**SHARD_EVERYTHING, "activation_checkpointing": [Block]},
    "stage 3, leaf modules": {**SHARD_EVERYTHING, "leaf_modules": [Block]},
}


class MixedOutputs(DeepRegression):
    """Has outputs of every kind: DeepSpeed's module hooks traverse all inputs and outputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "number": 3.0, "nothing": None, "batch": batch}

    def validation_step(self, batch: Any, batch_idx: int) -> float:
        return 1.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert (outputs["number"], outputs["nothing"]) == (3.0, None)


def _runs() -> dict[str, torch.Tensor]:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    return {
        name: trained(MixedOutputs(), loader(40, 4), loader(8, 4), strategy=DeepSpeedStrategy(**options), **settings)
        for name, options in OPTIONS.items()
    }


def test_every_setting_gives_the_same_results_with_outputs_of_every_kind() -> None:
    # C-05, E-01, E-05, E-13, B-02: 5 micro-batches in windows of two, the last one short
    expected = trained_in_plain_torch(DeepRegression(), 40, window=2, epochs=2)
    first, second = on_ranks(_runs, 2, timeout=150)
    for name in OPTIONS:
        torch.testing.assert_close(first[name], expected, **TIGHT, msg=name)
        assert torch.equal(first[name], second[name]), name


def _shapes(stage: int) -> Any:
    module = DeepRegression(seeded(Tied))
    report: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            # E-11: also before the first step
            report["empty"] = trainer.strategy.optimizer_state()["state"]
            report["before"] = _wholes(trainer.strategy.model_state())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            strategy = trainer.strategy
            state, optimizer = strategy.model_state(), strategy.optimizer_state()
            assert state["net.blocks.0.up.weight"] is state["net.blocks.2.up.weight"]
            regions, moments = strategy.model_regions(), strategy.optimizer_regions()
            assert set(regions) == {name for name, value in state.items() if isinstance(value, ParameterShard)}
            # A scalar's state is requested whole, because it has the shape of step counters.
            assert set(moments) == set(optimizer["state"]) - {"net.temperature"}
            for name, value in state.items():
                if isinstance(value, ParameterShard):
                    assert value.region == regions[name]
                    assert isinstance(value.region, Span)
                    assert torch.equal(cut(value.full_tensor(), value.region), value.local)
            report["moments"] = sum(values["exp_avg"].local.numel() for values in optimizer["state"].values())
            report["after"] = _wholes(state)
            report["state"] = {name: _wholes(values) for name, values in optimizer["state"].items()}
            # A rank's own regions are loaded without communication, and unchanged.
            strategy.load_model_state(state)
            strategy.load_optimizer_state(optimizer)
            assert_close_states(_wholes(strategy.model_state()), report["after"], atol=0, rtol=0)
            wrong = {**state, "net.head.bias": torch.zeros(3)}
            for given in (wrong, {key: value for key, value in state.items() if key != "net.head.bias"}):
                with failing() as caught:
                    strategy.load_model_state(given)
                report.setdefault("texts", []).append(f"{caught['type']}: {caught['text']}")

    trained(module, loader(40, 4), strategy=STRATEGIES[f"zero {stage}"](), callbacks=Look())
    report["module"] = {name: value.clone() for name, value in module.state_dict().items()}
    return report


def _wholes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if isinstance(value, ParameterShard) else value for name, value in state.items()}


def test_state_by_plain_names() -> None:  # E-08, E-11: full float32, each rank its part
    first, second = on_ranks(each, 2, _shapes, (1,), (2,), (3,))
    reference = DeepRegression(seeded(Tied))
    before = dict(DeepRegression(seeded(Tied)).state_dict())
    optimizer = reference.configure_optimizers()
    reference.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    trained_in_plain_torch(reference, 40)
    numel = sum(parameter.numel() for parameter in reference.parameters())
    names = {id(parameter): name for name, parameter in reference.named_parameters()}
    moments = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    for reports in zip(first, second, strict=True):
        for report in reports:
            assert report["empty"] == {}
            assert_close_states(report["before"], before, atol=0, rtol=0)
            assert_close_states(report["after"], dict(reference.state_dict()), **TIGHT)
            assert_close_states(report["state"], moments, **TIGHT)
            assert_close_states(report["module"], report["after"], atol=0, rtol=0)
            assert "CheckpointError" in report["texts"][0]
            assert "net.head.bias ((3,) instead of (1,))" in report["texts"][0]
            assert "missing 'net.head.bias'" in report["texts"][1]
        assert sum(report["moments"] for report in reports) == numel  # no region twice
        assert max(report["moments"] for report in reports) <= 0.6 * numel


def _written_in_full(strategy: str, precision: str) -> torch.Tensor:
    @torch.no_grad()
    def write(trainer: Any, module: Any) -> None:
        with trainer.strategy.gathered():
            for parameter in module.parameters():
                parameter.add_(2.0**-20)  # a change too small for bf16

    module = DeepRegression()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    settings: dict[str, Any] = {"precision": precision, "callbacks": LambdaCallback(on_train_start=write)}
    return trained(module, loader(8, 4), strategy=STRATEGIES[strategy](), **settings)


def test_masters_keep_what_is_written_to_gathered_parameters() -> None:
    # E-11: bit for bit; raw DeepSpeed loses it at the next step, which uses the unchanged masters
    expected = weights(DeepRegression()) + 2.0**-20
    cases = [(f"zero {stage}", precision) for stage in (1, 2, 3) for precision in ("32-true", "bf16-mixed")]
    for ranks in on_ranks(each, 2, _written_in_full, *cases):
        for case, found in zip(cases, ranks, strict=True):
            assert torch.equal(found, expected), case


def _one_gathered() -> Any:
    sizes: list[Any] = []

    @torch.no_grad()
    def look(trainer: Any, module: Any) -> None:
        head = module.net.head.weight
        sizes.append(head.numel())
        with trainer.strategy.gathered(head):
            sizes.append(tuple(head.shape))
            head.fill_(1.0 + trainer.global_rank)  # rank 0's value is used
        with trainer.strategy.gathered([head], write=False):
            sizes.append(head.mean().item())
            head.fill_(7.0)
        sizes.append(head.numel())

    module, strategy = DeepRegression(lr=0.0), DeepSpeedStrategy(**SHARD_EVERYTHING)
    trained(module, loader(8, 4), strategy=strategy, callbacks=LambdaCallback(on_train_start=look))
    return sizes, module.net.head.weight.detach().clone()


def test_one_parameter_gathered() -> None:
    for sizes, head in on_ranks(_one_gathered, 2):
        assert sizes == [8, (1, 8), 1.0, 8]
        assert torch.equal(head, torch.ones(1, 8))


WIDTH = 1100
"""So wide that a rank's part of a matrix takes more than a MiB in bf16, too: less than that stays in memory."""

NO_ROOM = {"zero_optimization": {"offload_param": {"max_in_cpu": 0}}}
OFFLOADS: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "optimizer": {"offload_optimizer": "nvme"},
    "both": {"offload_optimizer": "nvme", "offload_parameters": "nvme", "config": NO_ROOM},
}


@cache
def _why_not() -> str:
    """Return why nothing can be offloaded to a drive here, or "". Compiling the operator takes minutes."""
    missing = [command for command in ("g++", "ninja") if shutil.which(command) is None]
    import_library()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not missing and not AsyncIOBuilder().is_compatible():
        missing = ["libaio"]
    if missing:
        return f"DeepSpeed's offload to a drive needs {', '.join(missing)}"
    if not Path(_get_build_directory("async_io", False), "async_io.so").exists():
        build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
        return f"DeepSpeed's offload to a drive is not compiled; compile it (some minutes) with python -c '{build}'"
    return ""


def wide_net() -> nn.Module:
    layers = nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH - 3), nn.Tanh(), nn.Linear(WIDTH - 3, 1)
    return nn.Sequential(*layers)


class LooksAtTheEnd(Callback):
    """Records at the end what is in memory, and what is available by name."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        flats = {part.flat_index: part.tensor.numel() for part in strategy._run.zero.parts()}
        self.report["in memory"] = [one.ds_tensor.numel() for one in module.parameters()], list(flats.values())
        self.report["weights"] = _wholes(strategy.model_state())
        moments = strategy.optimizer_state()["state"]
        self.report["moments"] = {name: _wholes(values) for name, values in moments.items()}
        with strategy.gathered(module.net[2].weight, write=False):
            assert torch.equal(module.net[2].weight, self.report["weights"]["net.2.weight"])


def _offloaded(name: str, folder: str, precision: str, ckpt_path: str | None = None) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(**SHARD_EVERYTHING, sub_group_size=300_000, nvme_path=folder, **OFFLOADS[name])
    look = LooksAtTheEnd()
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    settings |= {"precision": precision, "callbacks": [look, Saver(f"{folder}/{name} {precision}")]}
    after = trained(DeepRegression(seeded(wide_net)), loader(24, 4), ckpt_path=ckpt_path, strategy=strategy, **settings)
    return {**look.report, "module": after}


def _offloaded_runs(folder: str) -> dict[str, Any]:
    found = {f"{name} 32-true": _offloaded(name, folder, "32-true") for name in OFFLOADS}
    found |= {f"{name} bf16-mixed": _offloaded(name, folder, "bf16-mixed") for name in ("host", "both")}
    for source, target in (("host", "both"), ("both", "host")):
        path = f"{folder}/{source} 32-true"
        found[f"{source} to {target} 32-true"] = _offloaded(target, folder, "32-true", path)
    return found


def test_offload_to_a_drive_changes_no_number(tmp_path: Path) -> None:
    # E-05, E-08: weights, moments and checkpoints by name, in both directions, as with the host's memory
    if reason := _why_not():
        pytest.skip(reason)
    numels = [one.numel() for one in DeepRegression(seeded(wide_net)).parameters()]
    for found in on_ranks(_offloaded_runs, 2, str(tmp_path), timeout=150):
        for name, report in found.items():
            expected = found[f"host {name.rpartition(' ')[2]}"]
            assert torch.equal(report["module"], expected["module"]), name
            assert_close_states(report["weights"], expected["weights"], atol=0, rtol=0)
            assert_close_states(report["moments"], expected["moments"], atol=0, rtol=0)
            # Large values are not in memory, which is the purpose of the offload.
            parameters, flats = report["in memory"]
            assert (max(parameters) < max(numels) / 4) == ("both" in name.split()[-2]), name
            assert (0 in flats) == ("host" not in name.split()[-2]), name
            assert any(flats)
    by_host, by_drive = (load(tmp_path / f"{name} 32-true") for name in ("host", "both"))
    assert_close_states(dict(by_drive.weights()), dict(by_host.weights()), atol=0, rtol=0)


class Routed(nn.Module):
    """Experts as one module, whose parameters stage 3 gathers together; one without samples does not run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(count))

    def forward(self, hidden: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if bool(chosen.any()):
                out[chosen] = expert(hidden[chosen])
        return out


class Mixture(nn.Module):
    """Routes by the sign of the first feature; if ``mixes_first``, the first step sends samples to both experts."""

    def __init__(self, count: int = 2, mixes_first: bool = False) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(FEATURES, 8), Routed(count), nn.Linear(8, 1)
        self.mixes = mixes_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        route = torch.arange(len(x)) % 2 if self.mixes else (x[:, 0] > 0).long()
        self.mixes = False
        return self.head(self.block(self.stem(x), route))


class AdamWithZeros(torch.optim.AdamW):
    """Takes zeros for missing gradients, as ZeRO does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return super().step(closure)


def _by_hand(net: nn.Module) -> torch.Tensor:
    module: Any = DeepRegression(net)
    module.configure_optimizers = lambda: AdamWithZeros(module.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)
    return weights(train_by_hand(module, [*DataLoader(one_expert_per_rank(), batch_size=8)]))


def _train(options: dict[str, Any] | None, net: Callable[[], nn.Module], **settings: Any) -> torch.Tensor:
    """Train on two ranks, each with samples for its own expert; without options under DDP."""
    strategy = "ddp" if options is None else DeepSpeedStrategy(**options)
    batches = DataLoader(one_expert_per_rank(), batch_size=4)
    return trained(DeepRegression(seeded(net)), batches, strategy=strategy, **settings)


def _error(options: dict[str, Any] | None, net: Callable[[], nn.Module], **settings: Any) -> str:
    with failing() as caught:
        _train(options, net, **settings)
    return f"{caught['type']}: {caught['text']}"


def _experts(options: dict[str, Any], count: int) -> Any:
    with captured_warnings() as lines:
        return _train(options, partial(Mixture, count)), lines


EXPERTS = [
    {"stage": 1},
    {"stage": 2, "find_unused_parameters": True},
    {"stage": 2, "find_unused_parameters": True, "offload_optimizer": "cpu"},
    {**SHARD_EVERYTHING, "leaf_modules": [Routed]},
]


def test_experts_that_some_ranks_use() -> None:
    # D-11: raw DeepSpeed crashes at stages 1 and 2, and hangs at stage 3; an unused expert is reported once
    cases = [(options, 3 - number % 2) for number, options in enumerate(EXPERTS)]
    ranks = on_ranks(each, 2, _experts, *cases)
    for (options, count), (first, logged), (second, silent) in zip(cases, *ranks, strict=True):
        assert torch.equal(first, second), options
        assert (first - _by_hand(seeded(partial(Mixture, count)))).abs().max() < 1e-5, options
        reports = [text for text in logged if "counts as zero" in text]
        assert len(reports) == (count == 3), options
        assert all("'net.block.experts.2.norm.weight'" in text and "6 parameter(s)" in text for text in reports)
        assert not [text for text in silent if "counts as zero" in text]


def _refusal_and_next_run(options: dict[str, Any], net: Any) -> Any:
    return _error(options, net), trained(DeepRegression(), DataLoader(data(16), batch_size=4), strategy="ddp")


def test_parameters_used_on_some_ranks_only_are_refused() -> None:
    # D-11: refused in the first step, by name, without a hang
    cases: list[tuple[dict[str, Any], Any, list[str]]] = [
        ({"stage": 2}, Mixture, ["12 parameter(s)", "'net.block.experts.1.", "find_unused_parameters=True"]),
        (SHARD_EVERYTHING, Experts, ["the forward of 'net.experts.0", "the forward of 'net.experts.1"]),
        ({"stage": 3}, PartlyUsed, ["1 parameter(s)", "'net.scale'", "leaf_modules"]),
    ]
    ranks = on_ranks(each, 2, _refusal_and_next_run, *((options, net) for options, net, _ in cases))
    for (_, net, parts), (first, one), (second, other) in zip(cases, *ranks, strict=True):
        for text in (first, second):
            assert text.startswith("ConfigurationError"), (net, text)
            assert all(part in text for part in parts), text
        assert torch.equal(one, other)


class PartlyUsed(nn.Module):
    """All ranks run the same layers, but only rank 0 uses one of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out * self.scale if dist.is_initialized() and dist.get_rank() == 0 else out


LATE = partial(Mixture, mixes_first=True)


def test_ranks_that_differ_after_the_first_step_are_refused_unless_they_may() -> None:
    # D-11: raw DeepSpeed silently adds gradients of different experts
    for refused, *allowed in on_ranks(each, 2, _error, ({"stage": 2}, LATE), (EXPERTS[1], LATE), (EXPERTS[3], LATE)):
        assert refused.startswith("ConfigurationError")
        assert "'net.block.experts." in refused
        assert "find_unused_parameters=True" in refused
        assert all(text.startswith("nothing was raised") for text in allowed)


def test_ranks_that_differ_after_the_first_step_at_stage_3_end_with_an_error() -> None:
    # D-11: no hang; ranks that gather different parameters fail in gloo, which may end a process
    with suppress(RankFailedError):
        for text in on_ranks(_error, 2, SHARD_EVERYTHING, LATE):
            assert text.startswith(("ConfigurationError", "RuntimeError", "DistributedError")), text


class Reentrant(nn.Module):
    """Recomputes its block in a backward of its own, so that the graph of the loss does not reach its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=True))


def test_recomputed_blocks_are_not_taken_for_unused_ones() -> None:
    # S-12: in the second step, these parameters "got a gradient unlike in the first window", without a name
    cases: list[Any] = [(None, Reentrant), ({"stage": 2}, Reentrant), (SHARD_EVERYTHING, Reentrant)]
    for expected, *others in on_ranks(each, 2, _train, *cases):
        for found in others:
            torch.testing.assert_close(found, expected, **TIGHTER)


class Reordering(nn.Module):
    """From some call on, rank 1 adds before it multiplies, so its gradients arrive in reverse order."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since, self.calls = since, 0
        self.stem = nn.Linear(FEATURES, 8)
        self.factor, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.stem(x)
        turns = dist.is_initialized() and dist.get_rank() == 1 and self.calls >= self.since
        return self.head((hidden + self.bias) * self.factor if turns else hidden * self.factor + self.bias)


def _reordering(since: int, options: dict[str, Any]) -> torch.Tensor:
    return _train(options, partial(Reordering, since), accumulate_grad_batches=2)


def _reordering_fails(since: int) -> str:
    return _error({"stage": 2}, partial(Reordering, since), accumulate_grad_batches=2)


def test_gradients_in_another_order_are_refused() -> None:
    # D-11: stage 2 silently added one parameter's gradient to the other's
    for text in chain(*on_ranks(each, 2, _reordering_fails, (1,), (2,))):
        assert "Gradients became ready in another order" in text
        assert "'net.factor'" in text
        assert "'net.bias'" in text
        assert "find_unused_parameters=True" in text


def test_gradients_in_another_order_are_not_mixed_but_allowed_if_enabled() -> None:  # D-11
    with pytest.raises(RankFailedError, match=r"(?s)Rank 1 failed .*ConfigurationError: Gradients became"):
        on_ranks(_reordering, 2, 4, {"stage": 2})
    cases = [(1, {"stage": 1}), (1, EXPERTS[1]), (1, SHARD_EVERYTHING)]
    first, second = on_ranks(each, 2, _reordering, *cases)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert (one - first[0]).abs().max() < 1e-6


class OccasionallyUsed(DeepRegression):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.ones_(self.net.blocks[1].up.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if batch_idx % 2 else loss + self.net.blocks[1].up.bias.square().sum() * 10

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net.head(self.net.blocks[0](self.net.stem(x))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


OCCASIONALLY: list[dict[str, Any]] = [
    {**stage, **offload}
    for stage in ({"stage": 1}, {"stage": 2}, SHARD_EVERYTHING)
    for offload in ({}, {"offload_optimizer": "cpu"})
]
OCCASIONALLY.append({"stage": 2, "find_unused_parameters": False})


def _occasionally_used() -> list[torch.Tensor]:
    strategies = [DeepSpeedStrategy(**{"find_unused_parameters": True, **options}) for options in OCCASIONALLY]
    return [
        trained(OccasionallyUsed(), DataLoader(data(40), batch_size=4), strategy=strategy) for strategy in strategies
    ]


def test_no_gradient_is_left_from_the_previous_step() -> None:
    # E-09: raw DeepSpeed steps again with the last gradient of a parameter that has none now, at stage 3 and offloaded
    expected = trained_in_plain_torch(OccasionallyUsed(), 40)
    for found in on_ranks(_occasionally_used, 2):
        for options, actual in zip(OCCASIONALLY, found, strict=True):
            torch.testing.assert_close(actual, expected, **TIGHTER, msg=str(options))
