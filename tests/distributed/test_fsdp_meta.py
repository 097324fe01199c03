"""Modules built in `configure_model` are never whole anywhere under FSDP: D-01, D-03, B-18."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_nets import DeepRegression, Tied
from small_runs import Regression, Saver, failing, global_batches, loader, quiet, train_by_hand, weights
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.precision import resolve_precision
from drivetrain.testing import assert_close_states
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies._materialize import find_meta_tensors, record_on_meta, replay
from worlds import on_ranks


class Everything(nn.Module):
    """Uses every way of initialising that torch has, and some user-defined ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(5, 7), nn.MultiheadAttention(8, 2)
        self.recurrent, self.embedding = nn.GRU(3, 4), nn.Embedding(9, 6, padding_idx=1)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("numbers", torch.tensor([1.0, 2.0, 3.0]) * 2)
        self.table = torch.arange(6).float()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)
        self.orthogonal, self.truncated = nn.Linear(6, 6), nn.Linear(6, 4)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        nn.init.sparse_(self.truncated.weight, 0.5)
        with torch.no_grad():
            self.linear.weight[:3].normal_(std=0.5)
            self.linear.bias.mul_(2).add_(self.linear.weight[:, 0])
        self.tied = nn.Embedding(9, 6)
        self.tied.weight = self.embedding.weight
        self.product = nn.Parameter(torch.randn(4, 4) @ torch.randn(4, 2))
        self.twos = nn.Parameter(torch.full((3,), 2.0))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        for matrix in self.conv.parameters():
            nn.init.normal_(matrix, std=0.1)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.seeded = nn.Linear(3, 3)
            torch.manual_seed(11)
            self.seeded_alike = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)


def test_every_value_is_what_building_gives() -> None:
    # D-03, B-18: bit for bit, and the generator continues as if the module had been built normally
    torch.manual_seed(3)
    whole = Everything()
    after = torch.rand(3)
    torch.manual_seed(3)
    with record_on_meta() as recording:
        module = Everything()
    bare = find_meta_tensors(module, recording)
    values: dict[int, torch.Tensor] = {}
    torch.set_rng_state(recording.generator)
    replay(recording, [one.tensor for one in bare], lambda tensor, value: values.update({id(tensor): value.clone()}))
    assert torch.equal(torch.rand(3), after)
    expected: dict[str, torch.Tensor] = {
        **dict(whole.named_parameters(remove_duplicate=False)),
        **dict(whole.named_buffers()),
        "table": whole.table,
    }
    assert {one.name for one in bare} == set(expected)
    for one in bare:
        assert torch.equal(values[id(one.tensor)], expected[one.name]), one.name
    assert torch.equal(whole.seeded.weight, whole.seeded_alike.weight)


def test_values_are_kept_where_a_precision_casts_what_was_built() -> None:
    # D-03: operations were recorded for parameters that the cast replaced, so all values were zero
    torch.manual_seed(3)
    whole = nn.Linear(5, 7)
    torch.manual_seed(3)
    with record_on_meta() as recording:
        bare = nn.Linear(5, 7)
    built = {one.name: one.tensor.detach() for one in find_meta_tensors(bare, recording)}
    bare.to(torch.float64)
    values: dict[int, torch.Tensor] = {}
    replay(recording, list(built.values()), lambda tensor, value: values.__setitem__(id(tensor), value.clone()))
    for name, expected in whole.state_dict().items():
        assert torch.equal(values[id(built[name])], expected)


