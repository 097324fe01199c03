"""To which part of a step the time of a stack of Python frames belongs."""

from __future__ import annotations

from types import CodeType, FrameType

TORCH = ("data loader", "forward", "backward", "optimizer")
"""What the raw loop has, too."""
ADDED = ("fetching data", "strategy, precision", "loop", "hooks", "logging", "progress bar")
"""What a framework adds."""
PARTS = (*TORCH, *ADDED)

_RULES = [
    ("/torch/utils/data/", "data loader"),
    ("/torch/optim/", "optimizer"),
    ("/torch/autograd/grad_mode.py", None),
    ("/torch/autograd/profiler.py", None),
    ("/torch/autograd/", "backward"),
    ("/torch/_tensor.py", "backward"),
    ("/torch/nn/parameter.py", None),
    ("/torch/nn/", "forward"),
    ("/torch/_compile.py", "optimizer"),  # zero_grad goes through it
    ("/torch/", None),
    ("/benchmarks/nets.py", "forward"),
    ("/benchmarks/peers/", "forward"),  # training_step, which calls it
    ("/benchmarks/work.py", "forward"),
    ("/drivetrain/metrics/", "logging"),
    ("/drivetrain/loggers/", "logging"),
    ("/drivetrain/module.py", "logging"),
    ("/drivetrain/run_handle.py", None),
    ("/drivetrain/engine/reads.py", None),
    ("/drivetrain/callbacks/progress", "progress bar"),
    ("/drivetrain/callbacks/rich_progress", "progress bar"),
    ("/drivetrain/callbacks/readback", "progress bar"),
    ("/drivetrain/callbacks/", "hooks"),
    ("/drivetrain/data/", "fetching data"),
    ("/drivetrain/loops/windows.py", "fetching data"),
    ("/drivetrain/strategy.py", "strategy, precision"),
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
"""By what stands in a file's path; the first that fits. None: the time is its caller's."""

_BOOKKEEPING = {"__getattr__", "__setattr__", "modules", "named_modules", "parameters", "named_parameters", "train"}
"""Of `torch.nn.Module`: no forward, whoever asks for them."""

_known: dict[CodeType, str | None] = {}


def part_of(frame: FrameType | None) -> str | None:
    """The part of the innermost frame that belongs to one; None where none does, as before and after the run."""
    while frame is not None:
        code = frame.f_code
        if code not in _known:
            _known[code] = _of_code(code)
        if (part := _known[code]) is not None:
            return part
        frame = frame.f_back
    return None


def _of_code(code: CodeType) -> str | None:
    path = code.co_filename
    if path.endswith("/benchmarks/work.py") and code.co_name == "raw":
        return "loop"
    if "/torch/nn/" in path and code.co_name in _BOOKKEEPING:
        return None
    if path.endswith("/lightning/pytorch/core/module.py") and code.co_name.startswith("log"):
        return "logging"
    return next((part for rule, part in _RULES if rule in path), None)
