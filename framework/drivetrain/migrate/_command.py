"""``python -m drivetrain.migrate FILE...``: rename Lightning's names in scripts and YAML files to drivetrain's.

The command changes only names and does not run the file. It lists on standard error, by line, the changes that remain
to be made, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import shutil
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain._storage.paths import folder_at
from drivetrain.migrate._configurations import migrate_yaml
from drivetrain.migrate._scripts import LINE, Migrated, migrate


def _read(path: Path) -> tuple[str, str]:
    """Return a file's text, with the original line endings, and its encoding."""
    if path.suffix == ".ipynb":
        raise ValueError("notebooks are not supported: convert the file to Python with jupyter nbconvert --to script")
    content = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding), encoding


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, keeping the file's permissions."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        shutil.copymode(path, temporary)
        folder_at(str(path.parent)).rename(temporary.name, path.name)
    finally:
        temporary.unlink(missing_ok=True)


def _diff_lines(path: Path, before: str, after: str) -> Iterator[str]:
    for line in difflib.unified_diff(LINE.findall(before), LINE.findall(after), str(path), str(path)):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Migrate the given files. Return 0, or 1 if changes remain to be made by hand, which standard error lists."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.migrate", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Python or YAML files for Lightning")
    parser.add_argument("--write", action="store_true", help="change the files instead of printing a diff")
    options = parser.parse_args(arguments)
    failed = 0
    for path in options.files:
        try:
            source, encoding = _read(path)
            is_yaml = path.suffix in (".yaml", ".yml")
            migrated = Migrated(*migrate_yaml(source)) if is_yaml else migrate(source)
            if options.write and migrated.source != source:
                _write(path, migrated.source.encode(encoding))
        except (OSError, ValueError, SyntaxError, RecursionError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = 1
            continue
        if not options.write:
            sys.stdout.writelines(_diff_lines(path, source, migrated.source))
        for line, text in migrated.remaining:
            print(f"{path}:{line}: {text}", file=sys.stderr)
            failed = 1
    return failed
