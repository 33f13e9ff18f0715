"""Functions of a Python file as tools that a model may call.

A function's name, docstring and annotations are what the model reads of it; pydantic makes a JSON Schema of them, and
checks what the model calls it with.
"""

from __future__ import annotations

import inspect
import json
import runpy
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from pydantic import PydanticUserError, TypeAdapter, validate_call
from pydantic_core import from_json

from stoker_common.errors import ArgumentError
from stoker_engine.cli.chat_answer import print_dimmed

_HELPERS: Final = "begin the name of a function that is not for the model with an underscore"


class Tools:
    """Functions that a model may call.

    Attributes:
        definitions: of them, as the API wants them.

    Raises:
        ArgumentError: there are none, or one is async or takes what an object in JSON cannot say.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        if not functions:
            raise ArgumentError("--tools", "the file defines no function without a leading underscore")
        self._functions = {}
        self.definitions = []
        for name, function in functions.items():
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise ArgumentError("--tools", f"{name}() is async; a tool is a plain function")
            try:
                schema = TypeAdapter(cast("type[Any]", function)).json_schema()
                self._functions[name] = validate_call(function)
            except (PydanticUserError, NameError) as error:
                raise ArgumentError("--tools", f"{name}() takes what JSON cannot say: {error}; {_HELPERS}") from error
            if schema.get("type") != "object":
                raise ArgumentError(
                    "--tools", f"{name}() takes arguments by their place alone; a model calls it with names; {_HELPERS}"
                )
            described = {"name": name, "description": inspect.getdoc(function) or "", "parameters": schema}
            self.definitions.append({"type": "function", "function": described})

    @classmethod
    def of_file(cls, path: str) -> Tools:
        """The functions that the Python file at `path` defines, but for those with a leading underscore.

        Raises:
            ArgumentError: it cannot be run, or see the class.
        """
        try:
            names = runpy.run_path(path)
        except Exception as error:
            raise ArgumentError("--tools", f"{path} cannot be run: {type(error).__name__}: {error}") from error
        return cls(
            {
                name: value
                for name, value in names.items()
                if inspect.isfunction(value) and not name.startswith("_")
                if value.__code__.co_filename == path
            }
        )

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Does what the model called for; the message that tells it what came out, or what went wrong."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        print_dimmed(f"{name}({arguments})\n")
        result = self._call(name, arguments)
        print_dimmed(f"→ {result}\n")
        return {"role": "tool", "tool_call_id": call["id"], "content": result}

    def _call(self, name: str, arguments: str) -> str:
        if name not in self._functions:
            return f"error: there is no tool {name!r}; there is {', '.join(self._functions)}"
        try:
            value = self._functions[name](**from_json(arguments))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:  # whatever a function does, the model is told
            return f"error: {type(error).__name__}: {error}"
