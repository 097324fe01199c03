"""TrainModule: the base class for a model and its training code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch.optim import Optimizer

from drivetrain._module.hyper_parameters import HyperParametersMixin, class_only
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain._module.run_handle import RunHandle
from drivetrain._runtime.plain_names import PlainNames
from drivetrain.errors import ConfigurationError

# These are imported only for annotations, to keep the import of this module cheap.
if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram


class TrainModule(ModuleHooks, RunHandle, HyperParametersMixin, PlainNames):
    """A model together with its training code.

    Implement `training_step` and `configure_optimizers`; all other methods are optional. A TrainModule is an ordinary
    `torch.nn.Module` before and after a run.
    """

    automatic_optimization: bool = True
    """If False, `training_step` itself runs backward and steps, with `manual_backward` and `optimizers`."""

    example_input_array: Any = None
    """An example input of ``forward``: a tensor, a tuple of arguments, or a dict of arguments by name.

    `to_onnx` and `export` trace ``forward`` with this input, and `ModelSummary` computes shapes and FLOPs with it.
    """

    strict_loading: bool = True
    """If False, a run and `load_from_checkpoint` skip weights whose names do not match, with a warning."""

    _is_locked = False

    # Methods that users implement. A step method takes `batch` and optionally `batch_idx` and `dataloader_idx`. The
    # signatures here accept any further arguments, so that type checkers accept each form.

    def training_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of shape (), a dict with "loss", or None to skip the micro-batch.

        None is supported in a single process only. Like the other step methods, `training_step` may take ``batch`` and
        ``batch_idx``, or only ``batch``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def validation_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one validation micro-batch. With several loaders, the method also gets ``dataloader_idx``."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step")

    def test_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one test micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step")

    def predict_step(self, batch: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one micro-batch; by default ``self(batch)``."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, several optimizers, or None, optionally with schedulers; the guide lists every form."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers")

    def batch_weight(self, batch: Any) -> int | float | torch.Tensor:
        """Return the number of items over which the micro-batch's loss is a mean; by default its number of samples.

        ``batch`` is what the loader returned, before the transfer to the device. The gradient of an optimizer step is
        the mean of the gradients of its micro-batches on all ranks, weighted by the returned numbers.
        """
        raise NotImplementedError  # The engine calls this method only if it is overridden.

    def train_dataloader(self) -> Any:
        """Return the training loader or loaders, if none are passed to the run."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation loader or loaders, if none are passed to the run."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test loader or loaders, if none are passed to the run."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the prediction loader or loaders, if none are passed to the run."""
        raise NotImplementedError

    # Overridable steps of the loop: clipping, optimizer and scheduler steps, and the batch transfer

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a loss of shape (), in automatic optimization and in `manual_backward`.

        ``loss`` is already multiplied by the micro-batch's share of the accumulation window and, in fp16, by the loss
        scale. DeepSpeed runs the backward itself, so that an override raises a `ConfigurationError` there.
        """
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of one optimizer, before the first micro-batch of a window."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before a step, by default with the values that were passed to `Fit`."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step one optimizer.

        ``optimizer.step`` also applies the precision, for example the unscaling of fp16. The closure returns the loss
        of the accumulation window.
        """
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step one scheduler. ``metric`` is the value of the monitored metric, or None if no metric is monitored."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device."""
        return self.trainer.strategy.to_device(batch)

    # The module's device and dtype, and properties of the current or last run

    @property
    def device(self) -> torch.device:
        """The device on which the module computes."""
        if self._trainer is not None:
            return self._trainer.strategy.device
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter, or the default dtype without parameters."""
        parameter = next(self.parameters(), None)
        return torch.get_default_dtype() if parameter is None else parameter.dtype

    @property
    def current_epoch(self) -> int:
        """The number of completed epochs of the current or last run; 0 before the first run."""
        return self._any_run.current_epoch if self._any_run else 0

    @property
    def global_step(self) -> int:
        """The number of optimizer steps of the current or last run; 0 before the first run."""
        return self._any_run.global_step if self._any_run else 0

    @property
    def global_rank(self) -> int:
        """This process's rank; 0 before a run."""
        return self._any_run.global_rank if self._any_run else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node; 0 before a run."""
        return self._any_run.local_rank if self._any_run else 0

    @property
    def on_gpu(self) -> bool:
        """Whether the module computes on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """The run's `torch.distributed.device_mesh.DeviceMesh`, with named dimensions.

        Raises:
            ConfigurationError: the strategy has no device mesh.
        """
        mesh = self.trainer.strategy.device_mesh
        if mesh is None:
            raise ConfigurationError(
                f"{type(self).__name__}.device_mesh was read, but strategy {self.trainer.strategy.name!r} has none.",
                "only strategies that shard parameters over ranks arrange the ranks in a mesh.",
                "use FSDPStrategy, with tensor_parallel=n for the dimension 'tensor'.",
            )
        return mesh

    @property
    def logger(self) -> Any:
        """The run's first logger; None if the run has no loggers, and before a run."""
        return self._any_run.logger if self._any_run else None

    @property
    def loggers(self) -> list[Any]:
        """The run's loggers; an empty list before a run."""
        return self._any_run.loggers if self._any_run else []

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
    ) -> None:
        """Log the current value of a metric, without synchronising the device and without communication.

        Args:
            name: the metric's name, the same on every rank.
            value: a number (Python's or NumPy's), a tensor or array of one element, or a `torchmetrics.Metric`.
            on_step: log each step's value. By default True in `training_step` and False elsewhere.
            on_epoch: log the epoch's value, reduced over all ranks. By default False in `training_step` and True
                elsewhere.
            prog_bar: show the value in the progress bar.
            logger: send the value to the loggers.
            reduce_fx: "mean" (weighted by batch size), "sum", "max" or "min" over the epoch, or the function of torch
                or Python with one of these names.
            batch_size: the weight of this value in a mean; by default the micro-batch's number of samples.
            sync_dist: None reduces only the epoch's value over ranks, and False reduces no value. True also reduces
                each step's value, when the value is sent to the loggers.
            add_dataloader_idx: append ``/dataloader_idx_i`` to the name if there are several loaders.
            metric_attribute: the name of the module's attribute that holds the metric, if drivetrain does not find it.
            rank_zero_only: log only rank 0's value. This is the same as ``sync_dist=False``.

        Raises:
            ConfigurationError: `log` is called outside of a run.
        """
        if rank_zero_only:
            sync_dist = False
        (self._trainer or self._require_run("log")).metrics.record(
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
        """Log several values by name, with the same ``options`` for each. The options are those of `log`."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0 only, without breaking the progress bar."""
        self.trainer.print(*args, **options)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather a nested collection of tensors or numbers from all ranks.

        A tensor of shape (*S) becomes a tensor of shape (world_size, *S), in rank order. With ``sync_grads``, the
        backward pass sums gradients over the ranks, so that a loss over the gathered batch has the gradient that one
        process would compute.
        """
        return self._require_run("all_gather").all_gather(data, sync_grads)

    # Manual optimization

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer or the list of optimizers, as handles whose ``step`` applies precision and strategy.

        Args:
            use_pl_optimizer: if False, return the plain optimizers, whose ``step`` bypasses the precision. They may be
                read, but not stepped.
        """
        handles = self.trainer.optimizer_handles if use_pl_optimizer else self.trainer.optimizers
        return handles[0] if len(handles) == 1 else handles

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of schedulers if there are several, or None."""
        schedulers = self.trainer.lr_schedulers
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss of shape (), including loss scaling, and average the gradients over ranks.

        Options of torch such as ``retain_graph`` do not exist: strategies exchange gradients in a backward, and some
        also free weights. Add the losses, or run the forward again for each.
        """
        self._require_run("manual_backward").manual_step("manual_backward", "runs backward on").backward(loss)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Context manager in which only ``optimizer``'s parameters require gradients."""
        with self.trainer.strategy.requiring_grad_only_for(optimizer):
            yield

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only ``optimizer``'s parameters require gradients, until `untoggle_optimizer`.

        Both methods must be called in the same `training_step`. The context manager `toggled_optimizer` is preferable.
        """
        self.trainer.manual_step("toggle_optimizer", "steps all optimizers on").toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Restore the ``requires_grad`` of all parameters to its value before `toggle_optimizer`."""
        self.trainer.manual_step("untoggle_optimizer", "steps all optimizers on").untoggle()

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip one optimizer's gradients by global norm or by value."""
        if gradient_clip_val is not None:
            self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")

    # Load and freeze weights

    @class_only
    def load_from_checkpoint(
        cls,
        path: Any = None,
        *,
        checkpoint_path: Any = None,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        ignore: str | Iterable[str] = (),
        averaged: bool | None = None,
        **overrides: Any,
    ) -> Self:
        """Build the module from a checkpoint's hyper-parameters and load its weights.

        Args:
            path: the checkpoint's path or URL.
            checkpoint_path: Lightning's name for ``path``.
            map_location: the device for the weights.
            hparams_file: a JSON or YAML file of hyper-parameters, used instead of the ones in the checkpoint.
            strict: whether to raise an error if names of weights are missing or unexpected, instead of skipping these
                weights with a warning. None means `strict_loading`.
            ignore: names of saved hyper-parameters to omit because ``__init__`` no longer takes them.
            averaged: True for the averages of the weights, False for the trained weights. None means those that the
                run evaluated with.
            overrides: hyper-parameters that replace the saved ones, or secrets, which checkpoints do not contain.

        Raises:
            CheckpointError: there is no complete checkpoint, its hyper-parameters do not match the arguments of
                ``__init__``, its weights do not fit, or it lacks the averages. Also raised if the checkpoint contains
                only the trained weights, and the module's other weights differ from the weights of the run that saved
                the checkpoint.
        """
        # Imported only here, because most runs do not need it.
        from drivetrain._format import load
        from drivetrain._module.saved_arguments import SavedArguments, read_hyper_parameters, resolve_checkpoint_path
        from drivetrain._parameters.loading_hooks import with_versions
        from drivetrain._parameters.weights_fit import WeightMismatch
        from drivetrain._rank_zero import this_rank
        from drivetrain.checkpoint.averaged_weights import evaluated_weights

        path = resolve_checkpoint_path(cls, path, checkpoint_path)
        checkpoint = load(path)
        metadata = checkpoint.manifest.metadata
        weights = evaluated_weights(checkpoint, averaged, announce=metadata.averages is not None and this_rank() == 0)
        base = metadata.base
        saved = checkpoint.hyper_parameters if hparams_file is None else read_hyper_parameters(hparams_file)
        module = SavedArguments(os.fspath(path), saved, metadata.argument).build(cls, overrides, ignore)
        strict = module.strict_loading if strict is None else strict
        module.configure_model()
        description = f"The weights of {os.fspath(path)!r}"
        if base:
            from drivetrain._distributed.control_plane import LocalControl
            from drivetrain._parameters.base_weights import base_checksums, check_base

            base_weights = {name: value for name, value in module.state_dict().items() if name in base}
            check_base(
                os.fspath(path),
                base,
                base_checksums(base_weights, LocalControl(), checkpoint.manifest.metadata.precision),
            )
        state = with_versions(module, weights.staged(), metadata.layer_versions)
        try:
            missing, unexpected = module.load_state_dict(state, strict=False)
        except RuntimeError as error:  # torch's error for shapes that differ
            wrong_shape = WeightMismatch.compare(module.state_dict(), state).wrong_shape
            WeightMismatch(wrong_shape=wrong_shape or [str(error)]).raise_or_warn(description, cls.__name__)
            raise
        missing = [name for name in missing if name not in base]
        WeightMismatch(missing, unexpected).raise_or_warn(description, cls.__name__, strict)
        return module if map_location is None else module.to(map_location)

    def freeze(self) -> Self:
        """Freeze all parameters, switch to eval mode, and return the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Unfreeze all parameters, switch to train mode, and return the module."""
        self.requires_grad_(True)
        return self.train()

    # Export the module

    def to_onnx(
        self, file_path: str | os.PathLike[str] | IO[bytes] | None = None, input_sample: Any = None, **kwargs: Any
    ) -> ONNXProgram:
        """Export ``forward`` in eval mode to ONNX, by `torch.onnx.export` with ``dynamo=True``.

        Weights above 2 GB are stored in a second file, ``<file_path>.data``.

        Args:
            file_path: a path, or a binary file object such as `io.BytesIO`. None writes nothing.
            input_sample: the input to trace with, in any form that `example_input_array` may have. The default is
                the value of `example_input_array`.
            kwargs: arguments of `torch.onnx.export`, such as ``dynamic_shapes``, ``input_names``, ``output_names`` or
                ``opset_version``. In ``dynamic_shapes``, a name such as ``"batch"`` makes a size dynamic.
                ``external_data=True`` always writes the second file.

        Returns:
            The program, which can be called, inspected and saved.

        Raises:
            ConfigurationError: the sample is missing, or this process does not hold all weights.
        """
        from drivetrain._module.export import export_onnx  # Imported only here, because it is slow to import.

        return export_onnx(self, file_path, input_sample, kwargs)

    def export(self, input_sample: Any = None, **kwargs: Any) -> ExportedProgram:
        """Capture ``forward`` in eval mode as a graph with its weights, by `torch.export.export`.

        `torch.export.save` writes the result, and `torch.export.load` reads it without the module's code.

        Args:
            input_sample: the input to trace with, in any form that `example_input_array` may have. The default is
                the value of `example_input_array`.
            kwargs: arguments of `torch.export.export`, such as ``dynamic_shapes`` or ``strict``. In ``dynamic_shapes``,
                a name such as ``"batch"`` makes a size dynamic.

        Raises:
            ConfigurationError: the sample is missing, or this process does not hold all weights.
        """
        from drivetrain._module.export import export_program  # Imported only here, because it is slow to import.

        return export_program(self, input_sample, kwargs)

    # The engine sets `_is_locked` for a run, during which only the strategy may move or cast the module.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if self._is_locked:
            raise ConfigurationError(
                f"{type(self).__name__} was moved or re-cast (.to, .cuda, .half, ...) during a run.",
                "the strategy and the optimizer hold the old parameters, and new parameters would not be trained.",
                "choose the device and the dtype with Fit(accelerator=..., precision=...).",
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self
