"""Finds tests that can fail under load: assertions with an upper bound on a clock, sleeps, and short limits.

Usage: ``python tests/lint_clocks.py [FILE OR FOLDER ...]`` (default: tests and e2e); exit code 1 if anything was found.

- Assertions are about what happened, not how soon: they must not require a clock, or a value computed from one, to be
  less than or equal to something. Lower bounds, order and virtual time (tests/support/virtual_time.py) are allowed.
- A test waits for a condition (tests/support/waiting.py, e2e/kit/waiting.py), never for a time. ``asyncio.sleep(0)``
  only lets others run. A sleep that *is* the behaviour under test, such as a slow server's, has a comment on its line:
  ``# sleeps: REASON``.
- A limit only ends a hanging test, so it must be at least a minute. This applies to ``asyncio.timeout`` and
  ``wait_for``, to ``join``, ``result`` and ``wait``, and to all arguments called ``timeout``. A limit that may expire,
  or is itself tested, has a comment on its line: ``# limit: REASON``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Modules that implement waiting, where sleeps are allowed.
HELPERS = tuple(
    ROOT / path for path in ("tests/support/waiting.py", "tests/support/virtual_time.py", "e2e/kit/waiting.py")
)

_CLOCKS = frozenset({"time", "monotonic", "perf_counter", "process_time", "thread_time"})
_CLOCKS |= {f"{name}_ns" for name in _CLOCKS}
#: Objects whose `time` method is a clock: `time.time()`, `loop.time()`, `asyncio.get_running_loop().time()`.
_OWNERS = re.compile(r"(^|\.)(time|\w*loop)$|_loop\(\)$")
#: Functions whose result is a clock's reading if an argument is one.
_COMPUTE = frozenset({"max", "min", "sum", "sorted", "round", "abs", "float", "int", "mean", "median", "quantiles"})
_NAMES = re.compile(r"(^|_)(elapsed|took)(_|$)")
_SLEEPS = re.compile(r"^(time|asyncio|anyio|trio)\.sleep$")
_MARKER = re.compile(r"#.*\bsleeps: \S")
#: Shortest allowed limit in seconds; a busy machine exceeds shorter ones.
_SHORT_S = 60
#: Functions and methods, and the positional index of their limit in seconds.
_LIMITS = {
    "asyncio.timeout": 0, "asyncio.wait_for": 1, ".join": 0, ".result": 0, ".wait": 0, ".settimeout": 0,
    ".create_connection": 1,
}  # fmt: skip
_LIMIT_MARKER = re.compile(r"#.*\blimit: \S")


@dataclass(frozen=True)
class Finding:
    """A line that can fail under load, or that waits for a time."""

    line: int
    text: str


def findings(source: str) -> list[Finding]:
    """Return the findings in a module, by line.

    Raises:
        SyntaxError: the source is not valid Python.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    imported = _imported(tree)
    found = {
        Finding(
            call.lineno,
            "waits for a time: wait for a condition (tests/support/waiting.py), or mark it `# sleeps: REASON`",
        )
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and _SLEEPS.match(_name(call.func, imported))
        and not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0)
        and not any(_MARKER.search(line) for line in lines[call.lineno - 1 : call.end_lineno])
    }
    found |= {
        Finding(limit.lineno, "is a short limit: a busy machine passes it; make it 120 s, or mark it `# limit: REASON`")
        for limit in _short_limits(tree, imported)
        if not _LIMIT_MARKER.search(lines[limit.lineno - 1])
    }
    functions = [scope for scope in _scopes(tree) if not isinstance(scope, ast.Module)]
    clock_functions = {
        scope.name for scope in functions if any(_Clocks(scope, imported).reads(each) for each in _returned(scope))
    }
    for scope in (tree, *functions):
        clocks = _Clocks(scope, imported, clock_functions)
        for test, holds in _assertions(scope):
            found |= {
                Finding(compare.lineno, "asserts an upper bound on a clock: assert what happened, or count the work")
                for compare in clocks.bounded(test, holds)
            }
    return sorted(found, key=lambda finding: finding.line)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the meaning of imported names: after `from time import sleep as nap`, nap is time.sleep."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return imported


def _name(node: ast.expr, imported: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value, imported)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_name(node.func, imported)}()"
    return ""


def _short_limits(tree: ast.Module, imported: dict[str, str]) -> Iterator[ast.expr]:
    """Yield limits of real time that are too short: numbers, or module constants."""
    named = {
        name: value.value
        for node in tree.body
        for target, value in _assigned(node)
        for name in _targets(target)
        if isinstance(value, ast.Constant)
    }
    for scope in _scopes(tree):
        if isinstance(scope, ast.Module) or not _is_virtual(scope):
            polls = {id(node) for loop in _walk(scope) if isinstance(loop, ast.While) for node in ast.walk(loop.test)}
            for node in (scope, *_walk(scope)):
                for limit in _limits(node, imported) if id(node) not in polls else ():
                    value = limit.value if isinstance(limit, ast.Constant) else named.get(getattr(limit, "id", ""))
                    if isinstance(value, int | float) and 0 < value < _SHORT_S:
                        yield limit


