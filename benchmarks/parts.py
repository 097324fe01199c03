"""Attributes a stack of Python frames to one part of a training step, by the paths of its files."""

from __future__ import annotations

from types import CodeType, FrameType

TORCH = ("data loader", "forward", "backward", "optimizer")
"""Parts that the raw loop has too."""
ADDED = ("fetching data", "strategy, precision", "loop", "hooks", "logging", "progress bar")
"""Parts that only a framework adds."""
PARTS = (*TORCH, *ADDED)

RULES: list[tuple[str, str | None]] = [
    ("/torch/utils/data/", "data loader"),
    ("/torch/optim/", "optimizer"),
    ("/torch/autograd/grad_mode.py", None),
    ("/torch/autograd/profiler.py", None),
    ("/torch/autograd/", "backward"),
    ("/torch/_tensor.py", "backward"),
    ("/torch/nn/parameter.py", None),
    ("/torch/nn/", "forward"),
    ("/torch/_compile.py", "optimizer"),  # called by zero_grad
    ("/torch/", None),
    ("/benchmarks/nets.py", "forward"),
    ("/benchmarks/peers/", "forward"),  # called by training_step
    ("/benchmarks/work.py", "forward"),
    ("/drivetrain/_metrics/", "logging"),
    ("/drivetrain/loggers/", "logging"),
    ("/drivetrain/_module/run_handle.py", None),
    ("/drivetrain/module/train_module.py", "logging"),
    ("/drivetrain/run_context.py", None),
    ("/drivetrain/callbacks/progress_bar.py", "progress bar"),
    ("/drivetrain/callbacks/rich_progress_bar.py", "progress bar"),
    ("/drivetrain/callbacks/_progress.py", "progress bar"),
    ("/drivetrain/callbacks/_live_lines.py", "progress bar"),
    ("/drivetrain/callbacks/", "hooks"),
    ("/drivetrain/data/", "fetching data"),
    ("/drivetrain/_loops/epoch_reader.py", "fetching data"),
    ("/drivetrain/_loops/windows.py", "fetching data"),
    ("/drivetrain/strategies/", "strategy, precision"),
    ("/drivetrain/precision/", "strategy, precision"),
    ("/drivetrain_strategies/", "strategy, precision"),
    ("/drivetrain/", "loop"),
    ("/tqdm/", "progress bar"),
    ("/rich/", "progress bar"),
    ("/lightning/pytorch/callbacks/progress/", "progress bar"),
    ("/lightning/pytorch/callbacks/", "hooks"),
    ("/lightning/pytorch/trainer/call.py", "hooks"),
    ("/lightning/pytorch/core/hooks.py", "hooks"),
    ("/lightning/pytorch/trainer/connectors/logger_connector/", "logging"),
    ("/lightning/pytorch/loggers/", "logging"),
    ("/lightning/fabric/loggers/", "logging"),
    ("/torchmetrics/", "logging"),
    ("/lightning/pytorch/loops/fetchers.py", "fetching data"),
    ("/lightning/pytorch/utilities/combined_loader.py", "fetching data"),
    ("/lightning/pytorch/utilities/data.py", "fetching data"),
    ("/lightning/fabric/utilities/data.py", "fetching data"),
    ("/lightning/pytorch/strategies/", "strategy, precision"),
    ("/lightning/pytorch/plugins/", "strategy, precision"),
    ("/lightning/fabric/strategies/", "strategy, precision"),
    ("/lightning/fabric/plugins/", "strategy, precision"),
    ("/lightning/pytorch/core/optimizer.py", "strategy, precision"),
    ("/lightning/", "loop"),
]
"""Part of a step by a fragment of the file's path; the first match wins. None attributes the time to the caller."""

_BOOKKEEPING = {"__getattr__", "__setattr__", "modules", "named_modules", "parameters", "named_parameters", "train"}
"""Functions of `torch.nn.Module` that are no part of a forward pass."""

_part_of_code: dict[CodeType, str | None] = {}


def part_of(frame: FrameType | None) -> str | None:
    """Return the part of the innermost frame that belongs to one; None before and after the run."""
    while frame is not None:
        code = frame.f_code
        if code not in _part_of_code:
            _part_of_code[code] = _find_part(code)
        if (part := _part_of_code[code]) is not None:
            return part
        frame = frame.f_back
    return None


def _find_part(code: CodeType) -> str | None:
    path = code.co_filename
    if path.endswith("/benchmarks/work.py") and code.co_name == "raw":
        return "loop"
    if "/torch/nn/" in path and code.co_name in _BOOKKEEPING:
        return None
    if path.endswith("/lightning/pytorch/core/module.py") and code.co_name.startswith("log"):
        return "logging"
    return next((part for rule, part in RULES if rule in path), None)
