"""Rules for the source tree: layers, names, sizes, the cost of an import (H-02), and what is used of other packages."""

from __future__ import annotations

import ast
import graphlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist

import drivetrain.loggers
from drivetrain.precision.resolve import PrecisionName
from drivetrain.testing import requires_command, requires_package
from drivetrain_strategies.deepspeed._library import VERSIONS, import_library

ROOT = Path(__file__).parents[2]

# A unit (a package or a top-level module of drivetrain) may import itself and units in lower layers only.
LAYERS: list[set[str]] = [
    {"errors"},
    {"_config", "_runtime"},
    {"_storage"},
    {"_distributed"},
    {"environments", "precision"},
    {"_format", "_metrics", "_utilities_rank"},
    {"launchers"},
    {"_data", "_parameters", "_rank_zero", "_runs"},
    {"checkpoint"},
    {"loggers", "profilers"},
    {"_log_queue", "strategies"},
    {"_fit_arguments", "_run_state"},
    {"run_context"},  # what all units above may know about a run
    {"_module"},
    {"callback", "module"},
    {"data"},
    {"_loops"},
    {"callbacks"},
    {"_engine"},
    {"fit"},
    {"migrate", "testing", "tuner"},
]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LAYER_OF = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
EXPORTED_TO_STRATEGIES = {"strategies", "launchers", "loggers", "environments", "precision", "profilers", "errors"}

MAX_LINES = 600
LONGER = {  # path: the reason why it is a single unit
    "framework/drivetrain/run_context.py": "one class: all that hooks and users may read and call of a run"
}


@dataclass(frozen=True)
class Import:
    """An import of one of our modules, anywhere in a file."""

    importer: str
    imported: str
    line: int


def modules() -> dict[str, Path]:
    found = {}
    for root in (ROOT / "framework", ROOT / "strategies"):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(name: str, source: str) -> list[Import]:
    """Return the imports of our own modules in ``source``, also those within functions and for annotations."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from package import name` refers to the submodule if there is one, otherwise to the package.
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [submodule if submodule in MODULES else node.module for submodule in submodules]
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


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "drivetrain"


def layer_violations(imports: list[Import]) -> list[str]:
    """Return the imports of drivetrain's files that reach a higher layer, or another unit in the same layer."""
    found = []
    for each in imports:
        if not is_ours(each.importer) or each.importer == "drivetrain" or not is_ours(each.imported):
            continue
        if each.imported == "drivetrain":
            found.append(f"{each}: name the module it comes from")
            continue
        importer, imported = unit_of(each.importer), unit_of(each.imported)
        if importer != imported and LAYER_OF[imported] >= LAYER_OF[importer]:
            found.append(f"{each}: layer {LAYER_OF[imported]} from layer {LAYER_OF[importer]}")
    return found


def test_every_unit_has_a_documented_layer_and_imports_go_to_lower_ones() -> None:
    units = {unit_of(name) for name in MODULES if is_ours(name) and name != "drivetrain"}
    assert not units - LAYER_OF.keys(), "assign these a layer in LAYERS"
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert not [unit for unit in units if f"`{unit}`" not in page]
    assert not layer_violations(IMPORTS)
    assert not [str(each) for each in IMPORTS if is_ours(each.importer) and not is_ours(each.imported)]
    source = "def late():\n    import drivetrain.fit\n    from drivetrain.callbacks import timer"
    assert len(layer_violations(imports_of("drivetrain._loops.train", source))) == 2
    annotated = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from drivetrain.fit import Fit\n"
    assert len(layer_violations(imports_of("drivetrain.callback", annotated))) == 1


def unexported_imports(imports: list[Import]) -> list[str]:
    """Return what our strategies import from elsewhere than the packages that drivetrain exports to strategies."""
    exported = {f"drivetrain.{package}" for package in EXPORTED_TO_STRATEGIES}
    ours = [each for each in imports if not is_ours(each.importer) and is_ours(each.imported)]
    return [each.imported for each in ours if each.imported not in exported]


def test_our_strategies_import_public_packages_only() -> None:  # K-01
    assert not unexported_imports(IMPORTS)
    private = ["drivetrain.strategies.strategy", "drivetrain._distributed.control_plane", "drivetrain"]
    source = "\n".join(f"from {module} import one" for module in ("drivetrain.strategies", *private))
    assert unexported_imports(imports_of("drivetrain_strategies.one", source)) == private


