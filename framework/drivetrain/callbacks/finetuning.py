"""BaseFinetuning and BackboneFinetuning: freeze parts of a module at first, and unfreeze them later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from drivetrain._config.argument_checks import check_count, check_types
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

Modules = nn.Module | Iterable["Modules"]


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze parts of a module before training and unfreeze them later.

    Subclasses must override `freeze_before_training` and `finetune_function`. The module's ``configure_optimizers``
    should pass only parameters that require gradients: ``filter(lambda p: p.requires_grad, self.parameters())``.
    Parameters that are unfrozen later are added to an optimizer as a new group.

    Checkpoints record which parameters are trainable and to which groups they belong, so a run can be resumed at any
    epoch. ZeRO cannot add parameter groups during a run, and raises an error.
    """

    def freeze_before_training(self, module: Any) -> None:
        """Freeze modules with `freeze`. Must be overridden. `setup` of a fit calls this method, on every rank."""
        raise NotImplementedError

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the modules that train from ``epoch`` on, with `unfreeze_and_add_param_group`. Must be overridden.

        This method is called at the start of each epoch, for each optimizer, on every rank.
        """
        raise NotImplementedError

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Freeze modules before a fit. A checkpoint that is loaded later restores which parameters are trainable."""
        if stage == "fit":
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: RunContext, module: Any) -> None:
        """Track running statistics of batch normalization that the checkpoint of a resumed run has unfrozen."""
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.weight is not None:
                layer.track_running_stats = layer.track_running_stats or layer.weight.requires_grad

    def on_train_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Call `finetune_function` for each optimizer."""
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)

    # Helpers for subclasses

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the layers of ``modules``, without containers that have no parameters of their own."""
        roots = modules.modules() if isinstance(modules, nn.Module) else _flatten(modules)
        layers = {id(layer): layer for root in roots for layer in root.modules()}
        return [layer for layer in layers.values() if not any(layer.children()) or layer._parameters]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[Tensor]:
        """Yield parameters with the given ``requires_grad``, without batch normalization if ``train_bn`` is False."""
        for layer in BaseFinetuning.flatten_modules(modules):
            if isinstance(layer, _BatchNorm) and not train_bn:
                continue
            for parameter in layer.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters of ``modules``, and track running statistics of batch normalization."""
        for layer in BaseFinetuning.flatten_modules(modules):
            _set_trainable(layer, trains=True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters and running statistics of one layer, but not those of its children."""
        _set_trainable(module, trains=False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze ``modules``, except for batch normalization if ``train_bn`` is True."""
        for layer in BaseFinetuning.flatten_modules(modules):
            _set_trainable(layer, trains=train_bn and isinstance(layer, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Return those of ``params`` that ``optimizer`` does not have yet, and warn about the others."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        candidates = list(params)
        new = [parameter for parameter in candidates if id(parameter) not in known]
        if len(new) < len(candidates):
            logger.warning(
                "%d of the %d parameters to unfreeze are in the optimizer already, and stay in their group. In "
                "configure_optimizers, pass only parameters that require gradients.",
                len(candidates) - len(new),
                len(candidates),
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
        """Unfreeze ``modules`` and add their parameters to ``optimizer`` as a new group.

        Args:
            modules: the modules to unfreeze.
            optimizer: the optimizer to add the group to.
            lr: the group's learning rate. None means the learning rate of the optimizer's first group, divided by
                ``initial_denom_lr``.
            initial_denom_lr: the divisor that is used if ``lr`` is None.
            train_bn: whether to unfreeze batch normalization too.
        """
        layers = BaseFinetuning.flatten_modules(modules)
        norms = [layer for layer in layers if isinstance(layer, _BatchNorm)]
        BaseFinetuning.make_trainable([layer for layer in layers if train_bn or layer not in norms])
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        # Parameters of batch normalization that have been trained from the start stay in their group.
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained_norms = {id(parameter) for norm in norms for parameter in norm.parameters() if id(parameter) in known}
        params = [
            parameter
            for parameter in BaseFinetuning.filter_params(layers, train_bn)
            if id(parameter) not in trained_norms
        ]
        new = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})


@dataclass(eq=False, repr=False)
class BackboneFinetuning(BaseFinetuning):
    """Trains the head alone at first, and after some epochs also ``module.backbone``, with a growing learning rate.

    The backbone's parameters are added to the first optimizer.

    Args:
        unfreeze_backbone_at_epoch: the first epoch in which the backbone is trained, counted from 0.
        lambda_func: a function that returns the factor by which the backbone's learning rate is multiplied at the start
            of an epoch. Its argument is the number of that epoch plus 1.
        backbone_initial_ratio_lr: the backbone's initial learning rate as a fraction of the head's.
        backbone_initial_lr: the backbone's initial learning rate; None uses
            ``backbone_initial_ratio_lr``.
        should_align: whether the backbone's learning rate never exceeds the head's.
        initial_denom_lr: accepted for compatibility; not used, because the backbone's rate is always known.
        train_bn: whether the backbone's batch normalization is trained from the start; otherwise it is never trained.
        verbose: whether to log both learning rates at the start of each epoch.
        rounding: decimal digits of the logged rates.

    Raises:
        ConfigurationError: an argument is out of range; at the start of the run, if the module has no ``backbone``.
    """

    _saved_attributes = ("previous_backbone_lr",)

    unfreeze_backbone_at_epoch: int = 10
    lambda_func: Callable[[int], float] = lambda epoch: 2.0
    backbone_initial_ratio_lr: float = 0.1
    backbone_initial_lr: float | None = None
    should_align: bool = True
    initial_denom_lr: float = 10.0
    train_bn: bool = True
    verbose: bool = False
    rounding: int = 12

    def __post_init__(self) -> None:
        check_types(BackboneFinetuning, vars(self))
        meaning = "an epoch, counted from 0"
        check_count("BackboneFinetuning", "unfreeze_backbone_at_epoch", self.unfreeze_backbone_at_epoch, 0, meaning)
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Check that there is a backbone, and freeze it."""
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            raise ConfigurationError(
                f"BackboneFinetuning: {type(module).__name__} has no submodule 'backbone'.",
                "the callback freezes this submodule at first and trains it later.",
                "name the part to freeze self.backbone, or subclass BaseFinetuning.",
            )
        self.previous_backbone_lr = None
        super().setup(trainer, module, stage)

    def on_train_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Call `finetune_function` for the first optimizer."""
        self.finetune_function(module, trainer.current_epoch, trainer.optimizers[0])

    def freeze_before_training(self, module: Any) -> None:
        """Freeze the backbone."""
        self.freeze(module.backbone, train_bn=self.train_bn)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone at ``unfreeze_backbone_at_epoch``, and change its learning rate in later epochs."""
        head_lr = float(optimizer.param_groups[0]["lr"])
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        if self.previous_backbone_lr is None:  # A resumed run may be past the epoch of unfreezing.
            initial = self.backbone_initial_lr
            rate = head_lr * self.backbone_initial_ratio_lr if initial is None else initial
            self.unfreeze_and_add_param_group(
                module.backbone, optimizer, rate, initial_denom_lr=self.initial_denom_lr, train_bn=self.train_bn
            )
        else:
            rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            rate = min(rate, head_lr) if self.should_align else rate
            backbone = {id(parameter) for parameter in module.backbone.parameters()}
            for group in optimizer.param_groups[1:]:
                if not backbone.isdisjoint(map(id, group["params"])):
                    group["lr"] = rate
        self.previous_backbone_lr = rate
        if self.verbose:
            logger.info(
                "Epoch %d: learning rate of the head %s, of the backbone %s.",
                epoch,
                round(head_lr, self.rounding),
                round(rate, self.rounding),
            )


def _flatten(modules: Iterable[Modules]) -> Iterator[nn.Module]:
    for module in modules:
        if isinstance(module, nn.Module):
            yield module
        else:
            yield from _flatten(module)


def _set_trainable(layer: nn.Module, trains: bool) -> None:
    if isinstance(layer, _BatchNorm):
        layer.track_running_stats = trains
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(trains)
