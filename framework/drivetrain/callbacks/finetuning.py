"""BaseFinetuning and BackboneFinetuning: parts of the module are frozen at first, and train from an epoch on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, listed

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

Modules = nn.Module | Iterable["Modules"]


class BaseFinetuning(Callback):
    """Freezes before training what `freeze_before_training` says, and unfreezes as `finetune_function` says.

    Both must be written. Give ``configure_optimizers`` the parameters that require gradients:
    ``filter(lambda p: p.requires_grad, self.parameters())``; what is unfrozen later joins an optimizer as a group of
    its own. What trains, and in which groups, is in every checkpoint: a run that goes on needs nothing else. ZeRO
    cannot take groups in within a run, and says so.
    """

    def freeze_before_training(self, module: Any) -> None:
        """Freeze what is not to train from the beginning, with `freeze`. Called in `setup` of a fit, on every rank."""
        raise NotImplementedError

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is to train from ``epoch`` on, with `unfreeze_and_add_param_group`.

        Called as each epoch begins, for each optimizer, on every rank.
        """
        raise NotImplementedError

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Freeze, unless a run that goes on knows better."""
        if stage == "fit":
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: RunContext, module: Any) -> None:
        """Let batch normalisation follow its statistics where a run that goes on had unfrozen it."""
        for one in module.modules():
            if isinstance(one, _BatchNorm) and one.running_mean is not None and one.weight is not None:
                one.track_running_stats = one.track_running_stats or one.weight.requires_grad

    def on_train_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Let each optimizer have what trains from this epoch on."""
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)

    # What the two are written with

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the layers of ``modules``, without the containers that have no parameters of their own."""
        found = modules.modules() if isinstance(modules, nn.Module) else _flat(modules)
        layers = {id(one): one for each in found for one in each.modules()}
        return [one for one in layers.values() if not any(one.children()) or one._parameters]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[Tensor]:
        """Yield the parameters that require a gradient, or do not; of batch normalisation where ``train_bn``."""
        for one in BaseFinetuning.flatten_modules(modules):
            if isinstance(one, _BatchNorm) and not train_bn:
                continue
            for parameter in one.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Let everything in ``modules`` train, and batch normalisation follow its statistics."""
        for one in BaseFinetuning.flatten_modules(modules):
            _set(one, trains=True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of one layer, not of those within it; of batch normalisation the statistics too."""
        _set(module, trains=False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze ``modules``, but for batch normalisation where ``train_bn``."""
        for one in BaseFinetuning.flatten_modules(modules):
            _set(one, trains=train_bn and isinstance(one, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that ``optimizer`` does not have yet."""
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        given = list(params)
        new = [one for one in given if id(one) not in held]
        if len(new) < len(given):
            logger.warning(
                "%d of the %d parameters to unfreeze are in the optimizer already, and stay in their group. Give "
                "configure_optimizers those alone that require gradients.",
                len(given) - len(new),
                len(given),
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Let ``modules`` train, in a new group of ``optimizer``.

        Args:
            modules: what is unfrozen.
            optimizer: steps it from here on.
            lr: of the new group; None is the first group's, divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``.
            train_bn: unfreeze batch normalisation too, where it is frozen.
        """
        layers = BaseFinetuning.flatten_modules(modules)
        norms = [one for one in layers if isinstance(one, _BatchNorm)]
        BaseFinetuning.make_trainable([one for one in layers if train_bn or one not in norms])
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        # Batch normalisation may have trained all along, in a group that it stays in.
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        there = {id(one) for norm in norms for one in norm.parameters() if id(one) in held}
        params = [one for one in BaseFinetuning.filter_params(layers, train_bn) if id(one) not in there]
        new = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})


class BackboneFinetuning(BaseFinetuning):
    """Trains the head alone at first, and ``module.backbone`` too from an epoch on, at a rate that grows to the head's.

    The backbone joins the first optimizer.

    Args:
        unfreeze_backbone_at_epoch: the first epoch in which the backbone trains, counted from 0.
        lambda_func: by which factor the backbone's learning rate grows as an epoch begins, given the epoch after it.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a part of the head's.
        backbone_initial_lr: the same as a number; None takes the part.
        should_align: let it not grow above the head's.
        initial_denom_lr: unused where a learning rate is known, as here; as in `BaseFinetuning`.
        train_bn: let the backbone's batch normalisation train from the beginning; else it never does.
        verbose: say both learning rates as each epoch begins.
        rounding: digits that are said.

    Raises:
        ConfigurationError: an argument is out of its range; at the run's start, the module has no ``backbone``.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = lambda epoch: 2.0,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        if type(unfreeze_backbone_at_epoch) is not int or unfreeze_backbone_at_epoch < 0:
            raise ConfigurationError(
                f"BackboneFinetuning(unfreeze_backbone_at_epoch={unfreeze_backbone_at_epoch!r})",
                "it is an epoch, counted from 0",
                "give 0 or more",
            )
        rates = {"backbone_initial_ratio_lr": backbone_initial_ratio_lr, "backbone_initial_lr": backbone_initial_lr}
        for name, rate in rates.items():
            if rate is not None and not rate >= 0:
                raise ConfigurationError(
                    f"BackboneFinetuning({name}={rate!r})", "the backbone would climb the loss", "give 0 or more"
                )
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """The backbone's learning rate."""
        return {"previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let it grow from there."""
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Look for the backbone, and freeze it."""
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            children = listed([name for name, _ in module.named_children()]) or "none"
            raise ConfigurationError(
                f"BackboneFinetuning: {type(module).__name__} has no module called 'backbone'.",
                f"it is what trains later than the rest; there are {children}.",
                "name what is to be frozen at first self.backbone, or subclass BaseFinetuning.",
            )
        self.previous_backbone_lr = None
        super().setup(trainer, module, stage)

    def on_train_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Let the first optimizer have the backbone when its time has come."""
        self.finetune_function(module, trainer.current_epoch, trainer.optimizers[0])

    def freeze_before_training(self, module: Any) -> None:
        """Freeze the backbone."""
        self.freeze(module.backbone, train_bn=self.train_bn)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone when its time has come, and let its learning rate grow from then on."""
        head = float(optimizer.param_groups[0]["lr"])
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        if self.previous_backbone_lr is None:  # later than that where a run goes on that had other plans
            given = self.backbone_initial_lr
            rate = head * self.backbone_initial_ratio_lr if given is None else given
            self.unfreeze_and_add_param_group(
                module.backbone, optimizer, rate, initial_denom_lr=self.initial_denom_lr, train_bn=self.train_bn
            )
        else:
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = min(rate, head) if self.should_align else rate
            backbone = {id(one) for one in module.backbone.parameters()}
            for group in optimizer.param_groups[1:]:
                if not backbone.isdisjoint(map(id, group["params"])):
                    group["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            logger.info(
                "Epoch %d: learning rate %s, of the backbone %s.",
                epoch,
                round(head, self.rounding),
                round(rate, self.rounding),
            )


def _flat(modules: Iterable[Modules]) -> Iterator[nn.Module]:
    for one in modules:
        if isinstance(one, nn.Module):
            yield one
        else:
            yield from _flat(one)


def _set(layer: nn.Module, trains: bool) -> None:
    if isinstance(layer, _BatchNorm):
        layer.track_running_stats = trains
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(trains)
