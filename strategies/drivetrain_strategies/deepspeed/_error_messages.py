"""Translates DeepSpeed's errors into `ConfigurationError` with a reason and a fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from drivetrain.errors import ConfigurationError, DistributedError, listed
from drivetrain_strategies.deepspeed._library import redirected_prints

_COMPILING_MODULES = ("deepspeed.ops.op_builder.", "op_builder.", "torch.utils.cpp_extension")

DIFFERENT_PARAMETERS = (
    "ZeRO exchanges parameters and gradients in one order on all ranks, but these ranks used different parameters.",
    "at stage 3, name the block that contains the parameters, as in DeepSpeedStrategy(leaf_modules=[Experts]); at "
    "stage 2, set find_unused_parameters=True; stage 1 and FSDP support such models.",
)


@contextmanager
def explain_compilation_errors() -> Iterator[None]:
    """Translate errors of compiling one of DeepSpeed's extensions within this context.

    Raises:
        ConfigurationError: an extension could not be compiled. The error says what to install.
    """
    try:
        yield
    except Exception as error:
        causes = (error,) if error.__cause__ is None else (error, error.__cause__)
        if not any(
            module.startswith(_COMPILING_MODULES) for cause in causes for module in _modules_in_traceback(cause)
        ):
            raise
        raise ConfigurationError(
            f"DeepSpeed could not build one of its operations. {type(error).__name__}: {error}",
            "DeepSpeed's optimizers and its NVMe access are compiled at their first use.",
            "install g++ and ninja, or use torch's optimizers (in a config, set 'torch_adam': true in the optimizer's "
            "params); for NVMe, install libaio with its headers (libaio-dev), or offload to 'cpu'.",
        ) from error


def _modules_in_traceback(error: BaseException) -> list[str]:
    """Return the names of the modules whose functions were running when the error was raised, the innermost last."""
    return [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]


def check_operations(config: dict[str, Any], trains: bool) -> None:
    """Compile the extensions that DeepSpeed would otherwise compile during its setup.

    Args:
        config: the resolved configuration.
        trains: whether the run has an optimizer that steps.

    Raises:
        ConfigurationError: an extension cannot be built. The error says what to install.
    """
    from deepspeed.accelerator import get_accelerator

    zero, optimizer = config["zero_optimization"], config.get("optimizer", {})
    of_parameters, of_optimizer = (
        (zero.get(key) or {}).get("device", "none") for key in ("offload_param", "offload_optimizer")
    )
    builders = []
    if of_parameters == "nvme" or (trains and of_optimizer == "nvme"):
        builders.append("AsyncIOBuilder")
    uses_adam = str(optimizer.get("type", "")).lower() in ("adam", "adamw")
    if trains and uses_adam and not optimizer.get("params", {}).get("torch_adam"):
        builders.append("FusedAdamBuilder" if of_optimizer == "none" else "CPUAdamBuilder")
    with explain_compilation_errors(), redirected_prints():
        for name in builders:
            get_accelerator().create_op_builder(name).load(verbose=False)


@contextmanager
def explain_different_parameters(differing: Callable[[], list[str]] = list) -> Iterator[None]:
    """Translate errors of `GatherOrder`, DeepSpeed and its collectives if ranks used different parameters.

    Args:
        differing: returns the names of such parameters, where they are known.

    Raises:
        ConfigurationError: names the parameters, or the units whose forwards the ranks ran.
    """
    try:
        yield
    except DistributedError as error:
        if "the forward of" not in error.what:
            raise
        raise ConfigurationError(error.what, *DIFFERENT_PARAMETERS) from error
    except RuntimeError as error:
        if not _modules_in_traceback(error)[-1].startswith(("deepspeed.", "torch.distributed.")):
            raise
        names = differing()
        if names or "Detected a disagreement" in str(error):
            text = f"DeepSpeed failed{': ' + listed(names) if names else ''}. {error}"
            raise ConfigurationError(text, *DIFFERENT_PARAMETERS) from error
        raise
