"""The callbacks, loggers and profiler of a run: the user's, by name or as objects, and the default ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from drivetrain import loggers
from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain._loops.hooks import HOOKS
from drivetrain._runtime.lazy_names import is_installed
from drivetrain._runtime.terminal_output import is_terminal
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import Logger

if TYPE_CHECKING:
    from drivetrain.profilers import Profiler

_LOGGERS = EntryPointRegistry[Logger](
    "logger",
    "drivetrain.loggers",
    Logger,  # type: ignore[type-abstract]
    {
        "csv": lambda root: loggers.CSVLogger(root),  # a lambda, because the class is imported on first use
        "tensorboard": lambda root: loggers.TensorBoardLogger(root),
        "wandb": lambda root: loggers.WandbLogger(save_dir=root),
        "mlflow": lambda root: loggers.MLFlowLogger(save_dir=root),
    },
    other_values=(),
    meaning="the name selects a logger",
    alternatives="a drivetrain.Logger, a list of both, True, False or None",
)


def default_callbacks(given: Any, *, progress_bar: bool, model_summary: bool, checkpointing: bool) -> list[Callback]:
    """Return the user's callbacks, and each default callback unless the user passed a callback of its class.

    Raises:
        ConfigurationError: an item is not a `Callback`.
    """
    callbacks = checked_callbacks(given, "callbacks holds")
    shown = {callback.shown_as for callback in callbacks}
    # The imports are local so that a run without these callbacks starts faster.
    if progress_bar and "progress_bar_callback" not in shown:
        callbacks.append(_progress_bar())
    if model_summary:
        from drivetrain.callbacks.model_summary import ModelSummary

        if not any(isinstance(callback, ModelSummary) for callback in callbacks):
            callbacks.append(ModelSummary())
    if checkpointing and "checkpoint_callback" not in shown:
        from drivetrain.callbacks.checkpoint import Checkpoint

        callbacks.append(Checkpoint())
    return callbacks


def _progress_bar() -> Callback:
    """Return the bar that suits this process's standard output.

    On a UTF terminal with rich installed the result is a `RichProgressBar`, on other terminals a plain `ProgressBar`,
    and elsewhere a bar that only prints lines.
    """
    from drivetrain.callbacks.progress_bar import ProgressBar, ProgressLines

    if not is_terminal(sys.stdout):
        return ProgressLines()
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if not encoding.lower().startswith("utf") or not is_installed("rich"):
        return ProgressBar()
    from drivetrain.callbacks.rich_progress_bar import RichProgressBar

    return RichProgressBar()


def default_loggers(given: Any, root: str, *, only_check: bool = False) -> list[Logger]:
    """Return the loggers for ``Fit(logger=...)``.

    Args:
        given: None or True for TensorBoard if it is installed, else CSV; False for no logger; or a logger, a logger's
            name, or a list of loggers and names.
        root: the run's ``default_root_dir``, passed to loggers that are built by name.
        only_check: whether to check ``given`` and return no loggers.

    Raises:
        ConfigurationError: an item is neither a `Logger` nor the name of one.
    """
    if given is False:
        return []
    if given is None or given is True:
        given = "tensorboard" if is_installed("tensorboard") else "csv"
    chosen = []
    for item in given if isinstance(given, list | tuple) else [given]:
        if isinstance(item, str):
            if only_check:
                _LOGGERS.check(item)
            else:
                chosen.append(_LOGGERS.make(item, root))
        elif isinstance(item, Logger):
            chosen.append(item)
        else:
            raise ConfigurationError(
                f"logger holds a {type(item).__name__}, which is not a Logger.",
                "the engine sends logged values through the interface of Logger.",
                "pass a drivetrain.Logger, a name such as 'csv', a list of them, True, False or None.",
            )
    return [] if only_check else chosen


def resolve_profiler(profiler: object) -> Profiler:
    """Return the profiler for the value of ``Fit(profiler=...)``, a profiler or its name.

    Raises:
        ConfigurationError: no profiler has the name, the registered object does not make a profiler, or the value is
            neither a name nor a profiler.
    """
    from drivetrain import profilers  # only runs with a profiler need it

    if isinstance(profiler, profilers.Profiler):
        return profiler
    if not isinstance(profiler, str):
        raise ConfigurationError(
            f"profiler={profiler!r} is not a Profiler.",
            "the engine starts and stops phases through the methods of Profiler.",
            "pass 'simple', 'advanced', 'pytorch', a drivetrain.profilers.Profiler, or None.",
        )
    return EntryPointRegistry[profilers.Profiler](
        "profiler",
        "drivetrain.profilers",
        profilers.Profiler,  # type: ignore[type-abstract]
        {
            "simple": lambda: profilers.SimpleProfiler(),  # a lambda, because the class is imported on first use
            "advanced": lambda: profilers.AdvancedProfiler(),
            "pytorch": lambda: profilers.PyTorchProfiler(),
        },
        other_values=(),
        meaning="the name selects a profiler",
        alternatives="a drivetrain.profilers.Profiler, or None",
    ).make(profiler)


def checked_callbacks(given: Any, subject: str) -> list[Callback]:
    """Return ``given`` as a list, after checking each callback.

    Args:
        given: a callback, a list of them, or None.
        subject: the beginning of the error message, such as "callbacks holds".

    Raises:
        ConfigurationError: an item is not a `Callback`, or has a method with the name of a hook that does not exist.
    """
    callbacks = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            named = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise ConfigurationError(
                f"{subject} {named}, which is not a Callback.",
                "the engine calls the hooks of drivetrain.Callback.",
                "pass an instance of a drivetrain.Callback subclass.",
            )
        if not type(callback).__module__.startswith("drivetrain.") or vars(callback).keys() & HOOKS:
            from drivetrain._engine.assembly.class_checks import check_hooks

            check_hooks(callback)
    return callbacks