def is_private(name: str) -> bool:
    return any(part.startswith("_") and part != "__main__" for part in name.split("."))


CODE_LINES = 33_350
"""The most lines of code that both packages may have: lines with a token that is neither a comment nor a docstring."""


def lines_of_code(path: Path) -> int:
    source = path.read_text()
    bodies = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED) and node.body]
    texts = [body[0] for body in bodies if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)]
    docstrings = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(StringIO(source).readline) if token.type not in silent]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def test_the_product_keeps_to_its_number_of_lines_of_code(tmp_path: Path) -> None:  # K-07
    (tmp_path / "one.py").write_text('"""Text.\n\nMore."""\n\nX = (  # why\n    1,\n)\n\n\ndef f():\n    """Text."""\n')
    assert lines_of_code(tmp_path / "one.py") == 4
    assert sum(map(lines_of_code, MODULES.values())) <= CODE_LINES


def room_of(name: str) -> str:
    """``drivetrain._engine.ranks.run_entry_point`` is in the room ``drivetrain._engine``."""
    return ".".join(name.split(".")[:2])


def imports_of_private_modules_and_names(name: str, source: str) -> list[str]:
    """Return what ``source`` imports of the inside of other rooms: modules and names with an underscore."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        for target in targets:
            room, inside = room_of(target), target.split(".")[2:]
            if target.startswith("drivetrain") and room != room_of(name) and any(map(is_private, inside)):
                found.append(target)
    return found


def test_no_module_imports_the_inside_of_another_room() -> None:  # K-06
    for name, path in MODULES.items():
        assert not imports_of_private_modules_and_names(name, path.read_text()), name
    source = "from drivetrain.loggers._directory_logger import one\nfrom drivetrain._runs.record import _two\n"
    inside = ["drivetrain.loggers._directory_logger.one", "drivetrain._runs.record._two"]
    assert imports_of_private_modules_and_names("drivetrain._engine.session", source) == inside


def test_a_module_without_underscore_is_exported_or_used_by_another_room() -> None:
    public = {name: path.name for name, path in MODULES.items() if not is_private(name)}
    exported = {(each.importer, each.imported) for each in IMPORTS}
    used = {each.imported for each in IMPORTS if room_of(each.importer) != room_of(each.imported)}
    modules = [name for name, file in public.items() if file not in ("__init__.py", "__main__.py")]
    assert not [name for name in modules if (name.rpartition(".")[0], name) not in exported and name not in used]
    documented = """
        drivetrain drivetrain.callbacks drivetrain.checkpoint drivetrain.data drivetrain.environments
        drivetrain.launchers drivetrain.loggers drivetrain.migrate drivetrain.module drivetrain.precision
        drivetrain.profilers drivetrain.strategies drivetrain.testing drivetrain.tuner
        drivetrain_strategies drivetrain_strategies.ddp drivetrain_strategies.deepspeed drivetrain_strategies.fsdp
    """
    assert {name for name, file in public.items() if file == "__init__.py"} == {*documented.split()}


# Modules with the same role in several strategies' packages may share a name.
SAME_ROLE = {"strategy", "aliases", "checks", "precision", "internals", "state", "user_code"}


def test_base_names_are_unique() -> None:
    packages_of: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        package, _, base = name.rpartition(".")
        if path.name not in ("__init__.py", "__main__.py"):
            packages_of.setdefault(base.lstrip("_"), []).append(package)
    for name in SAME_ROLE:  # siblings, and the interface that they implement
        roots = {package.rpartition(".")[0] for package in packages_of.pop(name)}
        assert roots <= {"drivetrain_strategies", "drivetrain", ""}, name
    assert not {name: packages for name, packages in packages_of.items() if len(packages) > 1}


def import_graph(imports: list[Import]) -> dict[str, set[str]]:
    """Return what each module imports, with the packages whose ``__init__`` that runs."""
    graph: dict[str, set[str]] = {}
    for each in imports:
        parts = each.imported.split(".")
        parents = [".".join(parts[:length]) for length in range(1, len(parts))]
        entered = {parent for parent in parents if not f"{each.importer}.".startswith(f"{parent}.")}
        graph.setdefault(each.importer, set()).update({each.imported}, entered)
    return graph


def test_no_import_cycles() -> None:
    graphlib.TopologicalSorter(import_graph(IMPORTS)).prepare()
    ring = [Import("drivetrain.a", "drivetrain.b", 1), Import("drivetrain.b", "drivetrain.a", 1)]
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(ring)).prepare()


def test_files_are_small_and_packages_marked_as_typed() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    long = {path for path, length in lengths.items() if length > MAX_LINES}
    assert long == LONGER.keys(), f"over {MAX_LINES} lines: split it, or give the reason in LONGER"
    packages = [path.parent for name, path in MODULES.items() if "." not in name]
    assert [(package / "py.typed").exists() for package in packages] == [True, True]


PICKLES = {  # modules that unpickle, and what
    "drivetrain._distributed.failure": "an error, through a pipe to a process of this one",
    "drivetrain._distributed.flight_recorder": "of this very process",
    "drivetrain._loops.outputs": "a user's own objects, between ranks of one job",
    "drivetrain._distributed.child_processes": "only pickles, what a function returned",
    "drivetrain.launchers.function_launcher": "through pipes to processes of this one",
    "drivetrain.launchers.ray_launcher": "the caller's function and what a worker returned, brought by Ray",
    "drivetrain.testing._rank_process": "through pipes to processes of this one",
    "drivetrain.testing.run_distributed": "through pipes to processes of this one",
}
UNPICKLING = {"gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}


def unpickles(source: str) -> set[str]:
    """Ways in which ``source`` may unpickle: the module, and torch's collectives of objects."""
    nodes = list(ast.walk(ast.parse(source)))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return modules & {"pickle"} | {node.attr for node in nodes if isinstance(node, ast.Attribute)} & UNPICKLING


