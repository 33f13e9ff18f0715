"""The page of the Python API, from the sources of ``stoker_engine.__all__`` and of what its methods return.

The sources are parsed and not imported, so the page does not depend on torch or on Python's version.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from markdown_text import code, prose, table

ENGINE = Path(__file__).resolve().parents[2] / "engine"
#: Classes of results, which scripts read and do not create.
RESULTS = {
    "stoker_engine.core.outputs": ("RequestOutput", "CompletionOutput", "BeamSearchOutput", "BeamSearchSequence"),
    "stoker_engine.core.logprobs": ("Logprob",),
    "stoker_engine.core.finish_reason": ("FinishReason",),
}

_HEAD = """# Python API

This page is generated from the docstrings of `stoker_engine` (`make generate`). Names and signatures are vLLM's, where
vLLM has them.

```python
from stoker_engine import LLM, SamplingParams

with LLM("demo://gemma-3-270m") as llm:
    [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=20))
    print(output.outputs[0].text)
```
"""
_RESULTS = """## Results

`PositionLogprobs` is `dict[int, Logprob]`: the candidates at one position by token id.
"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$", re.MULTILINE)


def page() -> str:
    """Return the page, in Markdown."""
    exported = _exported()
    aliases = {name: target for name, module in exported.items() if (target := _alias(module, name))}
    lines = [_HEAD]
    for name, module in exported.items():
        if name in aliases:
            continue
        lines += _class(module, name, names=[alias for alias, target in aliases.items() if target == name])
    lines += [_RESULTS]
    for module, names in RESULTS.items():
        for name in names:
            lines += _class(module, name, level=3, is_result=True)
    return "\n".join(lines).rstrip() + "\n"


def _exported() -> dict[str, str]:
    """Return the modules of the names in ``stoker_engine.__all__``, in its order."""
    tree = _module("stoker_engine")
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {name: modules[name] for name in names}


@cache
def _module(name: str) -> ast.Module:
    path = ENGINE / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _alias(module: str, name: str) -> str | None:
    """Return the name that a module assigns to `name`; None: it defines the class."""
    for node in _module(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value)
    return None


def _find(module: str, name: str) -> ast.ClassDef:
    return next(node for node in _module(module).body if isinstance(node, ast.ClassDef) and node.name == name)


def _class(
    module: str, name: str, *, level: int = 2, names: Sequence[str] = (), is_result: bool = False
) -> Iterator[str]:
    """Yield a class: its constructor, its text, its fields or arguments, and its public methods.

    Args:
        level: level of the heading.
        names: other names of the class.
        is_result: whether scripts only read its objects, so that defaults do not matter.
    """
    node = _find(module, name)
    text, sections = _sections(_docstring(module, node))
    yield from (f"{'#' * level} {name}", "")
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    constructor = next((each for each in methods if each.name == "__init__"), None)
    if constructor:
        yield from ("```python", f"{name}{_signature(constructor)}", "```", "")
    yield from text
    if names:
        yield from (f"Also named {', '.join(map(code, names))}.", "")
    yield from _fields(node, dict(sections.get("Attributes", ())), has_defaults=not is_result)
    yield from _rest(sections)
    for method in methods:
        if method.name.startswith("_") or (ast.get_docstring(method) or "See `").startswith("See `"):
            continue
        yield from (f"{'#' * (level + 1)} {name}.{method.name}", "")
        yield from _method(module, method)


def _docstring(module: str, node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring, in which numbers replace the names of the module's constants."""
    numbers = {
        ast.unparse(each.targets[0]): f"{each.value.value:,}"
        for each in _module(module).body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, int)
    }
    return re.sub(r"`(\w+)`", lambda found: numbers.get(found[1], found[0]), ast.get_docstring(node) or "")


