"""Moves the modules of both source roots to the layout of decision 0019, and every mention of them with it.

    python docs/decisions/0019_move_modules.py          # in a clean checkout of a commit before the move
    python docs/decisions/0019_move_modules.py --check BEFORE    # compare the syntax trees with those of a commit

A file moves by ``PLACES``; what is left of a public package gets an underscore where its ``__init__`` exports nothing
of it. Imports, dotted names and paths are rewritten in all text that is tracked, the changelog apart. The check parses
both trees and compares them with the imports sorted and every dotted name and path written the new way.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

FRAMEWORK, STRATEGIES = "framework/drivetrain/", "strategies/drivetrain_strategies/"

# By old path, without the root and ".py": the new one. A folder moves with all that it holds.
FOLDERS = {
    "checkpoint_format": "checkpoint/_format",
    "engine": "_engine",
    "loops": "_loops",
    "metrics": "_metrics",
}
PLACES = {
    "module": "module/train_module",
    "module_hooks": "module/_module_hooks",
    "hyper_parameters": "module/_hyper_parameters",
    "run_handle": "module/_run_handle",
    "strategy": "strategies/strategy",
    "run_settings": "strategies/run_settings",
    "optimizer_state": "strategies/_optimizer_state",
    "trainable": "strategies/_trainable",
    "weights_fit": "checkpoint/_weights_fit",
    "hooks": "_loops/hooks",
    "handshake": "_engine/handshake",
    "control": "_distributed/control",
    "failure": "_distributed/failure",
    "shards": "_distributed/shards",
    "arguments": "_config/arguments",
    "config": "_config/precedence",
    "setting_types": "_config/setting_types",
    "old_names": "_config/old_names",
    "accelerators": "_runtime/accelerators",
    "generators": "_runtime/generators",
    "lazy_names": "_runtime/lazy_names",
    "process_state": "_runtime/process_state",
    "seed": "_runtime/seed",
    "sizes": "_runtime/sizes",
    "transfer": "_runtime/transfer",
    # No base name twice.
    "engine/loaders": "_engine/stage_loaders",
    "engine/place": "_engine/topology",
    "loops/arguments": "_loops/step_arguments",
    "loops/optimizers": "_loops/configured_optimizers",
    "metrics/agreement": "_metrics/agreed_value",
    "launchers/variables": "launchers/_torchrun_variables",
    "precision/gradients": "precision/_gradient_meshes",
    "testing/world": "testing/run_distributed",
}
PLACES_OF_STRATEGIES = {
    # What every strategy of many ranks stands on belongs to the interfaces.
    "distributed": FRAMEWORK + "strategies/distributed",
    "process_group": FRAMEWORK + "strategies/_process_group",
    "buffers": FRAMEWORK + "_distributed/buffers",
    "collectives": FRAMEWORK + "_distributed/collectives",
    "control_group": FRAMEWORK + "_distributed/control_group",
    "flight_recorder": FRAMEWORK + "_distributed/flight_recorder",
    "groups": FRAMEWORK + "_distributed/groups",
    "watchdog": FRAMEWORK + "_distributed/watchdog",
    "placement": STRATEGIES + "_original_device",
    "fsdp/sharding": STRATEGIES + "fsdp/_apply_plan",
    "fsdp/closure_step": STRATEGIES + "fsdp/_repeated_evaluation",
}
PUBLIC_PACKAGES = ["callbacks", "checkpoint", "data", "environments", "launchers", "loggers", "precision", "testing"]
NAMES_FOR_STRATEGIES = {
    ".distributed": ["DEFAULT_STEP_TIMEOUT", "DEFAULT_TIMEOUT", "DistributedStrategy"],
    ".run_settings": ["RunSettings"],
    ".strategy": ["StepRunner", "Strategy"],
    "._optimizer_state": ["check_optimizer_fits", "load_named_optimizer_state", "named_optimizer_state"],
    "._trainable": ["TRAINS", "changed_within_window", "listed"],
    "drivetrain._distributed.collectives": ["broadcast_together"],
    "drivetrain._distributed.control": ["ControlPlane", "LocalControl", "Pending", "absent_error", "spread"],
    "drivetrain._distributed.groups": ["set_timeout"],
    "drivetrain._distributed.shards": ["Box", "Region", "Shard", "Span", "cut"],
    "drivetrain._runtime.lazy_names": ["lazy_names"],
    "drivetrain._runtime.sizes": ["size_in_words"],
    "drivetrain.checkpoint._weights_fit": ["Misfit"],
    "drivetrain.module.train_module": ["TrainModule", "hold", "release"],
    "drivetrain.precision._default_dtype": ["DefaultDtype"],
    "drivetrain.precision._loss_scaler": ["FLOOR"],
}
_ALL = sorted(name for names in NAMES_FOR_STRATEGIES.values() for name in names)
STRATEGIES_DOOR = "\n".join(
    [
        '"""What an author of a strategy needs, every name imported on first use."""',
        "from __future__ import annotations",
        "from typing import TYPE_CHECKING",
        "from drivetrain._runtime.lazy_names import lazy_names as _lazy_names",
        "if TYPE_CHECKING:",
        *(
            f"    from {'drivetrain.strategies' * home.startswith('.')}{home} import {name} as {name}"
            for home, names in NAMES_FOR_STRATEGIES.items()
            for name in names
        ),
        "_HOME = {",
        *(f"    {name!r}: {home!r}," for home, names in NAMES_FOR_STRATEGIES.items() for name in names),
        "}",
        f"__all__ = {_ALL!r}",
        "__getattr__, __dir__ = _lazy_names(__name__, _HOME)",
        "",
    ]
)

# Names that a public package exported for our own use: whoever imports them names their module from now on.
INTERNAL_NAMES = {
    "drivetrain.callbacks": {"default_progress_bar": "progress_default"},
    "drivetrain.data": {
        "START": "sharding",
        "BatchSource": "source",
        "Origin": "sharding",
        "Prefetcher": "prefetch",
        "ReadAhead": "ahead",
        "Share": "sharding",
        "prepare_loader": "loaders",
        "first_dimension": "drivetrain.transfer",
        "move_to": "drivetrain.transfer",
    },
    "drivetrain.loggers": {"default_logger": "default"},
}
NEW_PACKAGES = {
    "_config/__init__.py": '"""What `Fit` was told: where each setting comes from, and what it may be."""\n',
    "_distributed/__init__.py": '"""Between processes: control plane, collectives, and ranks that fail."""\n',
    "_runtime/__init__.py": '"""The process and its devices: generators, and state that a run puts back."""\n',
    "module/__init__.py": '''"""What users subclass: `TrainModule`."""

from drivetrain.module.train_module import TrainModule

__all__ = ["TrainModule"]
''',
    "data/__init__.py": '''\
"""Data: the order of samples, how they are dealt to ranks, and how batches reach the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.datamodule import DataModule
from drivetrain.data.order import KeyedPermutation, SequentialOrder, order

