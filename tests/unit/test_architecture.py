"""Rules for the source tree: import layers, names, file sizes and the cost of an import (H-02)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

import drivetrain
from drivetrain.precision.resolve import PrecisionName

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = [ROOT / "framework", ROOT / "strategies"]

# A unit (a package or a top-level module of drivetrain) may import itself and units in lower layers only.
LAYERS: list[set[str]] = [
    {"errors"},
    {"_config", "_runtime"},
    {"_distributed", "environments", "precision"},
    {"_metrics", "checkpoint", "launchers"},
    {"runs"},
    {"loggers", "profilers"},
    {"strategies"},
    {"run_context"},  # what all units above may know about a run
    {"callback", "module"},
    {"data"},
    {"_loops"},
    {"callbacks"},
    {"_engine"},
    {"fit"},
    {"cli", "migrate", "testing", "tuner"},
]
LAYER_OF = {unit: number for number, floor in enumerate(LAYERS) for unit in floor}
UNKNOWN = len(LAYERS)  # a unit without a layer, which a separate test reports
PUBLIC_PACKAGES = {"strategies", "launchers", "loggers", "environments", "precision", "profilers", "errors"}

MAX_LINES = 600
LONGER = {  # path: the reason why it is a single unit
    "framework/drivetrain/run_context.py": "one interface: all that hooks and users may read and call of a run",
}

HEAVY = [
    "torchmetrics",
    "transformers",
    "tensorboard",
    "deepspeed",
    "rich",
    "matplotlib",
    "torch._dynamo",
    "onnx",
    "onnxruntime",
    "wandb",
    "mlflow",
]


@dataclass(frozen=True)
class Import:
    """An import of one of our modules, anywhere in a file."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> dict[str, Path]:
    """Return every module of both source roots by its dotted name."""
    found = {}
    for root in SOURCE_ROOTS:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(name: str, source: str) -> list[Import]:
    """Return the imports of our own modules in ``source``, the text of module ``name``.

    Imports within functions and imports for annotations count as well.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from package import name` refers to the submodule if there is one, otherwise to the package.
            targets = [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in MODULES else node.module
                for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        for target in dict.fromkeys(targets):
            if target.partition(".")[0] in {"drivetrain", "drivetrain_strategies"}:
                found.append(Import(name, target, node.lineno))  # type: ignore[attr-defined]
    return found


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, path.read_text())]


def unit_of(name: str) -> str:
    """``drivetrain._loops.train`` is in the unit ``loops``."""
    return name.split(".")[1]


def layer_of(name: str) -> int:
    return LAYER_OF.get(unit_of(name), UNKNOWN)


def is_ours(name: str) -> bool:
    return name == "drivetrain" or name.startswith("drivetrain.")


def layer_violations(imports: list[Import]) -> list[str]:
    """Return the imports of drivetrain's files that reach a higher layer, or another unit in the same layer."""
    found = []
    for each in imports:
        if not is_ours(each.importer) or each.importer == "drivetrain":
            continue
        if each.imported == "drivetrain":
            found.append(f"{each}: name the module it comes from")
        elif is_ours(each.imported):
            importer, imported = unit_of(each.importer), unit_of(each.imported)
            if importer != imported and layer_of(each.imported) >= layer_of(each.importer):
                found.append(f"{each}: layer {layer_of(each.imported)} from layer {layer_of(each.importer)}")
    return found


def test_every_unit_has_a_layer() -> None:
    units = {unit_of(name) for name in MODULES if is_ours(name) and name != "drivetrain"}
    assert not units - LAYER_OF.keys(), "assign these a layer in LAYERS"


def test_every_unit_is_on_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    units = {unit_of(name) for name in MODULES if is_ours(name) and name != "drivetrain"}
    assert not [unit for unit in units if f"`{unit}`" not in page]


def test_imports_go_to_lower_layers() -> None:
    assert not layer_violations(IMPORTS)