def _fields(node: ast.ClassDef, documented: dict[str, str], *, has_defaults: bool) -> Iterator[str]:
    """Yield the table of a dataclass' fields, or of an enumeration's members."""
    if any("Enum" in ast.unparse(base) for base in node.bases):
        members = [each for each in node.body if isinstance(each, ast.Assign)]
        rows = [(code(ast.unparse(each.targets[0])), code(ast.unparse(each.value))) for each in members]
        yield from table(("member", "value"), rows)
        return
    rows = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            name, kind = each.target.id, code(ast.unparse(each.annotation))
            default = (code(_default(each.value)) if each.value else "required",) if has_defaults else ()
            rows.append((code(name), kind, *default, prose(_about(name, documented))))
    yield from table(("field", "type", *(("default",) if has_defaults else ()), "meaning"), rows)


def _default(value: ast.expr) -> str:
    text = ast.unparse(value)
    if found := re.fullmatch(r"field\(default_factory=(.+)\)", text):
        return f"{found[1]}()"
    return "()" if text == "NO_TOKENS" else text


def _about(name: str, documented: dict[str, str]) -> str:
    """Return the text of a field; a docstring may describe several together (``desired, ready: …``)."""
    return next((text for names, text in documented.items() if name in names.split(", ")), "")


def _method(module: str, method: ast.FunctionDef) -> Iterator[str]:
    text, sections = _sections(_docstring(module, method))
    if not any(ast.unparse(each) == "property" for each in method.decorator_list):
        yield from ("```python", f"{method.name}{_signature(method)}", "```", "")
    yield from text
    yield from _rest(sections)


def _signature(method: ast.FunctionDef) -> str:
    """Return the parameters without `self`, one a line if they are many, and the type of the result."""
    arguments = method.args
    words = [ast.unparse(each) for each in arguments.args]
    defaults = [None] * (len(words) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    parameters = [_parameter(word, default) for word, default in zip(words, defaults, strict=True)][1:]
    if arguments.vararg:
        parameters.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parameters.append("*")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(ast.unparse(argument), ast.unparse(value) if value else None))
    if arguments.kwarg:
        parameters.append(f"**{ast.unparse(arguments.kwarg)}")
    result = "" if method.name == "__init__" or method.returns is None else f" -> {ast.unparse(method.returns)}"
    line = f"({', '.join(parameters)}){result}"
    if len(line) <= 80:
        return line
    return "(\n" + "".join(f"    {each},\n" for each in parameters) + f"){result}"


def _parameter(word: str, default: str | None) -> str:
    return word if default is None else f"{word} = {default}" if ":" in word else f"{word}={default}"


def _sections(docstring: str) -> tuple[list[str], dict[str, list[tuple[str, str]]]]:
    """Split a docstring into the lines of its text, and its sections as pairs (names, text)."""
    head, *rest = _SECTION.split(docstring)
    paragraphs = [prose(paragraph) for paragraph in head.strip().split("\n\n") if paragraph.strip()]
    lines = [line for paragraph in paragraphs for line in (paragraph, "")]
    sections = {title: _items(body) for title, body in zip(rest[::2], rest[1::2], strict=True)}
    return lines, sections


def _items(body: str) -> list[tuple[str, str]]:
    """Return a section's entries (names, text). Deeper lines continue an entry; plain text has no names."""
    entries = re.split(r"\n {4}(?! )", body.rstrip())
    items = []
    for entry in entries[1:]:
        names, colon, text = entry.partition(": ")
        items.append((names, text) if colon and re.fullmatch(r"[*\w, ]+", names) else ("", entry))
    return items


def _rest(sections: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    """Yield arguments as a table, and results and errors as text."""
    arguments = sections.get("Args", [])
    yield from table(("argument", "meaning"), [(code(names), prose(text)) for names, text in arguments])
    if results := sections.get("Returns"):
        yield from (f"Returns: {prose(' '.join(': '.join(filter(None, item)) for item in results))}", "")
    for names, text in sections.get("Raises", ()):
        yield from (f"Raises {', '.join(code(name) for name in names.split(', '))}: {prose(text)}", "")
