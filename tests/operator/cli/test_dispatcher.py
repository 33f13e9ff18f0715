"""``stoker``: finds commands without importing them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker import main as dispatcher
from stoker.main import main


def test_help_lists_every_command(capsys: Any) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.split("\n")
    for entry in entry_points(group=dispatcher.GROUP):
        [line] = [line for line in lines if line.split()[:1] == [entry.name]]
        assert line.startswith(f"  {entry.name}  ") and line.endswith("  " + dispatcher.SUMMARIES[entry.name])


def test_help_names_the_package_of_foreign_commands() -> None:
    long = EntryPoint("a-command-with-a-long-name", "stoker_plugin:main", dispatcher.GROUP)
    assert "  a-command-with-a-long-name  from stoker_plugin" in dispatcher.usage({long.name: long})


def test_help_imports_neither_engine_nor_operator() -> None:
    code = (
        "import sys; from stoker.main import main; main(['--help']);"
        "print([name for name in sys.modules if name.startswith('stoker_')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_plan_does_not_import_large_dependencies() -> None:
    code = (
        "import sys; from stoker.main import main; main(['plan', '-f', 'examples/01-demo.yaml']);"
        "print([m for m in ('torch', 'kopf', 'kubernetes', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_version_is_printed(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("stoker 0.")


def test_missing_command_prints_the_usage(capsys: Any) -> None:
    assert main([]) == 2
    assert "usage: stoker COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "hint"), [("serv", "did you mean `stoker serve`?"), ("zzz", "see `stoker --help`")])
def test_unknown_command_is_reported_with_a_hint(word: str, hint: str, capsys: Any) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err == f"stoker: no command {word!r}; {hint}\n"


def install(monkeypatch: Any, tmp_path: Any, body: str, extras: str = " [gpu]") -> None:
    (tmp_path / "stoker_plugin.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stoker_plugin", raising=False)
    entry = EntryPoint("extra", f"stoker_plugin:main{extras}", "stoker.commands")
    monkeypatch.setattr(dispatcher, "entry_points", lambda group: [entry])


@pytest.mark.parametrize("body", ["import no_such_package", "def main(argv):\n    import no_such_package.inner"])
def test_missing_extra_is_reported_with_the_install_command(
    monkeypatch: Any, tmp_path: Any, capsys: Any, body: str
) -> None:
    install(monkeypatch, tmp_path, body)
    assert main(["extra"]) == 2
    err = capsys.readouterr().err
    assert "needs the Python package 'no_such_package" in err
    assert "pip install -c constraints.txt '.[gpu]'" in err


def test_install_command_for_another_project_names_it(monkeypatch: Any, tmp_path: Any, capsys: Any) -> None:
    install(monkeypatch, tmp_path, "import no_such_package")
    monkeypatch.setattr(EntryPoint, "dist", SimpleNamespace(name="plugin"))
    assert main(["extra"]) == 2
    assert capsys.readouterr().err.endswith("  pip install 'plugin[gpu]'\n")


@pytest.mark.parametrize("body", ["import stoker_operator.no_such_module", "import stoker_plugin.inner", "1 / 0"])
def test_internal_errors_are_not_hidden(monkeypatch: Any, tmp_path: Any, body: str) -> None:
    install(monkeypatch, tmp_path, body)
    with pytest.raises((ModuleNotFoundError, ZeroDivisionError)):
        main(["extra"])


def test_missing_modules_of_each_package_are_internal_errors() -> None:
    root = Path(__file__).parents[3]
    packages = [source.parent.name for source in root.glob("*/stoker*/__init__.py")]
    assert sorted(packages) == sorted(dispatcher.PACKAGES)
    entry = EntryPoint("extra", "stoker_plugin:main [gpu]", dispatcher.GROUP)
    for package in (*packages, "stoker_plugin"):
        assert dispatcher.is_ours(package, entry) and dispatcher.is_ours(f"{package}.inner.module", entry)
    assert not dispatcher.is_ours("stoker_plugins", entry) and not dispatcher.is_ours("torch.cuda", entry)


def test_command_gets_its_arguments_and_returns_its_exit_code(monkeypatch: Any, tmp_path: Any) -> None:
    install(monkeypatch, tmp_path, "def main(argv):\n    return len(argv)", extras="")
    assert main(["extra", "a", "b", "c"]) == 3


@pytest.mark.parametrize("body", ["raise KeyboardInterrupt", "def main(argv):\n    raise KeyboardInterrupt"])
def test_interrupted_command_ends_without_a_traceback(monkeypatch: Any, tmp_path: Any, capsys: Any, body: str) -> None:
    install(monkeypatch, tmp_path, body)
    assert main(["extra"]) == 130
    assert capsys.readouterr() == ("", "")


def test_unencodable_characters_are_replaced() -> None:
    command = [sys.executable, "-m", "stoker", "plan", "--model=meta-llama/Meta-Llama-3-8B", "--accelerator=nvidia-l4"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([*command, "--plot"], capture_output=True, text=True, env=environment, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "1 ? nvidia-l4" in shown.stdout
    assert "# weights" in shown.stdout