def _limits(node: ast.AST, imported: dict[str, str]) -> Iterator[ast.expr]:
    """Yield a call's limit, or the default limits of a function definition."""
    if isinstance(node, ast.Call):
        name = _name(node.func, imported)
        position = _LIMITS.get(name, _LIMITS.get(f".{name.rpartition('.')[2]}"))
        yield from node.args[position : position + 1] if position is not None else ()
        yield from (each.value for each in node.keywords if each.arg == "timeout")
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        last = arguments.args[len(arguments.args) - len(arguments.defaults) :]
        for argument, default in (
            *zip(last, arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ):
            if argument.arg == "timeout" and default is not None:
                yield default


_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def _is_virtual(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a test uses virtual time."""
    return any(argument.arg == "virtual_time" for argument in (*scope.args.args, *scope.args.kwonlyargs))


def _scopes(tree: ast.Module) -> Iterator[_Scope]:
    """Yield the outermost functions, since inner ones use their names, and the rest of the module."""
    yield tree
    queue: list[ast.AST] = [tree]
    while queue:
        for child in ast.iter_child_nodes(queue.pop()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            else:
                queue.append(child)


def _walk(scope: _Scope) -> Iterator[ast.AST]:
    """Yield a scope's nodes; for a module, without its functions."""
    queue: list[ast.AST] = [scope]
    while queue:
        for child in ast.iter_child_nodes(queue.pop()):
            if not (isinstance(scope, ast.Module) and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
                yield child
                queue.append(child)


def _assertions(scope: _Scope) -> Iterator[tuple[ast.expr, bool]]:
    """Yield conditions with whether they must hold: `assert TEST`, `if TEST: raise` and `if TEST: pytest.fail()`."""
    for node in _walk(scope):
        if isinstance(node, ast.Assert):
            yield node.test, True
        elif isinstance(node, ast.If):
            last = node.body[-1]
            fails = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and _name(last.value.func, {})
            if isinstance(last, ast.Raise) or fails == "pytest.fail":
                yield node.test, False


class _Clocks:
    """Values in a scope that were computed from clocks."""

    def __init__(self, scope: _Scope, imported: dict[str, str], functions: Set[str] = frozenset()) -> None:
        self._imported = imported
        self._virtual = not isinstance(scope, ast.Module) and _is_virtual(scope)
        self._names = set(functions)
        assigned = [each for node in _walk(scope) for each in _assigned(node)]
        while True:  # until no more names hold a clock's reading
            found = {name for target, value in assigned if self.reads(value) for name in _targets(target)}
            if found <= self._names:
                return
            self._names |= found

    def reads(self, value: ast.AST) -> bool:
        """Return whether a value was computed from a clock, by arithmetic or in a collection."""
        if isinstance(value, ast.Name):
            return value.id in self._names or _NAMES.search(value.id) is not None
        if isinstance(value, ast.Attribute):
            return _NAMES.search(value.attr) is not None
        if isinstance(value, ast.Call):
            name = _name(value.func, self._imported)
            owner, _, last = name.rpartition(".")
            if last in _CLOCKS and _OWNERS.search(owner):
                return not (self._virtual and last == "time" and owner != "time")
            return name in self._names or (last in _COMPUTE and any(self.reads(argument) for argument in value.args))
        if isinstance(value, ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.Subscript | ast.Starred | ast.IfExp):
            return any(self.reads(child) for child in ast.iter_child_nodes(value))
        if isinstance(value, ast.ListComp | ast.GeneratorExp):
            return self.reads(value.elt)
        return False

    def bounded(self, test: ast.expr, holds: bool) -> Iterator[ast.Compare]:
        """Yield comparisons that bound a clock from above, given whether the test must hold."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self.bounded(test.operand, not holds)
        elif isinstance(test, ast.Compare):
            sides = (test.left, *test.comparators)
            for left, operator, right in zip(sides, test.ops, sides[1:], strict=False):
                if isinstance(operator, ast.Eq | ast.Is | ast.In):
                    for side, opposite in ((left, right), (right, left)):
                        if isinstance(side, ast.Compare):  # (a < b) == c: both directions
                            yield from (*self.bounded(side, True), *self.bounded(side, False))
                        elif self.reads(side) and not self.reads(opposite):
                            yield test
                elif isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    less, more = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
                    if self.reads(less if holds else more):
                        yield test
        elif isinstance(test, ast.BoolOp):
            for each in test.values:
                yield from self.bounded(each, holds)
        elif isinstance(test, ast.Call):
            for argument in test.args:
                if isinstance(argument, ast.GeneratorExp | ast.ListComp):
                    yield from self.bounded(argument.elt, holds)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                if len(target.elts) == len(node.value.elts):
                    yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # its name stands for the returned values
        yield from ((ast.Name(node.name), value) for value in _returned(node))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
        for argument in node.args:
            yield node.func.value, argument  # a list of clock readings


def _returned(function: ast.AST) -> list[ast.expr]:
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]


def _targets(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there are any."""
    found = 0
    for path in _files([Path(each).resolve() for each in arguments] or [ROOT / "tests", ROOT / "e2e"]):
        if path in HELPERS:
            continue
        for finding in findings(path.read_text()):
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            sys.stdout.write(f"{shown}:{finding.line}: {finding.text}\n")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
