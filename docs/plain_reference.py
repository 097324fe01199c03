"""Writes docs/at-a-glance.md from the docstrings: every argument, hook, callback and logger, readable without a build.

python docs/plain_reference.py
"""

from __future__ import annotations

import inspect
import re
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain_strategies
from drivetrain import Callback, Fit, Logger, Strategy, TrainModule, callbacks, loggers, precision

PAGE = Path(__file__).with_name("at-a-glance.md")

HEAD = """# At a glance

Every argument of `Fit`, every hook in the order of its call, and the callbacks, loggers, strategies and precisions that
come with drivetrain. `make reference` generates this page from the docstrings, and a test holds it equal to them.
[The reference](reference.md) has the same with types and methods.
"""

HOOKS = """## Hooks, in order

A callback's hook takes `(trainer, module, ...)` followed by the arguments of the table; a module takes only those.
This is the order of a `fit` of one epoch, one step and one validation batch, recorded in a run of it. The hooks of
other stages and occasions stand after them. [How a step runs](how-a-step-runs.md) explains it.
"""

_STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}

_ITEM = re.compile(r"^(?P<name>\*{0,2}\w+): (?P<text>.*)$")


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        "## Arguments of `Fit`\n",
        _table(("Argument", "Default", "What it is"), _arguments(Fit)),
        HOOKS,
        _table(("Hook", "Arguments", "Called"), _hooks_in_order()),
        *_classes("Callbacks", "drivetrain.callbacks", _exported(callbacks, Callback)),
        *_classes("Loggers", "drivetrain.loggers", _exported(loggers, Logger)),
        *_classes("Strategies", "drivetrain_strategies", _exported(drivetrain_strategies, Strategy)),
        *_classes("Precisions", "drivetrain.precision", _exported(precision, precision.Precision)),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _exported(package: types.ModuleType, base: type) -> list[type]:
    """The classes that ``package`` exports and that can be used as they are, in the order of its ``__all__``."""
    found = [getattr(package, name) for name in package.__all__]
    return [each for each in found if isinstance(each, type) and issubclass(each, base) and each is not base]


def _classes(title: str, package: str, classes: list[type]) -> Iterator[str]:
    yield f"## {title}\n\nIn `{package}`.\n"
    for each in classes:
        summary = _paragraphs(each)[0].replace("``", "`")
        rows = _arguments(each)
        yield f"### `{each.__name__}`\n\n{summary}\n"
        if rows:
            yield _table(("Argument", "Default", "What it is"), rows)


def _arguments(owner: type) -> list[tuple[str, str, str]]:
    """Name, default and text of what ``owner``'s constructor takes."""
    texts = _described(owner)
    rows = []
    for name, parameter in inspect.signature(owner).parameters.items():
        starred = _STARS.get(parameter.kind, "") + name
        rows.append((f"`{starred}`", _default(parameter.default), texts.get(starred, "")))
    return rows


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    return "a function" if inspect.isfunction(value) else f"`{value!r}`"


def _described(owner: type) -> dict[str, str]:
    """The ``Args:`` of a Google-style docstring, by name; those of the class that it comes from where it has none."""
    for each in owner.__mro__:
        lines = inspect.cleandoc(each.__doc__ or "").splitlines()
        if "Args:" in lines:
            return dict(_items(lines[lines.index("Args:") + 1 :]))
    return {}


def _items(lines: list[str]) -> Iterator[tuple[str, str]]:
    name, text = "", ""
    for line in [*lines, "end"]:
        if not line.strip():
            continue
        item = _ITEM.match(line[4:]) if line.startswith("    ") else None
        if name and (item or not line.startswith("    ")):
            yield name, text
        if not line.startswith("    "):
            return  # the next section
        name, text = (item["name"], item["text"]) if item else (name, f"{text} {line.strip()}")


def _paragraphs(owner: Any) -> list[str]:
    """The paragraphs of a docstring, each on one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(owner.__doc__ or "").split("\n\n")]


def _hooks_in_order() -> list[tuple[str, str, str]]:
    """Each hook once, as a run calls it for the first time; those of other stages and occasions after them."""
    called = _recorded()
    names = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    others = [name for name in names if name not in called]
    return [_hook(name) for name in [*dict.fromkeys(called), *others]]


def _hook(name: str) -> tuple[str, str, str]:
    method = getattr(Callback, name)
    arguments = list(inspect.signature(method).parameters)[3:]  # after self, trainer and module
    return f"`{name}`", ", ".join(f"`{each}`" for each in arguments), _paragraphs(method)[0]


def _recorded() -> list[str]:
    """Every hook of a callback that a small run calls, in order."""
    called: list[str] = []

    def recording(name: str) -> Any:
        def hook(self: Callback, *arguments: Any, **named: Any) -> None:
            called.append(name)

        return hook

    hooks = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    recorder = type("Recorder", (Callback,), {name: recording(name) for name in hooks if "checkpoint" not in name})

    class Linear(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any) -> None:
            self.layer(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2)
    with tempfile.TemporaryDirectory() as root:
        Fit(
            accelerator="cpu",
            max_epochs=1,
            num_sanity_val_steps=0,
            callbacks=[recorder()],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
            default_root_dir=root,
        ).fit(Linear(), loader, loader)
    return called


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("``", "`").replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} is written.")
