"""TrainModule: what users subclass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.checkpoint._weights_fit import Misfit
from drivetrain.errors import ConfigurationError
from drivetrain.module._hyper_parameters import HyperParametersMixin
from drivetrain.module._module_hooks import ModuleHooks
from drivetrain.module._run_handle import RunHandle

# For annotations alone, so that this file costs next to nothing to import.
if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram


class TrainModule(ModuleHooks, RunHandle, HyperParametersMixin, nn.Module):
    """A model together with how it is trained.

    Write `training_step` and `configure_optimizers`; everything else is optional. A TrainModule is an ordinary
    `torch.nn.Module` before and after a run.
    """

    automatic_optimization: bool = True
    """False hands backward and steps to `training_step` (`manual_backward`, `optimizers`)."""

    example_input_array: Any = None
    """An example of what ``forward`` takes: a tensor, a tuple of arguments, or a dict of arguments by name.

    `to_onnx` and `export` trace with it, and `ModelSummary` reads shapes and FLOPs off it.
    """

    strict_loading: bool = True
    """False lets a run and `load_from_checkpoint` take weights whose names differ, and says which are skipped."""

    _held = False

    # What a user writes. A step takes `batch` and, if it wants them, `batch_idx` and `dataloader_idx`; so that type
    # checkers let it be, the steps here take anything after the batch.

    def training_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of shape (), a dict with "loss", or None to skip the micro-batch (one process only).

        Write it with ``batch`` and ``batch_idx``, or with ``batch`` alone; so too the other steps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def validation_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one validation micro-batch; a further ``dataloader_idx`` comes where there are several loaders."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def test_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one test micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def predict_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one micro-batch; by default ``self(batch)``."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, several, or None; see the guide for every form, with schedulers."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers")

    def batch_weight(self, batch: Any) -> int | float | torch.Tensor:
        """Over how many items the micro-batch's loss is a mean; by default its samples.

        Gets the batch as the loader gave it, on the CPU. A window's gradient is the mean of its micro-batches'
        gradients weighted by this, over all ranks.
        """
        raise NotImplementedError  # the engine knows the samples without asking; called only where overridden

    def train_dataloader(self) -> Any:
        """Return the training loader(s), where `Fit.fit` is given none."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation loader(s), where `Fit` is given none."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test loader(s), where `Fit` is given none."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the prediction loader(s), where `Fit` is given none."""
        raise NotImplementedError

    # How the engine does things, overridable

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip before a step; by default as ``Fit(gradient_clip_val=..., gradient_clip_algorithm=...)`` says."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step one optimizer. ``optimizer.step`` goes through the precision; the closure returns the window's loss."""
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step one scheduler, with the monitored value where it has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device."""
        return self.trainer.strategy.to_device(batch)

    # The run we are in

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        if self._trainer is not None:
            return self._trainer.strategy.device
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter; the default dtype where there is none."""
        parameter = next(self.parameters(), None)
        return torch.get_default_dtype() if parameter is None else parameter.dtype

    @property
    def current_epoch(self) -> int:
        """Epochs completed, of the run or of the last one; 0 before any."""
        trainer = self._trainer or self._last_trainer
        return 0 if trainer is None else trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps made, of the run or of the last one; 0 before any."""
        trainer = self._trainer or self._last_trainer
        return 0 if trainer is None else trainer.global_step

    @property
    def global_rank(self) -> int:
        """This process's rank; 0 before a run."""
        trainer = self._trainer or self._last_trainer
        return 0 if trainer is None else trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node; 0 before a run."""
        trainer = self._trainer or self._last_trainer
        return 0 if trainer is None else trainer.local_rank

    @property
    def on_gpu(self) -> bool:
        """Whether the module computes on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """The run's `torch.distributed.device_mesh.DeviceMesh`, whose dimensions are reached by name.

        Raises:
            ConfigurationError: the strategy has none.
        """
        mesh = self.trainer.strategy.device_mesh
        if mesh is None:
            raise ConfigurationError(
                f"{type(self).__name__}.device_mesh was read, and strategy {self.trainer.strategy.name!r} has none.",
                "only strategies that spread parameters over ranks lay the ranks out in a mesh.",
                "use FSDPStrategy, with tensor_parallel=n for the dimension 'tensor'.",
            )
        return mesh

    @property
    def logger(self) -> Any:
        """The run's first logger; None where it has none, and before a run."""
        trainer = self._trainer or self._last_trainer
        return None if trainer is None else trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The run's loggers; none before a run."""
        trainer = self._trainer or self._last_trainer
        return [] if trainer is None else trainer.loggers

    # Logging

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        logger: bool = True,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        sync_dist: bool | None = None,
        add_dataloader_idx: bool = True,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
        enable_graph: bool = False,
        sync_dist_group: Any = None,
    ) -> None:
        """Record a value as it is now. Never synchronises the device and never communicates.

        Args:
            name: the key; alike on every rank.
            value: a number (of Python's or NumPy's), a tensor or array of one element, or a `torchmetrics.Metric`.
            on_step: keep each step's value. Default: in `training_step`.
            on_epoch: keep the epoch's value, reduced over all ranks. Default: everywhere else.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers.
            reduce_fx: "mean" (weighted by batch size), "sum", "max" or "min" over the epoch, or torch's or Python's
                function of that name.
            batch_size: the weight of this value in a mean; by default the micro-batch's samples.
            sync_dist: False keeps an epoch's value local to the rank; True reduces a step's value when it is flushed.
            add_dataloader_idx: append ``/dataloader_idx_i`` where there are several loaders.
            metric_attribute: the metric's name on the module, where it cannot be found.
            rank_zero_only: only rank 0 logs it, or only its value counts: it is ``sync_dist=False``.
            enable_graph: refused: what is logged keeps no graph alive.
            sync_dist_group: refused: values are reduced over all ranks that read data.

        Raises:
            ConfigurationError: it is called outside of a run, or what was asked for cannot be done.
        """
        if enable_graph or sync_dist_group is not None:
            raise _cannot_log(name, enable_graph)
        if rank_zero_only:
            sync_dist = False
        (self._trainer or self._in_a_run("log")).metrics.record(
            name,
            value,
            on_step,
            on_epoch,
            prog_bar,
            logger,
            reduce_fx,
            batch_size,
            sync_dist,
            add_dataloader_idx,
            metric_attribute,
        )

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Record several values alike; ``options`` are those of `log`."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *args: Any, **options: Any) -> None:
        """Print once, on rank 0, without breaking the progress bar."""
        self.trainer.print(*args, **options)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors, or numbers, of a nested collection: each of shape (*S) becomes (W, *S), in rank order.

        With ``sync_grads`` the backward sums over the ranks, so that a loss over the gathered batch has the gradient
        that one process would compute.
        """
        return self._in_a_run("all_gather").all_gather(data, sync_grads)

    # Manual optimization

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them, as handles whose ``step`` goes through precision and strategy.

        Args:
            use_pl_optimizer: False gives the plain optimizers, for reading: a step of theirs goes past the precision.
        """
        handles = self.trainer.optimizer_handles if use_pl_optimizer else self.trainer.optimizers
        return handles[0] if len(handles) == 1 else handles

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None."""
        schedulers = self.trainer.lr_schedulers
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Back-propagate a loss of shape (): scaled by the precision, gradients averaged over ranks.

        Args:
            loss: of shape ().
            options: torch's, such as ``retain_graph``: refused, as not every strategy can keep a graph.
        """
        if options:
            raise ConfigurationError(
                f"manual_backward was given {', '.join(f'{name}={value!r}' for name, value in options.items())}.",
                "a backward frees its graph: strategies exchange gradients in it, and some free the weights as well.",
                "add the losses and call manual_backward(first + second) once, or run the forward anew for each.",
            )
        (self._trainer or self._in_a_run("manual_backward")).manual_backward(loss)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Within it only ``optimizer``'s parameters require gradients."""
        with self.trainer.strategy.training_only(optimizer):
            yield

    def toggle_optimizer(self, optimizer: Any) -> None:
        """From here until `untoggle_optimizer` only ``optimizer``'s parameters require gradients.

        Within one `training_step`; where it fits, `toggled_optimizer` is the better form.
        """
        self.trainer.manual_step("toggle_optimizer", "steps all optimizers on").toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Let require gradients again what did so before `toggle_optimizer`."""
        self.trainer.manual_step("untoggle_optimizer", "steps all optimizers on").untoggle(optimizer)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip one optimizer's gradients, over the global norm or by value."""
        if gradient_clip_val is not None:
            self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")

    # Weights

    @classmethod
    def load_from_checkpoint(
        cls,
        path: Any = None,
        *,
        checkpoint_path: Any = None,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        ignore: str | Iterable[str] = (),
        **overrides: Any,
    ) -> Self:
        """Build the module from a checkpoint's hyper-parameters and load its weights.

        Args:
            path: the checkpoint's path or URL.
            checkpoint_path: the same, by Lightning's name.
            map_location: the device to put the weights on.
            hparams_file: a file of hyper-parameters, JSON or YAML, that counts instead of the checkpoint's.
            strict: refuse missing and unexpected names; else they are skipped, and said in a warning. None is
                `strict_loading`.
            ignore: names of saved hyper-parameters to leave out, which ``__init__`` takes no longer.
            overrides: hyper-parameters that replace the saved ones, or that were left out, being secrets.

        Raises:
            CheckpointError: there is no whole checkpoint, ``__init__`` needs what its hyper-parameters do not hold or
                does not take what they hold, or its weights do not fit; it holds trained weights alone, and the module
                has others than these were trained on.
        """
        from drivetrain.checkpoint._format import load  # a run that begins afresh has no use for these
        from drivetrain.module._saved_arguments import SavedArguments, path_of, read_hyper_parameters

        path = path_of(cls, path, checkpoint_path)
        checkpoint = load(path)
        weights, facts = checkpoint.weights(), checkpoint.manifest.facts
        base, arguments, left_out = facts.base, checkpoint.hyper_parameters, facts.left_out
        if hparams_file is not None:
            arguments, left_out = read_hyper_parameters(hparams_file), ()
        module = SavedArguments(os.fspath(path), arguments, left_out, facts.argument).build(cls, overrides, ignore)
        strict = module.strict_loading if strict is None else strict
        module.configure_model()
        called = f"The weights of {os.fspath(path)!r}"
        Misfit(misshaped=Misfit.between(module.state_dict(), weights.sources()).misshaped).settle(called, cls.__name__)
        if base:
            from drivetrain._distributed.control_plane import LocalControl
            from drivetrain.checkpoint._base_weights import base_sums, check_base

            own = {name: value for name, value in module.state_dict().items() if name in base}
            check_base(os.fspath(path), base, base_sums(own, LocalControl(), checkpoint.manifest.facts.precision))
        missing, unexpected = module.load_state_dict(weights.staged(), strict=False)
        missing = [name for name in missing if name not in base]
        Misfit(missing, unexpected).settle(called, cls.__name__, strict)
        return module if map_location is None else module.to(map_location)

    def freeze(self) -> Self:
        """Stop training every parameter, and evaluate; returns the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Train every parameter again; returns the module."""
        self.requires_grad_(True)
        return self.train()

    # In service

    def to_onnx(
        self, file_path: str | os.PathLike[str] | IO[bytes] | None = None, input_sample: Any = None, **kwargs: Any
    ) -> ONNXProgram:
        """Translate ``forward`` to ONNX, in eval mode, by `torch.onnx.export` with ``dynamo=True``.

        The file is there once it is whole. Weights of more than 2 GB do not fit in it, and lie in a second one beside
        it, ``<file_path>.data``.

        Args:
            file_path: a path, an fsspec URL, or a file that is open for bytes (`io.BytesIO`); None writes nothing.
            input_sample: what to trace with, as `example_input_array`, which is the default.
            kwargs: of `torch.onnx.export`: ``dynamic_shapes``, where a name such as ``"batch"`` stands for a size that
                may vary, ``input_names``, ``output_names``, ``opset_version``, ...; ``external_data=True`` writes
                the second file in any case.

        Returns:
            The program, which can be called, looked at and saved.

        Raises:
            ConfigurationError: a package, ``forward`` or the sample is missing, the weights are not all here, a named
                size cannot vary, or ``file_path`` is no file.
            CheckpointError: the file cannot be written.
        """
        from drivetrain.module._export import as_onnx  # by who asks for it

        return as_onnx(self, file_path, input_sample, kwargs)

    def export(self, input_sample: Any = None, **kwargs: Any) -> ExportedProgram:
        """Capture ``forward`` as one graph with its weights, in eval mode, by `torch.export.export`.

        `torch.export.save` writes it, and `torch.export.load` reads it without the module's code.

        Args:
            input_sample: what to trace with, as `example_input_array`, which is the default.
            kwargs: of `torch.export.export`: ``dynamic_shapes``, where a name such as ``"batch"`` stands for a size
                that may vary, ``strict``, ...

        Raises:
            ConfigurationError: ``forward`` or the sample is missing, or the weights are not all here.
        """
        from drivetrain.module._export import as_program  # by who asks for it

        return as_program(self, input_sample, kwargs)

    def to_torchscript(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: TorchScript is deprecated.

        Raises:
            ConfigurationError: names what to use.
        """
        raise ConfigurationError(
            f"{type(self).__name__}.to_torchscript was called.",
            "TorchScript is deprecated: PyTorch no longer develops it.",
            "use export(), whose program torch.export.save writes (AOTInductor compiles it for C++), or to_onnx(); "
            "torch.jit.trace(module.eval(), example) still works as far as torch itself supports it.",
        )

    # A strategy holds the module during a run

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if self._held:
            raise ConfigurationError(
                f"{type(self).__name__} was moved or re-cast (.to, .cuda, .half, ...) during a run.",
                "the strategy and the optimizer hold its parameters; new ones would silently stop training.",
                "choose the place and the dtype with Fit(accelerator=..., precision=...).",
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _cannot_log(name: str, enable_graph: bool) -> ConfigurationError:
    if enable_graph:
        return ConfigurationError(
            f"log({name!r}, enable_graph=True).",
            "what is logged is kept until the epoch's end, and its graph would be kept with it.",
            "drop it, and keep what you want to differentiate in an attribute.",
        )
    return ConfigurationError(
        f"log({name!r}, sync_dist_group=...).",
        "values are reduced over all ranks that read data.",
        "drop it, or reduce the value yourself and log it with sync_dist=False.",
    )