def test_an_import_of_a_higher_layer_is_detected() -> None:
    climbing = imports_of(
        "drivetrain._loops.train", "def late():\n    import drivetrain.fit\n    from drivetrain.callbacks import timer"
    )
    assert len(layer_violations(climbing)) == 2
    annotated = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from drivetrain.fit import Fit\n"
    assert len(layer_violations(imports_of("drivetrain.callback", annotated))) == 1


def test_drivetrain_never_imports_the_strategies() -> None:
    assert not [str(each) for each in IMPORTS if is_ours(each.importer) and not is_ours(each.imported)]


def imports_of_private_modules(imports: list[Import]) -> list[str]:
    """Return the imports by which our strategies use something that is private to drivetrain."""
    return [
        f"{each}: import it from a package of {sorted(PUBLIC_PACKAGES)}, which exports it"
        for each in imports
        if not is_ours(each.importer)
        and is_ours(each.imported)
        and each.imported not in {f"drivetrain.{package}" for package in PUBLIC_PACKAGES}
    ]


def test_our_strategies_import_public_packages_only() -> None:
    # K-01
    assert not imports_of_private_modules(IMPORTS)


def test_a_private_import_is_detected() -> None:
    source = """
from drivetrain.strategies import Strategy
from drivetrain.strategies.strategy import Strategy
from drivetrain._distributed import control_plane
from drivetrain import Fit
"""
    found = imports_of_private_modules(imports_of("drivetrain_strategies.one", source))
    assert [line.split()[2].rstrip(":") for line in found] == [
        "drivetrain.strategies.strategy",
        "drivetrain._distributed.control_plane",
        "drivetrain",
    ]


# Names: modules that users import have a plain name, all others begin with an underscore


def exports_of(package: str) -> set[str]:
    """Return the modules from which a package's ``__init__`` exports something."""
    tree = ast.parse(MODULES[package].read_text())
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__main__" for part in name.split("."))


def test_a_module_without_underscore_is_exported() -> None:
    unused = []
    for name in MODULES:
        package, _, own = name.rpartition(".")
        if is_private(name) or own == "__main__" or MODULES[name].name == "__init__.py":
            continue
        if name not in exports_of(package):
            unused.append(f"{name}: {package} exports nothing from it, so its name must begin with an underscore")
    assert not unused


def test_public_packages_are_the_documented_ones() -> None:
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py" and not is_private(name)}
    promised = {
        "callbacks",
        "checkpoint",
        "data",
        "environments",
        "launchers",
        "loggers",
        "module",
        "precision",
        "profilers",
        "runs",
    }
    ours = {f"drivetrain.{name}" for name in promised | {"migrate", "strategies", "testing", "tuner"}}
    theirs = {f"drivetrain_strategies{name}" for name in ("", ".ddp", ".deepspeed", ".fsdp")}
    assert packages == {"drivetrain", *ours, *theirs}


# Modules with the same role in several packages may share a name.
SAME_NAME: dict[str, str] = {
    "strategy": "the interface, and a strategy in a package of its own",
    "_aliases": "the names under which a package's strategies are registered",
    "_checks": "what a strategy refuses",
    "_optimizers": "what a strategy does to the user's optimizers",
    "_precision": "how a strategy carries a precision out",
    "_internals": "what a strategy uses of a library's insides",
    "_state": "a strategy's state by plain names",
    "_user_hooks": "what hooks of the user may do with a strategy's parameters",
}


