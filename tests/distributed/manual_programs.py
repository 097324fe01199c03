"""Programs in manual optimization and with closures, each with an equivalent hand-written loop.

The hand-written loops are independent of the engine: each rank's part of a batch runs forward in an autocast context of
its own, gradients are averaged over the parts, and fp16's scale is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from small_runs import FEATURES, data, seeded
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from drivetrain import TrainModule

SAMPLES = 24
BATCH = 8
SCALE = 1024.0  # small enough for fp16: nothing overflows

Parts = list[tuple[Tensor, Tensor]]
"""One global batch, as the ranks share it."""


def parts(ranks: int) -> Iterator[Parts]:
    """Return the global batches in order, dealt to ``ranks``."""
    x, y = data(SAMPLES).tensors
    for start in range(0, SAMPLES, BATCH):
        rows = [slice(start + r * BATCH // ranks, start + (r + 1) * BATCH // ranks) for r in range(ranks)]
        yield [(x[one], y[one]) for one in rows]


def autocast(precision: str) -> AbstractContextManager[Any]:
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    return torch.autocast("cpu", dtypes[precision]) if precision in dtypes else nullcontext()


def mean_backward(
    optimizer: Optimizer, batch: Parts, loss: Callable[[Tensor, Tensor], Tensor], precision: str
) -> Tensor:
    """Add the mean gradient over the parts to ``optimizer``'s parameters, unscaled; returns the loss."""
    scale = SCALE if precision == "16-mixed" else 1.0
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = []
    total = torch.zeros(())
    for x, y in batch:
        with autocast(precision):
            value = loss(x, y)
        total = total + value.detach().float() / len(batch)
        gradients = torch.autograd.grad(value * scale, held)
        found.append([gradient / (len(batch) * scale) for gradient in gradients])
    for parameter, *shares in zip(held, *found, strict=True):
        gradient = sum(shares[1:], shares[0])
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return total


class Gan(TrainModule):
    """Two networks that take turns; the second uses the first one's updated weights."""

    automatic_optimization = False
    critic_steps = 1
    clips: tuple[float, ...] = ()
    toggles = True
    adds = False

    def __init__(self) -> None:
        super().__init__()
        self.maker = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES)))
        self.critic = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)))

    def critic_loss(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.maker(x).detach()
        return self.critic(made).float().mean() - self.critic(y.expand(-1, FEATURES)).float().mean()

    def maker_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.critic(self.maker(x)).float().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for_maker, for_critic = self.optimizers()
        for number in range(self.critic_steps):
            with self.only(for_critic):
                if not (number and self.adds):
                    for_critic.zero_grad()
                self.manual_backward(self.critic_loss(*batch))
                for clip in self.clips:
                    self.clip_gradients(for_critic, clip)
                for_critic.step()
        with self.only(for_maker):
            for_maker.zero_grad()
            self.manual_backward(self.maker_loss(*batch))
            for clip in self.clips:
                self.clip_gradients(for_maker, clip)
            for_maker.step()

    def only(self, optimizer: Any) -> AbstractContextManager[None]:
        return self.toggled_optimizer(optimizer) if self.toggles else nullcontext()

    def configure_optimizers(self) -> Any:
        return [SGD(self.maker.parameters(), lr=0.5), SGD(self.critic.parameters(), lr=0.5, momentum=0.5)]

    def by_hand(self, ranks: int, precision: str) -> Gan:
        for_maker, for_critic = self.configure_optimizers()
        for batch in parts(ranks):
            for number in range(self.critic_steps + 1):
                last = number == self.critic_steps
                optimizer, loss = (for_maker, self.maker_loss) if last else (for_critic, self.critic_loss)
                if last or not (number and self.adds):
                    optimizer.zero_grad()
                mean_backward(optimizer, batch, loss, precision)
                for clip in self.clips:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
                optimizer.step()
        return self


class Untoggled(Gan):
    """The generator's backward leaves gradients in the critic, which are cleared before the critic's own backward."""

    toggles = False


class Wasserstein(Gan):
    """The critic steps several times per generator step, and its gradients are clipped twice each time."""

    critic_steps = 3
    clips = (0.05, 0.04)

    @contextmanager
    def only(self, optimizer: Any) -> Iterator[None]:
        self.toggle_optimizer(optimizer)
        yield
        self.untoggle_optimizer(optimizer)


class Adding(Gan):
    """The critic's later backwards add to gradients that were already used for a step."""

    critic_steps = 2
    adds = True


class Fitted(TrainModule):
    """A regression whose optimizer is chosen by a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch)

    def closure(self, optimizer: Any, batch: Any) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(*batch)
            self.manual_backward(loss)
            return loss

        return evaluate

    def closure_by_hand(self, optimizer: Optimizer, batch: Parts, precision: str) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                return mean_backward(optimizer, batch, self.loss, precision)

        return evaluate


class Quasi(Fitted):
    """LBFGS with an explicit closure."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.step(self.closure(optimizer, batch))

    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")

    def by_hand(self, ranks: int, precision: str) -> Quasi:
        optimizer = self.configure_optimizers()
        for batch in parts(ranks):
            optimizer.step(self.closure_by_hand(optimizer, batch, precision))
        return self


class Sam(Optimizer):
    """Sharpness-aware minimisation: ascends along the given gradients, and descends along those found there.

    (Foret et al. 2021, https://arxiv.org/abs/2010.01412; its signature, and the way it restores weights, are those of
    the commonly used implementation.)
    """

    def __init__(self, params: Any, lr: float = 0.3, rho: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.losses: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM requires closure, but it was not provided"
        self._climb()
        with torch.enable_grad():
            self.losses.append(closure().item())
        self._descend()

    def _held(self) -> list[nn.Parameter]:
        return [one for group in self.param_groups for one in group["params"] if one.grad is not None]

    def _climb(self) -> None:
        held = self._held()
        norm = nn.utils.get_total_norm([one.grad for one in held if one.grad is not None])
        for one in held:
            assert one.grad is not None
            self.state[one]["before"] = one.data.clone()
            one.add_(one.grad * (self.defaults["rho"] / (norm + 1e-12)))
        self.zero_grad()

    def _descend(self) -> None:
        for one in self._held():
            assert one.grad is not None
            one.data = self.state[one]["before"]
            one.add_(one.grad, alpha=-self.defaults["lr"])


class Searching(Sam):
    """SAM that evaluates the closure itself before it ascends."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            self.losses.append(closure().item())
        super().step(closure)


class Sharp(Fitted):
    """SAM in automatic optimization."""

    kind: type[Sam] = Sam

    def configure_optimizers(self) -> Any:
        return {"optimizer": self.kind(self.parameters()), "closure": True}

    def by_hand(self, ranks: int, precision: str) -> Sharp:
        optimizer = self.kind(self.parameters())
        for batch in parts(ranks):
            closure = self.closure_by_hand(optimizer, batch, precision)
            if self.kind is Sam:
                closure()
            optimizer.step(closure)
        return self


class SharpByHand(Sharp):
    """SAM in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        closure = self.closure(optimizer, batch)
        if self.kind is Sam:
            closure()
        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())


class Searched(Sharp):
    kind = Searching


class SearchedByHand(SharpByHand):
    kind = Searching
