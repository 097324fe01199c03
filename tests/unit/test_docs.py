"""The code in README.md and docs/ runs unchanged, and the links between the pages are valid."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

from warm_python import hints_in, run_program, run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
UNEXPORTED = {"drivetrain.data.sample_order", "drivetrain.run_context"}  # modules, not packages
STARTS_PROCESSES = re.compile(r"devices=[2-9]|launch")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def runnable(markdown: str) -> str:
    """Return the page's ``python`` blocks as one script with the page's line numbers; ``notest`` excludes a block.

    Blocks on one page share a namespace, and a traceback gives the line of the page.
    """
    script: list[str] = []
    closing = indent = ""
    running = False
    for line in markdown.splitlines():
        fence = FENCE.match(line)
        if closing:
            if fence and fence["fence"] == closing and not fence["info"].strip():
                closing, running = "", False
            script.append(line.removeprefix(indent) if running else "")
            continue
        if fence:
            words = fence["info"].replace("{", " ").replace("}", " ").replace(".", " ").split()
            closing, indent = fence["fence"], fence["indent"]
            running = bool(words) and words[0] in {"python", "py"} and "notest" not in words
        script.append("")
    return "\n".join(script)


def test_blocks_keep_their_line_numbers() -> None:
    skipped = "```{.python .notest}\nraise\n```\n```python notest\nraise\n```\n```bash\nls\n```\n"
    page = f"text\n```python\na = 1\n```\n{skipped}    ```python\n    b = a\n    ```\n"
    assert runnable(page).splitlines() == ["", "", "a = 1", *[""] * 11, "b = a"]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page.read_text()).strip()], ids=_name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    # A separate script, so that pages may start further processes of themselves, as a user's script does.
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text(runnable(page.read_text()))
    code, printed = (run_program if STARTS_PROCESSES.search(script.read_text()) else run_script)(
        script, folder=tmp_path
    )
    assert code == 0, f"{_name(page)} (line numbers are the page's)\n{printed[-6000:]}"
    if page.name in ("README.md", "quickstart.md"):
        assert hints_in(printed) == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs derive them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")).lower()
        found.add(re.sub(r" +", "-", re.sub(r"[^\w\- ]", "", text).strip()))
    return found


def without_blocks(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = [(link["target"] or "", link["anchor"] or "") for link in LINK.finditer(page.read_text())]
    local = [link for link in links if "://" not in link[0] and not link[0].startswith("mailto:")]
    targets = [(page.parent / target if target else page, anchor) for target, anchor in local]
    assert not [target for target, _ in targets if not target.exists()]
    assert not [(target, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)]


def test_an_anchor_is_derived_from_its_heading(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `run.json`\n\n```bash\n# no heading\n```\n\n## FSDP's knobs, [here](x.md)\n")
    assert anchors(page) == {"the-runjson", "fsdps-knobs-here"}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages if page not in navigation}


REFERENCE = re.findall(r"^::: (\S+)\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", ["", ".callbacks", ".environments", ".loggers", ".precision", ".testing"])
def test_the_reference_has_every_public_class_and_test_helper(package: str) -> None:
    module = importlib.import_module(f"drivetrain{package}")
    public = {name for name in module.__all__ if isinstance(getattr(module, name), type)}
    if package == ".testing":
        public = {name for name in module.__all__ if not name.startswith("requires_")} | {"marks"}
    assert not public - {name for _, name in REFERENCE}


def test_what_the_reference_names_is_exported() -> None:
    exported = {module: importlib.import_module(module).__all__ for module, _ in REFERENCE if module not in UNEXPORTED}
    missing = [f"{module}.{name}" for module, name in REFERENCE if name not in exported.get(module, [name])]
    assert missing == ["drivetrain.testing.marks"]  # a module
    assert all(hasattr(importlib.import_module(module), name) for module in exported for name in exported[module])


@pytest.mark.parametrize("name", ["DDP", "FSDP", "DeepSpeed"])
def test_the_page_on_strategies_names_every_argument(name: str) -> None:
    page = (ROOT / "docs" / "strategies.md").read_text()
    section = page.partition(f"## {name}'s knobs")[2].partition("\n## ")[0]
    strategy = getattr(importlib.import_module("drivetrain_strategies"), f"{name}Strategy")
    assert [one for one in inspect.signature(strategy).parameters if not re.search(rf"\b{one}\b", section)] == []


def test_every_id_of_a_behaviour_is_explained() -> None:
    explained = set(re.findall(r"^\| ([A-S]-\d\d) \|", (ROOT / "docs" / "behaviours.md").read_text(), re.MULTILINE))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert explained == set(re.findall(r"\b[A-S]-\d\d\b", tests))


def test_the_page_of_arguments_matches_the_docstrings() -> None:
    generator = ROOT / "docs" / "plain_reference.py"
    written = generator.with_name("at-a-glance.md").read_text()
    assert runpy.run_path(str(generator))["page"]() == written, "run `make reference`"