def test_only_listed_modules_unpickle() -> None:  # J-06
    found = {name: unpickles(path.read_text()) for name, path in MODULES.items()}
    assert {name: ways for name, ways in found.items() if ways} == {name: {"pickle"} for name in PICKLES}
    source = "import torch.distributed as dist\ndist.all_gather_object(a, b)\nfrom pickle import loads"
    assert unpickles(source) == {"all_gather_object", "pickle"}


OF_STORAGE = {"os.replace", "os.rename", "os.renames", "os.fsync", "fcntl", "fsspec"}


def storage_calls(source: str) -> set[str]:
    """Return what ``source`` does to files that only `_storage` may do: rename, sync, lock, and open URLs."""
    nodes = list(ast.walk(ast.parse(source)))
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return OF_STORAGE & (used | {name.partition(".")[0] for name in imported})


def test_only_storage_renames_syncs_and_locks_files_and_opens_urls() -> None:  # K-06
    users = {name for name, path in MODULES.items() if storage_calls(path.read_text())}
    assert {unit_of(name) for name in users} - {"testing"} == {"_storage"}, users
    source = "import os, fsspec.core\nfrom fcntl import flock\nos.replace(one, other)"
    assert storage_calls(source) == {"os.replace", "fcntl", "fsspec"}


ENGINE = {"_engine", "_loops", "fit"}
NAMES = {"single_device", "ddp", "fsdp", "hsdp", "deepspeed", *get_args(PrecisionName)} - {16, 32, 64}
ALLOWED = {
    # The user's own callback replaces the default one.
    "drivetrain._engine.assembly.defaults": {"ModelSummary"},
}
CONCRETE_PACKAGES = ("callbacks", "loggers", "launchers", "environments", "precision", "profilers")
INTERFACES = {
    *("Callback", "Logger", "Launcher", "LaunchedProcesses", "Strategy", "Environment", "Precision", "Profiler"),
    "ProfiledRun",
}


def concrete_references(name: str, source: str) -> set[str]:
    """Return names of strategies and precisions in ``source``, and our classes that it tests with isinstance."""
    tree = ast.parse(source)
    packages = (*(f"drivetrain.{package}" for package in CONCRETE_PACKAGES), "drivetrain_strategies")
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(packages):
            ours |= {alias.asname or alias.name for alias in node.names} - INTERFACES
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "hasattr"):
            found |= {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)} & ours
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            found.add(node.value)
    return found - ALLOWED.get(name, set())


