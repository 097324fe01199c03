"""Renames Lightning's classes in YAML configurations, in which Hydra or LightningCLI names a class by its path."""

from __future__ import annotations

import re

from drivetrain.migrate._names import RENAMED_CLASSES, module_by_name

_LIGHTNING_PATH = re.compile(r"(?<![\w./-])(?:lightning|pytorch_lightning)(?:\.\w+)+")
_KEYS_OF_CLASSES = re.compile(r"[\s-]*(?:_target_|class_path)\s*:\s*[\"']?$")


def migrate_yaml(source: str) -> tuple[str, list[tuple[int, str]]]:
    """Return a configuration with drivetrain's classes, and what remains to be changed by hand, by line.

    Only the paths change that are the values of ``_target_`` (Hydra) or ``class_path`` (LightningCLI). Comments stay as
    they are.
    """
    remaining: list[tuple[int, str]] = []
    new_lines: list[str] = []
    for number, line in enumerate(re.split(r"(?<=\n)", source), start=1):
        content = re.split(r"(?:^|\s)#", line)[0]
        new_line = line
        for found in reversed(list(_LIGHTNING_PATH.finditer(content))):
            path = found[0]
            old = path.rpartition(".")[2]
            new = RENAMED_CLASSES.get(old, old)
            module = module_by_name().get(new)
            if not _KEYS_OF_CLASSES.match(content[: found.start()]):
                remaining.append((number, f"{path!r} is a Lightning name in a value"))
            elif module is None:
                remaining.append((number, f"{path} has no known counterpart"))
            else:
                new_line = f"{line[: found.start()]}{module}.{new}{line[found.end() :]}"
        new_lines.append(new_line)
    return "".join(new_lines), sorted(set(remaining))
