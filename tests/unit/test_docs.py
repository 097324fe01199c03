"""The code in README.md and docs/ runs unchanged, and the links between the pages are valid."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import drivetrain.testing
from drivetrain.strategies import DistributedStrategy, Strategy
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from warm_python import hints_in, run_program, run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)(?P=fence) *$", re.MULTILINE
)
UNEXPORTED = {"drivetrain.callback"}  # a module, not a package
STARTS_PROCESSES = re.compile(r"devices=[2-9]|launch")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def runnable(markdown: str) -> str:
    """Return the page's ``python`` blocks, except ``notest`` ones, as one script with the page's line numbers."""
    script, end = "", 0
    for block in BLOCK.finditer(markdown):
        words = re.findall(r"\w+", block["info"])
        if words[:1] in (["python"], ["py"]) and "notest" not in words:
            script += "\n" * markdown.count("\n", end, block.start("code"))
            script += re.sub(f"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
            end = block.end("code")
    return script


def test_blocks_keep_their_line_numbers_and_headings_become_anchors(tmp_path: Path) -> None:
    skipped = "```{.python .notest}\nraise\n```\n```python notest\nraise\n```\n```bash\nls\n```\n"
    page = f"text\n```python\na = 1\n```\n{skipped}    ```python\n    b = a\n    ```\n"
    assert runnable(page).splitlines() == ["", "", "a = 1", *[""] * 11, "b = a"]
    path = tmp_path / "page.md"
    path.write_text("# The `run.json`\n\n```bash\n# no heading\n```\n\n## FSDP's knobs, [here](x.md)\n")
    assert anchors(path) == {"the-runjson", "fsdps-knobs-here"}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page.read_text()).strip()], ids=_name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    # A separate script, so that pages may start further processes of themselves, as a user's script does.
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text(runnable(page.read_text()))
    run = run_program if STARTS_PROCESSES.search(script.read_text()) else run_script
    code, printed = run(script, folder=tmp_path)
    assert code == 0, f"{_name(page)} (line numbers are the page's)\n{printed[-6000:]}"
    if page.name in ("README.md", "quickstart.md"):
        assert hints_in(printed) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs derive them."""
    found = set()
    without_blocks = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", without_blocks, re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")).lower()
        found.add(re.sub(r" +", "-", re.sub(r"[^\w\- ]", "", text).strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_is_in_the_navigation_and_its_links_lead_to_files_and_headings(page: Path) -> None:
    links = [(link["target"] or "", link["anchor"] or "") for link in LINK.finditer(page.read_text())]
    local = [link for link in links if "://" not in link[0] and not link[0].startswith("mailto:")]
    targets = [(page.parent / target if target else page, anchor) for target, anchor in local]
    assert not [target for target, _ in targets if not target.exists()]
    assert not [(target, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)]
    if page.parent != ROOT:
        assert page.relative_to(ROOT / "docs").as_posix() in (ROOT / "mkdocs.yml").read_text(), "not in the navigation"


def test_the_pages_name_only_files_of_the_packages_that_exist() -> None:
    roots = [ROOT / "framework" / "drivetrain", ROOT / "strategies" / "drivetrain_strategies"]
    packages = {path.name for root in roots for path in root.iterdir() if path.is_dir()}
    named = re.compile(r"`((?:framework|strategies)/drivetrain\w*/)?([\w/]+\.py)`")
    missing = [
        f"{page.name}: {path}"
        for page in (ROOT / "docs").glob("*.md")
        for prefix, path in named.findall(page.read_text())
        if prefix or path.startswith("_") or path.partition("/")[0] in packages
        if not any((root / path).exists() for root in roots)
    ]
    assert not missing


REFERENCE = re.findall(r"^::: (\S+)\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)


def test_the_reference_has_every_public_class_and_test_helper_and_only_exported_names() -> None:
    public = {"marks", *(name for name in drivetrain.testing.__all__ if not name.startswith("requires_"))}
    for package in ("", ".callbacks", ".environments", ".loggers", ".precision"):
        module = importlib.import_module(f"drivetrain{package}")
        public |= {name for name in module.__all__ if isinstance(getattr(module, name), type)}
    assert not public - {name for _, name in REFERENCE}
    exported = {module: importlib.import_module(module).__all__ for module, _ in REFERENCE if module not in UNEXPORTED}
    missing = [f"{module}.{name}" for module, name in REFERENCE if name not in exported.get(module, [name])]
    assert missing == ["drivetrain.testing.marks"]  # a module
    assert all(hasattr(importlib.import_module(module), name) for module in exported for name in exported[module])


def test_the_page_on_strategies_names_every_argument() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text()
    for strategy in (DDPStrategy, FSDPStrategy, DeepSpeedStrategy):
        section = page.partition(f"## {strategy.__name__.removesuffix('Strategy')}'s knobs")[2].partition("\n## ")[0]
        assert [one for one in inspect.signature(strategy).parameters if not re.search(rf"\b{one}\b", section)] == []


def test_every_public_method_is_in_the_row_of_what_is_required_may_be_overridden_or_is_final() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    table = re.findall(r"^\| ([^|`]+) \| (.*) \|$", page, re.MULTILINE)
    rows = {heading: re.findall(r"`(\w+)`", row) for heading, row in table}

    def members(attributes: Mapping[str, Any], final: bool) -> list[str]:
        """Return the public methods and properties that are final, or are not, in the order of the file."""
        public = {name: value for name, value in attributes.items() if not name.startswith("_")}
        functions = {name: getattr(value, "fget", value) for name, value in public.items()}
        return [name for name, one in functions.items() if callable(one) and hasattr(one, "__final__") is final]

    assert rows["Must be defined"] == sorted(Strategy.__abstractmethods__)
    assert Strategy.__abstractmethods__ == DistributedStrategy.__abstractmethods__
    everything = {name: getattr(Strategy, name) for name in dir(Strategy)}
    final, others = members(everything, final=True), members(everything, final=False)
    assert sorted(rows["Provided, final"]) == final
    used = ["Must be defined", "Provided, final", *(row for row in rows if row.startswith("May be overridden"))]
    assert sorted(name for row in used for name in rows[row]) == sorted(final + others)


def test_every_id_of_a_behaviour_is_explained() -> None:
    explained = set(re.findall(r"^\| ([A-S]-\d\d) \|", (ROOT / "docs" / "behaviours.md").read_text(), re.MULTILINE))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert explained == set(re.findall(r"\b[A-S]-\d\d\b", tests))


def test_the_page_of_arguments_matches_the_docstrings() -> None:
    generator = ROOT / "docs" / "plain_reference.py"
    written = generator.with_name("at-a-glance.md").read_text()
    assert runpy.run_path(str(generator))["page"]() == written, "run `make reference`"
