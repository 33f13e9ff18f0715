"""Files, folders and headings named in the documentation exist. Planned files are written in italics there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "SUPPORT")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("images", "benchmarks", "charts/stoker")),
]

#: `folder/`, `folder/file.yaml` or `file.py`: code in text that can only be a path of this repository.
PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|yaml|json|cpp|h|sh|svg|toml))?|[\w-]+\.py)`")
#: A path that the architecture forbids.
FORBIDDEN = "operator/__init__.py"
#: A relative link: its path (empty for the page itself), and its anchor.
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)
)


@cache
def ends_of_paths() -> frozenset[str]:
    """Return all files and folders, and all suffixes of their paths; folders end with a slash."""
    found: set[str] = set()
    for top in (*ROOT.glob("*"), *ROOT.glob(".ci")):
        if top.name == "node_modules" or (top.name.startswith(".") and top.name != ".ci"):
            continue
        for path in (top, *(top.rglob("*") if top.is_dir() else ())):
            parts = path.relative_to(ROOT).parts
            slash = "/" if path.is_dir() else ""
            found.update("/".join(parts[start:]) + slash for start in range(len(parts)))
    return frozenset(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_named_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = {name for name in PATH.findall(text) if name.removeprefix("./") not in ends_of_paths()} - {FORBIDDEN}
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings: lower case, hyphens for spaces, no punctuation."""
    headings = HEADING.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    text = CODE.sub("", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))
    missing = []
    for link, anchor in LINK.findall(text):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


def test_links_are_found() -> None:
    """The patterns find links that a page has, and report missing ones."""
    assert LINK.findall("[a](b.md#c), [d](#e), [f](g/), [h](https://i)") == [("b.md", "c"), ("", "e"), ("g/", "")]
    assert "what-a-client-sees-when-" in anchors(ROOT / "docs" / "guides" / "gateway.md")


def test_index_of_docs_links_each_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link, _ in LINK.findall(index.read_text(encoding="utf-8"))}
    assert [page for page in DOCUMENTS if (ROOT / "docs") in page.parents and page not in {*linked, index}] == []


def test_operator_is_no_package() -> None:
    assert not (ROOT / FORBIDDEN).exists()


#: `folder/file.py: symbol`
SYMBOL_IN_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h)): (\w+)`")
#: `Class`, `Class.attribute`: names that only code has.
CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)(?:[.:]+(\w+))?`")
SOURCES = [
    path
    for folder in ("common", "engine", "operator", "gateway", "cli")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h")
]


@cache
def words_of_sources() -> frozenset[str]:
    """Return all identifiers of the programs."""
    return frozenset(word for path in SOURCES for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs" / "design").glob("*.md")), ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_symbols_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [
        f"{file}: {symbol}"
        for file, symbol in SYMBOL_IN_FILE.findall(text)
        if not any(
            path.as_posix().endswith(f"/{file}") and re.search(rf"\b{symbol}\b", path.read_text(encoding="utf-8"))
            for path in SOURCES
        )
    ]
    missing += [name for names in CLASS.findall(text) for name in names if name and name not in words_of_sources()]
    assert not missing


def test_names_in_design_pages_are_found() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "design").glob("*.md"))
    assert len(set(PATH.findall(text))) > 150
    assert len(set(SYMBOL_IN_FILE.findall(text))) >= 5
    assert len(set(CLASS.findall(text))) > 30
