"""Renames Lightning's classes in YAML configurations, in which Hydra or LightningCLI names a class by its path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from drivetrain._config.foreign_names import find_replacement
from drivetrain.migrate._names import RENAMED_CLASSES, module_by_name

_LIGHTNING_PATH = re.compile(r"(?<![\w./-])(?:lightning|pytorch_lightning)(?:\.\w+)+")
_KEYS_OF_CLASSES = re.compile(r"(?P<indent>[\s-]*)(?:_target_|class_path)\s*:\s*[\"']?$")
_KEY = re.compile(r"(?P<indent>[\s-]*)(?P<name>\w+)\s*:")


def migrate_yaml(source: str) -> tuple[str, list[tuple[int, str]]]:
    """Return a configuration with drivetrain's classes, and what remains to be changed by hand, by line.

    Only the paths change that are the values of ``_target_`` (Hydra) or ``class_path`` (LightningCLI). Comments stay as
    they are.
    """
    remaining: list[tuple[int, str]] = []
    lines = re.split(r"(?<=\n)", source)
    new_lines: list[str] = []
    for number, line in enumerate(lines, start=1):
        content = re.split(r"(?:^|\s)#", line)[0]
        new_line = line
        for found in reversed(list(_LIGHTNING_PATH.finditer(content))):
            key = _KEYS_OF_CLASSES.match(content[: found.start()])
            path = found[0]
            old = path.rpartition(".")[2]
            new = RENAMED_CLASSES.get(old, old)
            module = module_by_name().get(new)
            if key is None:
                remaining.append((number, f"{path!r} is a Lightning name in a value"))
            elif module is None:
                remaining.append((number, f"{path} has no known counterpart"))
            else:
                new_line = f"{line[: found.start()]}{module}.{new}{line[found.end() :]}"
                if old == "Trainer":
                    remaining += _argument_notes(lines, number - 1, len(key["indent"]))
        new_lines.append(new_line)
    return "".join(new_lines), sorted(set(remaining))


def _argument_notes(lines: Sequence[str], target: int, indent: int) -> Iterator[tuple[int, str]]:
    """Yield notes on the arguments of ``Trainer`` next to its ``_target_``, or within ``init_args``, that Fit lacks."""
    for step in (-1, 1):
        index = target + step
        while 0 <= index < len(lines):
            key = _KEY.match(lines[index])
            if lines[index].strip() and (key is None or len(key["indent"]) < indent):
                break
            advice = None if key is None else find_replacement(key["name"])
            if key is not None and advice is not None:
                yield index + 1, f"{key['name']}: {advice}"
            index += step