def names_used_twice(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules that share a base name, by that name without leading underscores."""
    found: dict[str, list[str]] = {}
    for name in names:
        base = name.rpartition(".")[2]
        if base != "__main__":
            found.setdefault(base.lstrip("_"), []).append(name)
    return {base: sorted(modules) for base, modules in found.items() if len(modules) > 1}


def test_base_names_are_unique() -> None:
    files = [name for name, path in MODULES.items() if path.name != "__init__.py"]
    allowed = {name.lstrip("_") for name in SAME_NAME}
    twice = names_used_twice(files)
    for name in allowed & twice.keys():  # siblings, and the interface that they implement
        roots = {module.rpartition(".")[0].rpartition(".")[0] for module in twice.pop(name)}
        assert roots <= {"drivetrain_strategies", "drivetrain", ""}, name
    assert not twice


def test_a_repeated_base_name_is_detected() -> None:
    assert names_used_twice(["a.place", "b._place", "b.other"]) == {"place": ["a.place", "b._place"]}


# Import cycles


def _packages_entered(each: Import) -> list[str]:
    """The packages whose ``__init__`` runs for this import, but had not run for the importer."""
    parts = each.imported.split(".")
    parents = [".".join(parts[:length]) for length in range(1, len(parts))]
    return [parent for parent in parents if not f"{each.importer}.".startswith(f"{parent}.")]


def cycles(imports: list[Import]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or indirectly (Tarjan's strongly connected components).

    Imports for annotations count: modules that need each other's types cannot be read separately.
    """
    graph: dict[str, list[str]] = {}
    for each in imports:
        graph.setdefault(each.importer, []).extend([each.imported, *_packages_entered(each)])

    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in graph.get(name, []):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1 or name in graph.get(name, []):
                found.append(sorted(group))

    for name in list(graph):
        if name not in order:
            visit(name)
    return found


def test_no_import_cycles() -> None:
    assert not cycles(IMPORTS)


def test_a_cycle_is_detected() -> None:
    ring = [Import("drivetrain.a", "drivetrain.b", 1), Import("drivetrain.b", "drivetrain.c", 1)]
    assert cycles(ring) == []
    ring.append(Import("drivetrain.c", "drivetrain.a", 1))
    assert cycles(ring) == [["drivetrain.a", "drivetrain.b", "drivetrain.c"]]


def test_files_are_small() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    long = {path for path, length in lengths.items() if length > MAX_LINES}
    assert long == LONGER.keys(), f"over {MAX_LINES} lines: split it, or give the reason in LONGER"


def test_packages_are_marked_as_typed() -> None:
    packages = [path.parent for name, path in MODULES.items() if "." not in name]
    assert len(packages) == 2
    assert all((package / "py.typed").exists() for package in packages)


# J-06: data from outside is not unpickled

PICKLES = {
    "drivetrain._distributed.failure": "an error, through a file that only this user can write",
    "drivetrain._distributed.flight_recorder": "of this very process",
    "drivetrain._loops.outputs": "a user's own objects, between ranks of one job",
    "drivetrain.launchers._ray_worker": "the caller's function, brought by Ray",
    "drivetrain.launchers.function_launcher": "through pipes to processes of this one",
    "drivetrain.launchers.ray_launcher": "what a worker returned, brought by Ray",
    "drivetrain.testing._rank_process": "through pipes to processes of this one",
    "drivetrain.testing.run_distributed": "through pipes to processes of this one",
}
UNPICKLING = {"gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}


def unpickles(source: str) -> set[str]:
    """Ways in which ``source`` may unpickle: the module, and torch's collectives of objects."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & {"pickle"}
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            found.add("pickle")
        if isinstance(node, ast.Attribute) and node.attr in UNPICKLING:
            found.add(node.attr)
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name not in PICKLES])
def test_only_listed_modules_unpickle(name: str) -> None:
    assert not unpickles(MODULES[name].read_text())


def test_unpickling_is_detected() -> None:
    assert all(unpickles(MODULES[name].read_text()) == {"pickle"} for name in PICKLES)
    source = "import torch.distributed as dist\ndist.all_gather_object(a, b)\nfrom pickle import loads"
    assert unpickles(source) == {"all_gather_object", "pickle"}


# K-02: the engine uses interfaces, not concrete classes

ENGINE = {"_engine", "_loops", "fit"}
NAMES = {"single_device", "ddp", "fsdp", "hsdp", "deepspeed", *get_args(PrecisionName)} - {16, 32, 64}
ALLOWED_CLASSES = {
    "drivetrain._engine.defaults": {
        "ProgressBar",
        "ModelSummary",
        "Checkpoint",
    },  # the user's own callback replaces the default one
    # Fit.checkpoint_callback, early_stopping_callback and progress_bar_callback return instances of these.
    "drivetrain._engine.session_context": {"Checkpoint", "EarlyStopping", "ProgressBar"},
}
ALLOWED_NAMES = {
    "drivetrain._engine.session_context": {"ddp", "single_device"},  # what "auto" resolves to
    "drivetrain.fit": {"32-true"},  # the default
}
CONCRETE_PACKAGES = tuple(
    f"drivetrain{kind}"
    for kind in (".callbacks", ".loggers", ".launchers", ".environments", ".precision", ".profilers")
)
INTERFACES = {
    "Callback",
    "Logger",
    "Launcher",
    "Strategy",
    "Work",
    "World",
    "Environment",
    "Precision",
    "Profiler",
    "ProfiledRun",
}


def concrete_references(name: str, source: str) -> set[str]:
    """Return names of strategies and precisions in ``source``, and our classes that it tests with isinstance."""
    tree = ast.parse(source)
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith((*CONCRETE_PACKAGES, "drivetrain_strategies"))
        for alias in node.names
    } - INTERFACES
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "hasattr"):
            found |= {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)} & ours
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            found.add(node.value)
    return found - ALLOWED_CLASSES.get(name, set()) - ALLOWED_NAMES.get(name, set())


ENGINE_MODULES = [name for name in MODULES if is_ours(name) and unit_of(f"{name}.") in ENGINE]


def test_the_engine_is_covered() -> None:
    assert {unit_of(name) for name in ENGINE_MODULES} == ENGINE


@pytest.mark.parametrize("name", ENGINE_MODULES)
def test_the_engine_refers_to_no_concrete_class_or_name(name: str) -> None:
    assert not concrete_references(name, MODULES[name].read_text()), "use the interface"


def test_a_concrete_reference_is_detected() -> None:
    source = """
from drivetrain.callbacks import EarlyStopping
from drivetrain.environments import Environment, PlainEnvironment
if strategy.name in ("fsdp", "zero") or isinstance(one, EarlyStopping | int) or precision.name == "16-mixed": ...
assert isinstance(one, Environment) and isinstance(one, PlainEnvironment)
"""
    assert concrete_references("drivetrain._engine.any", source) == {
        "fsdp",
        "EarlyStopping",
        "16-mixed",
        "PlainEnvironment",
    }


# What an import costs


def imported_after(statement: str) -> tuple[list[str], float]:
    """Return the modules that ``statement`` imports after torch in a new interpreter, and the seconds it takes."""
    code = (
        "import json, sys, time, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        f"{statement}\n"
        "seconds = time.perf_counter() - start\n"
        "print(json.dumps([sorted(set(sys.modules) - before), seconds]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    names, seconds = json.loads(done.stdout)
    return names, seconds


def heavy(names: list[str]) -> list[str]:
    return [name for name in names if any(name == each or name.startswith(f"{each}.") for each in HEAVY)]


@pytest.mark.slow
def test_import_drivetrain_imports_nothing_heavy() -> None:
    # H-02
    names, seconds = imported_after("import drivetrain")
    assert not heavy(names)
    assert {name.partition(".")[0] for name in names} == {"drivetrain"}
    assert seconds < 0.1


@pytest.mark.slow
def test_public_classes_import_nothing_heavy() -> None:
    # H-02, for the imports of a typical script.
    names, _ = imported_after("from drivetrain import Callback, DataModule, Fit, Strategy, TrainModule")
    assert not heavy(names)
    # fsspec and the checkpoint writer are imported on first use.
    assert [name for name in names if not is_ours(name)] == []
    assert len(names) <= 157  # about 0.25 ms each


@pytest.mark.parametrize("name", drivetrain.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(drivetrain, name) is not None
    assert name in dir(drivetrain)


@pytest.mark.slow
def test_checkpoint_tools_are_imported_separately() -> None:
    # H-02
    names, _ = imported_after("from drivetrain.checkpoint import load")
    assert "drivetrain.checkpoint._format.checkpoint_reader" in names
    assert not {f"drivetrain.checkpoint.{tool}" for tool in ("consolidation", "conversion", "inspection")} & set(names)


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Fitt'"):
        drivetrain.Fitt  # noqa: B018
