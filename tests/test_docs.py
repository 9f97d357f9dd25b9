"""The documentation is right: its programs run, its links lead somewhere, its tables are the code's."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from test_layering import BELOW

import jax_ep

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"`(\w+)`")
# A time, a rate, a speed-up: what only a record can say.
SPEED = re.compile(r"\d (?:µs|us|ms|[GT]B/s|tokens/s|TFLOPS?)\b|\d ?(?:x|times|×) (?:faster|slower)")
RECORD = re.compile(r"\]\([^)\s]*benchmarks/results/[^)\s]+\.json\)")


class Block(NamedTuple):
    """A program in a page, and the line of the page that it begins on, counted from 1."""

    line: int
    source: str


def runnable(text: str) -> list[Block]:
    """The blocks fenced as python: all of them run. What is not to run is fenced as text or sh."""
    fences = (match for match in FENCE.finditer(text) if match[1] == "python")
    return [Block(text.count("\n", 0, match.start(2)) + 1, match[2]) for match in fences]


def run(name: str, text: str) -> subprocess.CompletedProcess[str]:
    """All programs of a page in one fresh interpreter, where they share their names."""
    script = ["names = {'__name__': '__main__'}"]
    for line, source in runnable(text):
        at_line = "\n" * (line - 1) + source  # so that a traceback names the line of the page
        script.append(f"print('running', {name!r}, {line}, flush=True)")
        script.append(f"exec(compile({at_line!r}, {name!r}, 'exec'), names)")
    # Not what conftest.py set for this process: a page has to be complete.
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
    return subprocess.run(
        [sys.executable, "-"],
        input="\n".join(script),
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def anchors(text: str) -> set[str]:
    """What a link may name after # in a page: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links in `text`, which is that of `page`, to a file or a heading that does not exist."""
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file
        if file and not path.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(path.read_text() if file else text):
            broken.append(target)
    return broken


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next of any level."""
    return text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]


def figures_without_record(text: str) -> list[str]:
    """Lines that state a speed in a section of a page that links no record."""
    sections = re.split(r"^#+ ", FENCE.sub("", text), flags=re.MULTILINE)
    return [line for part in sections if not RECORD.search(part) for line in part.splitlines() if SPEED.search(line)]


def first_column(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page.read_text())], ids=lambda p: p.name)
def test_programs_run(page: Path) -> None:
    done = run(page.name, page.read_text())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("running") == len(runnable(page.read_text()))


def test_pages_have_programs() -> None:
    with_programs = {page.name for page in PAGES if runnable(page.read_text())}
    assert with_programs >= {"README.md", "architecture.md", "moe-layer.md", "overlap.md", "semantics.md"}


def test_a_wrong_program_is_found() -> None:
    page = [
        "# A page",
        "```python",
        "x = 1",
        "```",
        "```text",
        "assert 0",
        "```",
        "```python",
        "",
        "assert x == 2",
        "```",
    ]
    done = run("page.md", "\n".join(page))
    assert done.returncode != 0
    assert 'File "page.md", line 10' in done.stderr
    assert "AssertionError" in done.stderr


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("target", ["nowhere.md", "README.md#no-such-heading", "#no-such-heading"])
def test_a_broken_link_is_found(target: str) -> None:
    text = f"## At 3 a.m.\n[a](README.md#api) [b](https://example.com/x) [c](#at-3-am) [d]({target})\n"
    assert broken_links(ROOT / "made_up.md", text) == [target]


def test_api_table_is_the_public_names() -> None:
    listed = NAME.findall(" ".join(first_column(section((ROOT / "README.md").read_text(), "## API"))))
    public = {
        name for name, value in vars(jax_ep).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert len(listed) == len(set(listed))
    assert set(listed) == public | {"__version__"}


def test_layers_table_is_the_one_enforced() -> None:
    table = section((ROOT / "docs" / "architecture.md").read_text(), "## Layers")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert {NAME.findall(row[1])[0]: tuple(NAME.findall(row[3])) for row in rows} == BELOW


@pytest.mark.parametrize(
    ("heading", "described"),
    [("## Options", jax_ep.MoEConfig), ("## Tokens and weights on the mesh", jax_ep.MoESharding)],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_every_option_of_the_layer_is_described(heading: str, described: type) -> None:
    table = section((ROOT / "docs" / "moe-layer.md").read_text(), heading)
    assert set(NAME.findall(" ".join(first_column(table)))) == {field.name for field in dataclasses.fields(described)}


def test_every_statistic_is_described() -> None:
    table = section((ROOT / "docs" / "moe-layer.md").read_text(), "## Losses and statistics")
    public = {name for name in dir(jax_ep.MoEStats) if not name.startswith("_")}
    public |= {field.name for field in dataclasses.fields(jax_ep.MoEStats)}
    assert set(NAME.findall(" ".join(first_column(table)))) == public


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_no_figure_without_its_record(page: Path) -> None:
    assert figures_without_record(page.read_text()) == []


def test_a_figure_without_a_record_is_found() -> None:
    record = "[record](../benchmarks/results/layout-cpu2-20260101T000000Z.json)"
    page = f"# A\nIt takes 12.5 us.\n# B\n{record}: 3 ms, 4 GB/s\n# C\n2 minutes, 1.5× the rows, 2 times faster"
    assert figures_without_record(page) == ["It takes 12.5 us.", "2 minutes, 1.5× the rows, 2 times faster"]