def test_the_engine_refers_to_no_concrete_class_or_name() -> None:  # K-02
    engine = [name for name in MODULES if is_ours(name) and unit_of(f"{name}.") in ENGINE]
    assert {unit_of(name) for name in engine} == ENGINE
    found = {name: concrete_references(name, MODULES[name].read_text()) for name in engine}
    assert not {name: references for name, references in found.items() if references}, "use the interface"
    source = """
from drivetrain.callbacks import EarlyStopping
from drivetrain.environments import Environment, PlainEnvironment
if strategy.name in ("fsdp", "zero") or isinstance(one, EarlyStopping | int) or precision.name == "16-mixed": ...
assert isinstance(one, Environment) and isinstance(one, PlainEnvironment)
"""
    detected = concrete_references("drivetrain._engine.any", source)
    assert detected == {"fsdp", "EarlyStopping", "16-mixed", "PlainEnvironment"}


PRIVATE_IMPORTS = ROOT / "tests" / "private_imports.txt"
"""For each file of tests the private modules that it imports, and why; this file, run as a script, writes it anew."""


def private_imports() -> dict[str, str]:
    """Return the private modules of the product that each file of the tests imports, by the file's path."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        imported = {each.imported for each in imports_of(name, path.read_text()) if is_private(each.imported)}
        if imported and not name.startswith("tests/emulated_cuda/"):
            found[name] = " ".join(sorted(imported))
    return found


def listed_private_imports() -> list[list[str]]:
    return [line.split(" | ") for line in PRIVATE_IMPORTS.read_text().splitlines()]


def test_private_modules_are_imported_by_the_listed_tests_only() -> None:
    listed = listed_private_imports()
    how = f"use a public name, or run `python {Path(__file__).relative_to(ROOT)}` and give the reason"
    assert private_imports() == {name: imported for name, imported, _ in listed}, how
    assert not [name for name, _, reason in listed if reason.strip("? ") == ""], "a reason is missing"


IMPORTS_OF_PACKAGES = """
import sys, time, torch

before, start = set(sys.modules), time.perf_counter()
import drivetrain
assert time.perf_counter() - start < 0.1
from drivetrain import Callback, DataModule, Fit, Strategy, TrainModule
loaded = set(sys.modules) - before
assert {name.partition(".")[0] for name in loaded} == {"drivetrain"}, loaded
assert len(loaded) <= 157  # about 0.25 ms each

import drivetrain.precision as precision
for name in (64, 32, "bf16", "16", "16-true"):
    precision.resolve_precision(name, torch.device("cpu"))
precision.MixedPrecision("16-mixed", "cuda")
assert not torch.cuda.is_initialized()
loaded = set(sys.modules) - before
others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"drivetrain", "torch"}
assert not others, others
assert not loaded & {"torch._dynamo", "torch.distributed.tensor"}

import drivetrain.testing
assert not {"pytest", "torch._dynamo"} & set(sys.modules)

import drivetrain.loggers, drivetrain.callbacks
lazy = {"fsspec", "tensorboard", "rich", "drivetrain.loggers.csv_logger", "drivetrain.callbacks.timer"}
assert not lazy & set(sys.modules), lazy & set(sys.modules)
assert "CSVLogger" in dir(drivetrain.loggers) and "Timer" in dir(drivetrain.callbacks)
from drivetrain.loggers import CSVLogger
from drivetrain.callbacks import RichProgressBar
assert not {"tensorboard", "rich"} & set(sys.modules)

from drivetrain.checkpoint import load
assert "drivetrain._format.checkpoint_reader" in sys.modules
tools = {f"drivetrain.checkpoint.{tool}" for tool in ("consolidation", "conversion", "inspection")}
assert not tools & set(sys.modules)

import numpy.random, torch.distributed.tensor  # torch's first step does, but for tests/interpreters
from torch.utils.data import DataLoader

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