def _parts(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return results whose strides differ between the meta device and the CPU, and views of them."""
    linalg = torch.linalg
    _, _, vh = linalg.svd(matrix)
    left, _ = linalg.qr(matrix)
    return {
        "svd": vh,
        "a view of svd": vh[:2].repeat(2, 1),
        "torch_svd": torch.svd(matrix)[2][:, :2].repeat(1, 2),
        "svd_lowrank": torch.svd_lowrank(matrix, q=2)[2].repeat(1, 2),
        "qr": left[:2].repeat(2, 1),
        "eigh": linalg.eigh(matrix @ matrix.T)[1][:2].repeat(2, 1),
        "inv": linalg.inv(matrix)[:2].repeat(2, 1),
        "pinv": linalg.pinv(matrix)[:2].repeat(2, 1),
        "solve": linalg.solve(matrix, torch.eye(4))[:2].repeat(2, 1),
    }


class Factorised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(_parts(torch.randn(4, 4)))


def test_parts_of_factorisations_have_the_values_of_an_ordinary_build() -> None:  # S-11
    torch.manual_seed(3)
    whole = Factorised()
    torch.manual_seed(3)
    with record_on_meta() as recording:
        module = Factorised()
    values: dict[int, torch.Tensor] = {}
    replay(recording, list(module.parameters()), lambda tensor, value: values.update({id(tensor): value.clone()}))
    for name, parameter in module.weights.items():
        assert torch.equal(values[id(parameter)], whole.weights[name]), name


class Tables:
    """An object of the user's that holds tensors."""

    def __init__(self) -> None:
        self.cosine = torch.linspace(0, 1, 4).cos()
        self.empty = torch.empty(4)


class Tabular(nn.Module):
    """Holds tensors that are neither parameters nor buffers, in places where Python code keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.GRU(4, 4)
        self.by_name: dict[str, Any] = {"a.b": [torch.full((4,), 2.0), (1, "text")]}
        self.tables = Tables()
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.arange(4.0))
        self.first_frequencies = self.frequencies
        self.itself = [self]


def test_tensors_in_lists_dicts_and_objects_have_the_values_of_an_ordinary_build() -> None:  # S-11
    whole = Tabular()
    with record_on_meta() as recording:
        module = Tabular()
    found = {one.name: one for one in find_meta_tensors(module, recording) if one.slots}
    assert found.keys() == {"by_name['a.b'][0]", "tables.cosine", "tables.empty", "frequencies"}
    by_id = {id(one.tensor): one for one in found.values()}
    replay(
        recording,
        [one.tensor for one in found.values()],
        lambda tensor, value: by_id[id(tensor)].assign(value.clone(), torch.device("cpu")),
    )
    assert torch.equal(module.by_name["a.b"][0], whole.by_name["a.b"][0])
    assert torch.equal(module.tables.cosine, whole.tables.cosine)
    assert not module.tables.empty.is_meta
    assert module.first_frequencies is module.frequencies
    assert torch.equal(module.frequencies, whole.frequencies)


class InATuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = (torch.ones(2), torch.zeros(2))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2)]


@pytest.mark.parametrize(
    ("build", "names"),
    [(InATuple, r"pair\[0\], pair\[1\]"), (Unregistered, r"layers\[0\]\._parameters\['weight'\], ")],
)
def test_tensors_that_cannot_be_initialised_are_refused_by_name(build: Any, names: str) -> None:  # S-11
    with record_on_meta() as recording:
        module = build()
    with pytest.raises(ConfigurationError, match=f"(?s){names}.*meta=False"):
        find_meta_tensors(module, recording)


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.turned = self.layer.weight.t()


def test_a_view_of_a_parameter_is_refused_by_name() -> None:  # S-07: it kept the first values
    with record_on_meta() as recording:
        module = Viewing()
    with pytest.raises(ConfigurationError, match=r"'turned'.*'layer\.weight'"):
        find_meta_tensors(module, recording)


class LateTabular(Regression):
    """Builds in `configure_model` tables that its steps need."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.scales: list[Any] = [torch.linspace(1, 2, 4), {"offset": torch.full((4,), 0.5)}]
            self.net = nn.Linear(4, 1)
            with torch.no_grad():
                self.net.weight.copy_(torch.linalg.svd(torch.randn(4, 4))[2][:1])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has a newer weight_norm
                self.net = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), self.net)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((x * self.scales[0] + self.scales[1]["offset"], y))


def _late_tables(strategy: str) -> Any:
    module = LateTabular()
    quiet(strategy=strategy, devices=2, seed=5).fit(module, loader(16, 2))
    return weights(module)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_a_run_with_tables_and_factorised_weights_equals_ddp(strategy: str) -> None:  # S-11
    for found, wanted in zip(
        on_ranks(_late_tables, 2, strategy, process_group=None),
        on_ranks(_late_tables, 2, "ddp", process_group=None),
        strict=True,
    ):
        assert_close_states(found, wanted)


class LateNormed(Regression):
    """Builds in `configure_model` a layer that loads its state by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def _resume_late_normed(strategy: str, path: str) -> Any:
    states = []
    for ckpt_path in (None, path):
        module = LateNormed()
        quiet(strategy=strategy, max_epochs=2, seed=5, callbacks=[Saver(path)] if ckpt_path is None else []).fit(
            module, loader(16, 2), ckpt_path=ckpt_path
        )
        states.append({name: value.clone() for name, value in module.state_dict().items()})
    return states


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_a_layer_that_loads_itself_is_resumed_in_a_late_module(tmp_path: Path, strategy: str) -> None:
    # S-13: its buffers have no values yet, and copying them failed
    for whole, resumed in on_ranks(_resume_late_normed, 2, strategy, str(tmp_path / "saved")):
        assert int(resumed["net.1.num_batches_tracked"]) == 8
        assert_close_states(resumed, whole)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: nn.Linear(2, 2).weight.sum().item(), "configure_model failed on the meta device"),
        (lambda: torch.rand(2, device="cpu"), "drew random numbers for a tensor that has storage"),
    ],
)
def test_initialisation_that_reads_values_is_refused(build: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text), record_on_meta():
        build()


class Late(Regression):
    """Builds its network in `configure_model`, with an initialisation of its own at the end."""

    def __init__(self) -> None:
        super().__init__(0.05)
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Tied()
            for matrix in (parameter for parameter in self.net.parameters() if parameter.dim() == 2):
                nn.init.normal_(matrix, std=0.3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-5)


class Whole(Callback):
    """Checks that no parameter is ever whole."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.first: dict[str, torch.Tensor] = {}
        self.mask: float = 0.0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.kinds = {
            name for name, value in module.named_parameters() if not isinstance(value, DTensor) and value.dim()
        }
        self.first = {
            name: value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
            for name, value in module.named_parameters()
        }

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.mask = float(torch.rand(()))