if TYPE_CHECKING:
    from drivetrain.data.splitting import split_by_rank as split_by_rank

__all__ = ["CombinedLoader", "DataModule", "KeyedPermutation", "SequentialOrder", "order", "split_by_rank"]

__getattr__, _ = lazy_names(__name__, {"split_by_rank": ".splitting"})
''',
    "strategies/__init__.py": STRATEGIES_DOOR,
}
DOOR = "drivetrain.strategies"  # through which our own strategies come, like anybody's


def exported_homes(package: Path) -> set[str]:
    """The modules of a package whose names its ``__init__`` exports."""
    text = (package / "__init__.py").read_text()
    name = package.name
    inside = set(INTERNAL_NAMES.get(f"drivetrain.{name}", {}).values())
    return set(re.findall(rf"from drivetrain\.{name}\.(\w+) import", text)) - inside | {"__main__"}


def planned() -> dict[str, str]:
    """Every file that moves: old path to new, from the repository's root."""
    moves: dict[str, str] = {}
    for path in sorted(Path(FRAMEWORK).rglob("*.py")):
        old = path.relative_to(FRAMEWORK).with_suffix("").as_posix()
        folder, _, rest = old.partition("/")
        if old in PLACES:
            new = PLACES[old]
        elif folder in FOLDERS and rest:
            new = f"{FOLDERS[folder]}/{rest}"
        elif folder in PUBLIC_PACKAGES and rest.count("/") == 0 and rest not in ("", "__init__"):
            kept = rest.startswith("_") or rest in exported_homes(Path(FRAMEWORK, folder))
            new = old if kept else f"{folder}/_{rest}"
        else:
            continue
        moves[str(path)] = f"{FRAMEWORK}{new}.py"
    for path in sorted(Path(STRATEGIES).rglob("*.py")):
        old = path.relative_to(STRATEGIES).with_suffix("").as_posix()
        folder, _, name = old.rpartition("/")
        if old in PLACES_OF_STRATEGIES:
            new = PLACES_OF_STRATEGIES[old]
        elif name in ("__init__", "strategy", "single_device"):
            continue
        else:
            new = STRATEGIES + (f"{folder}/_{name}" if folder else f"_{name}")
        moves[str(path)] = f"{new}.py"
    return {old: new for old, new in moves.items() if old != new}


def dotted(path: str) -> str:
    parts = Path(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Rewriter:
    """Writes a text as it is to be after the moves."""

    def __init__(self, moves: dict[str, str]) -> None:
        self.modules = {dotted(old): dotted(new) for old, new in moves.items()}
        for old, new in FOLDERS.items():
            self.modules[f"drivetrain.{old}"] = "drivetrain." + new.replace("/", ".")
        self.paths = dict(moves)
        names = sorted(self.modules, key=len, reverse=True)
        self._dotted = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, names)) + r")\b(?!\.py\b)")
        short: dict[str, str] = {}
        for old, new in moves.items():
            short[old] = new
            for root in ("framework/", "strategies/"):
                if old.startswith(root):
                    short[old.removeprefix(root)] = new.partition("/")[2]
                    inner, new_inner = old.split("/", 2)[2], new.split("/", 2)[2]
                    if "/" in inner and not inner.endswith("__init__.py"):
                        short[inner] = new_inner
        for old, new in FOLDERS.items():
            short[f"framework/drivetrain/{old}/"] = f"framework/drivetrain/{new}/"
            short[f"drivetrain/{old}/"] = f"drivetrain/{new}/"
        self._short = short
        self._path = re.compile(r"(?<![\w/])(" + "|".join(map(re.escape, sorted(short, key=len, reverse=True))) + r")")

    def text(self, text: str) -> str:
        """Dotted names and paths, wherever they stand."""
        text = self._dotted.sub(lambda found: self.modules[found[1]], text)
        return self._path.sub(lambda found: self._short[found[1]], text)

    def python(self, text: str, path: str) -> str:
        """A file of Python: its imports first, then the rest of its text."""
        lines = text.splitlines(keepends=True)
        tree = ast.parse(text)
        of_strategies = self.paths.get(path, path).startswith(STRATEGIES)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        for node in sorted(found, key=lambda node: -node.lineno):
            assert node.module is not None
            assert node.end_lineno is not None
            if node.module.partition(".")[0] not in ("drivetrain", "drivetrain_strategies"):
                continue
            written = self._import(node, of_strategies)
            if written is not None:
                indent = " " * node.col_offset
                tail = lines[node.end_lineno - 1][node.end_col_offset :]
                body = f"\n{indent}".join(written)
                lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{body}{tail}"]
        text = "".join(lines)
        if path.endswith("__init__.py"):
            for name in INTERNAL_NAMES.get(dotted(path), {}):
                text = re.sub(rf"^ .*\b{name}\b.*\n", "", text, flags=re.MULTILINE).replace(f', "{name}"', "")
            text = self._homes(text, dotted(path))
        return self.text(text)

    def _import(self, node: ast.ImportFrom, of_strategies: bool) -> list[str] | None:
        """The statements in place of one that names a module that moved; None where the text alone will do."""
        by_home: dict[str, list[str]] = {}
        changed = False
        for alias in node.names:
            name, home = alias.name, self.modules.get(str(node.module), str(node.module))
            inside = INTERNAL_NAMES.get(str(node.module), {}).get(name)
            if inside is not None:
                old_home = inside if "." in inside else f"{node.module}.{inside}"
                home = self.modules.get(old_home, old_home)
            moved = self.modules.get(f"{node.module}.{name}")
            said = alias.asname
            if moved is not None:
                home, _, name = moved.rpartition(".")
                said = said or (alias.name if name != alias.name else None)
            if of_strategies and home.startswith("drivetrain.") and self._is_inside(home):
                home = DOOR
            changed |= moved is not None or inside is not None or home == DOOR
            by_home.setdefault(home, []).append(name if said is None else f"{name} as {said}")
        if not changed:
            return None
        return [f"from {home} import {', '.join(names)}" for home, names in by_home.items()]

    @staticmethod
    def _is_inside(home: str) -> bool:
        parts = home.split(".")
        return any(part.startswith("_") for part in parts) or parts[1] in ("strategies", "module")

    def _homes(self, text: str, package: str) -> str:
        """The table of homes of names that are imported on first use."""

        def home(found: re.Match[str]) -> str:
            new = self.modules.get(f"{package}.{found[1]}")
            return found[0] if new is None else f'"{new.removeprefix(package)}"'

        return re.sub(r'"\.(\w+)"', home, text)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    kept = (".py", ".md", ".toml", ".yml", ".svg", "Makefile", ".ci/run")
    return [
        path
        for path in listed
        if path.endswith(kept) and path != "CHANGELOG.md" and not path.endswith(Path(__file__).name)
    ]


def move() -> None:
    moves = planned()
    rewriter = Rewriter(moves)
    texts = {}
    for path in tracked():
        text = Path(path).read_text()
        texts[path] = rewriter.python(text, path) if path.endswith(".py") else rewriter.text(text)
    for old, new in moves.items():
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], check=True)
    for path, text in texts.items():
        Path(moves.get(path, path)).write_text(text)
    for path, text in NEW_PACKAGES.items():
        Path(FRAMEWORK, path).write_text(text)
    subprocess.run(["git", "add", "-A", FRAMEWORK, STRATEGIES], check=True)


# The check


def normal(text: str, rewrite: Callable[[str], str]) -> tuple[list[str], str]:
    """A file's imports, in order of the alphabet, and the rest of its syntax tree."""
    tree = ast.parse(text)
    imported: list[str] = []

    class Strip(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            imported.extend(sorted(alias.asname or alias.name for alias in node.names))

        def visit_Import(self, node: ast.Import) -> None:
            imported.extend(sorted(alias.asname or alias.name for alias in node.names))

        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            if isinstance(node.value, str):
                node.value = " ".join(rewrite(node.value).split())
            return node

    return sorted(imported), ast.dump(Strip().visit(tree))


def check(before: str) -> int:
    """Compare the working tree with ``before`` moved: equal but for names, or a list of the files that are not."""
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", before], capture_output=True, text=True, check=True)
    differing = 0
    moves = {
        line.split("\t")[1]: line.split("\t")[2]
        for line in subprocess.run(
            ["git", "diff", "--name-status", "-M30", "--diff-filter=R", before, "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    }
    rewriter = Rewriter({old: new for old, new in moves.items() if old.endswith(".py")})
    for old in listed.stdout.split():
        if not old.endswith(".py") or old.startswith("docs/"):
            continue
        text = subprocess.run(["git", "show", f"{before}:{old}"], capture_output=True, text=True, check=True).stdout
        new = Path(moves.get(old, old))
        same = normal(rewriter.python(text, old), str) == normal(new.read_text(), str) if new.exists() else False
        if not same:
            differing += 1
            print(f"differs: {old} -> {new}")
    print(f"{differing} files differ in more than names")
    return 1 if differing else 0


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--check":
        sys.exit(check(sys.argv[2]))
    move()