net = Net()
net.layer(torch.ones(1, 1)).sum().backward()
net.configure_optimizers().step()
outputs = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
before = set(sys.modules)
Fit(max_epochs=1, **dict.fromkeys(outputs, False)).fit(net, DataLoader(torch.ones(4, 1)))
loaded = set(sys.modules) - before
assert {name.partition(".")[0] for name in loaded} == {"drivetrain", "drivetrain_strategies"}, loaded
assert len(loaded) <= 12, loaded
assert not {"torchmetrics", "rich", "fsspec", "tensorboard", "torch.distributed.elastic"} & set(sys.modules)
"""


def test_importing_a_package_loads_little_and_touches_no_device(tmp_path: Path) -> None:  # H-01, H-02
    command = [sys.executable, "-c", IMPORTS_OF_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower()


def test_every_public_name_exists_and_no_other() -> None:
    assert all(getattr(drivetrain, name) is not None for name in drivetrain.__all__)
    assert set(drivetrain.__all__) <= set(dir(drivetrain))
    for module, name in ((drivetrain, "Fitt"), (drivetrain.loggers, "CvsLogger")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(module, name)


PAGE = (ROOT / "docs" / "versions.md").read_text()
ROW = re.compile(r"^\| `(?P<owner>[\w.]+)` \| (?P<names>`.*?) \| .* \|$", re.MULTILINE)
STATED = [(row["owner"], row["names"]) for row in ROW.finditer(PAGE)]
ROWS = [pytest.param(*row, id=row[0], marks=requires_package(row[0].partition(".")[0])) for row in STATED]

# Public despite their underscore, and names that Python gives to every named tuple. ``_saved_self`` is a saved tensor
# of a graph node, which torch's notes on autograd document.
PUBLIC = {"_strip_protocol", "_exit", "_getframe", "_current_frames", "_fields", "_make", "_replace", "_saved_self"}
PARTS_OF_MODULES = {"_C", "_python_dispatch"}  # torch.utils._python_dispatch.name: the last part is the name


@pytest.mark.parametrize(("owner", "names"), ROWS)
def test_private_names_exist(owner: str, names: str) -> None:  # O-06
    if owner.endswith("NCCL") and not dist.is_nccl_available():
        pytest.skip("needs a build of torch with NCCL")
    if owner.startswith("deepspeed."):
        import_library()
    assert not _missing(owner, names)


def test_every_private_name_that_is_used_is_stated() -> None:  # O-06
    stated = {name for _, names in STATED for name in re.findall(r"`(\w+)`", names)}
    own = {name for path in MODULES.values() for name in _defined_in(path)}
    found = {name: where for path in MODULES.values() for name, where in _foreign_private_names(path)}
    assert {name: where for name, where in found.items() if name not in stated | own} == {}
    # Each table is read.
    assert len(STATED) == len(re.findall(r"^\| `[\w.]+` \| `", PAGE, re.MULTILINE)) > 50
    assert _missing("torch.nn.Module", "`_modules` `_modulos`") == ["_modulos"]
    assert _missing("torch.nn.Module", "`_modulos` or `_modules` `_parameters` `_modulos` or none") == []


@requires_command("make")
def test_the_lower_bounds_are_the_tested_ones() -> None:  # O-06
    project = (ROOT / "pyproject.toml").read_text()
    (floor,) = re.findall(r'"torch>=([\d.]+)"', project)
    command = ["make", "-n", "-B", ".venv-floor/.stamp"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f" torch=={floor}\n" in made.stdout
    assert f'"deepspeed{VERSIONS}"' in project


def _missing(owner: str, names: str) -> list[str]:
    """Return those of ``names`` that neither the owner has nor its class's or module's source assigns."""
    found = pkgutil.resolve_name(owner)
    joined = names.replace("` or `", "|").replace("` or none", "|none`")
    choices = [choice.split("|") for choice in re.findall(r"`([\w|]+)`", joined)]
    return [" or ".join(each) for each in choices if not any(name == "none" or _has(found, name) for name in each)]


def _has(owner: Any, name: str) -> bool:
    """Return whether it has the name, or the source of its module or of its bases' modules contains the name."""
    if inspect.ismodule(owner):
        modules = {owner.__name__}
    else:
        modules = {kind.__module__ for kind in getattr(owner, "__mro__", [owner])}
    files = [getattr(sys.modules.get(module), "__file__", None) or "" for module in modules]
    return hasattr(owner, name) or any(name in _names_in(Path(file)) for file in files if file.endswith(".py"))


@cache
def _names_in(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return used | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _foreign_private_names(path: Path) -> Iterator[tuple[str, str]]:
    """Return names with one leading underscore that the file uses, and that none of our files defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{os.path.relpath(path, ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("drivetrain"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        else:
            continue
        for name in names:
            if re.match(r"_[^_]", name) and name not in PUBLIC | PARTS_OF_MODULES:
                yield name, where


def _defined_in(path: Path) -> set[str]:
    own = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own


if __name__ == "__main__":
    reasons = {name: reason for name, _, reason in listed_private_imports()}
    lines = [f"{name} | {imported} | {reasons.get(name, '?')}\n" for name, imported in private_imports().items()]
    PRIVATE_IMPORTS.write_text("".join(lines))