def _late(strategy: str, options: dict[str, Any], settings: dict[str, Any], before: int | None) -> Any:
    import torch.distributed as dist

    if before is not None:
        torch.manual_seed(before + dist.get_rank())
    look = Whole()
    module = Late()
    quiet(strategy=FSDPStrategy(**options) if strategy == "fsdp" else strategy, callbacks=look, **settings).fit(
        module, loader(32, 4)
    )
    assert not any(parameter.is_meta for parameter in module.parameters())
    return look.first, weights(module), look.kinds, look.mask


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("seed", [7, None])
def test_initialisation_is_the_references(seed: int | None, precision: str) -> None:
    # D-03, B-18: with a seed; and without one, equal to rank 0's
    settings = {"seed": seed, "precision": precision}
    runs = on_ranks(_late, 2, "fsdp", {}, settings, None if seed else 20)
    eager = on_ranks(_late, 2, "fsdp", {"meta": False}, settings, None if seed else 20)
    for (first, trained, kinds, _), whole in zip(runs, eager, strict=True):
        assert not kinds
        assert_close_states(first, whole[0], atol=0, rtol=0)
        assert torch.equal(trained, whole[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_initialisation_is_that_of_one_process(precision: str) -> None:
    # D-03, B-18
    first, trained, _, _ = on_ranks(_late, 2, "fsdp", {}, {"seed": 7, "precision": precision}, None)[0]
    torch.manual_seed(7)
    with resolve_precision(precision, torch.device("cpu")).module_init_context():
        module = Late()
        module.configure_model()
    assert_close_states(first, dict(module.named_parameters()), atol=0, rtol=0)
    if precision == "32-true":
        torch.testing.assert_close(trained, weights(train_by_hand(module, global_batches(32, 8))), atol=1e-5, rtol=1e-5)


def test_later_random_numbers_equal_those_of_ddp() -> None:
    # B-18: the generator continues as if the module had been built whole
    fsdp = on_ranks(_late, 2, "fsdp", {}, {"seed": 7}, None)
    ddp = on_ranks(_late, 2, "ddp", {}, {"seed": 7}, None)
    eager = on_ranks(_late, 2, "fsdp", {"meta": False}, {"seed": 7}, None)
    assert [run[3] for run in fsdp] == [run[3] for run in ddp] == [run[3] for run in eager]


# Memory


class Large(Regression):
    """Ten blocks of 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(10)))
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.01)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0].repeat(1, 512)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _peak(meta: bool) -> tuple[int, int]:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed memory is returned to the system, and not counted
    quiet(strategy="fsdp").fit(Late(), loader(16, 4))  # one-time imports and setup
    found: list[int] = []

    class Note(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(_status("VmHWM:"))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            found.append(_status("VmHWM:"))

    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = _status("VmRSS:")
    quiet(strategy=FSDPStrategy(meta=meta, gather_limit=0), callbacks=Note(), max_steps=1).fit(Large(), loader(16, 4))
    return found[0] - before, found[1] - before


def test_no_process_ever_holds_the_whole() -> None:
    # D-01, D-03: the shard, and a unit or two; construction with storage needs all of it
    unit = 2048 * 2049 * 4
    whole = 10 * unit
    for built, trained in on_ranks(_peak, 2, True):
        assert built < whole / 2 + 2.5 * unit
        # Shards of parameters and gradients, a gathered unit, its gradient, and one in transfer.
        assert trained < whole + 4.5 * unit
    for built, _ in on_ranks(_peak, 2, False):
        assert built > whole - 2.5 * unit  # a unit or two may reuse memory left by earlier runs


def _own_meta() -> Any:
    with torch.device("meta"):
        module = DeepRegression(nn.Linear(4, 1))
    with failing() as caught:
        quiet(strategy="fsdp").fit(module, loader(16, 4))
    return caught


def test_a_module_without_initialisation_is_refused_by_name() -> None:
    for caught in on_ranks(_own_meta, 2):
        assert caught["type"] == "ConfigurationError"
        assert "net.weight, net.bias" in caught["text"]


class LateLazy(Regression):
    """Builds lazy layers and gives them their shapes with a single forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
            with torch.no_grad():
                self.net(torch.zeros(2, 4))


def _lazily() -> Any:
    module = LateLazy()
    quiet(strategy="fsdp").fit(module, loader(16, 4))
    return weights(module)


def test_lazy_layers_that_get_their_shapes_in_configure_model_have_their_values() -> None:  # I-12
    reference = LateLazy()
    reference.configure_model()
    train_by_hand(reference, global_batches(16, 8))
    for trained in on_ranks(_lazily, 2):
        torch.testing.assert_close(trained, weights(reference))
