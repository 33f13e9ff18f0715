"""Functions of a Python file as tools that a model may call.

The model gets a function's name, its docstring and a JSON Schema, which pydantic derives from the annotations. pydantic
also validates the arguments of calls.
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

_HELPERS: Final = "start the name of a function that is not a tool with an underscore"


class Tools:
    """Functions that a model may call.

    Attributes:
        definitions: the tools in the API's format.

    Raises:
        ArgumentError: there are no functions, or one is async, has positional-only parameters, or has parameters that
            JSON cannot express.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        if not functions:
            raise ArgumentError("--tools", "the file defines no function without a leading underscore")
        self._functions = {}
        self.definitions = []
        for name, function in functions.items():
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise ArgumentError("--tools", f"{name}() is async; tools must be plain functions")
            try:
                schema = TypeAdapter(cast("type[Any]", function)).json_schema()
                self._functions[name] = validate_call(function)
            except (PydanticUserError, NameError) as error:
                raise ArgumentError("--tools", f"{name}() has non-JSON parameters: {error}; {_HELPERS}") from error
            if schema.get("type") != "object":
                raise ArgumentError(
                    "--tools", f"{name}() has positional-only parameters; models call by parameter name; {_HELPERS}"
                )
            described = {"name": name, "description": inspect.getdoc(function) or "", "parameters": schema}
            self.definitions.append({"type": "function", "function": described})

    @classmethod
    def of_file(cls, path: str) -> Tools:
        """Return the tools of the Python file at `path`: its functions, except those with a leading underscore.

        Raises:
            ArgumentError: the file fails to run, or its functions cannot be tools (see the class).
        """
        try:
            names = runpy.run_path(path)
        except Exception as error:
            raise ArgumentError("--tools", f"cannot run {path}: {type(error).__name__}: {error}") from error
        return cls(
            {
                name: value
                for name, value in names.items()
                if inspect.isfunction(value) and not name.startswith("_")
                if value.__code__.co_filename == path
            }
        )

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool call, and return the message with its result or error."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        print_dimmed(f"{name}({arguments})\n")
        result = self._call(name, arguments)
        print_dimmed(f"→ {result}\n")
        return {"role": "tool", "tool_call_id": call["id"], "content": result}

    def _call(self, name: str, arguments: str) -> str:
        if name not in self._functions:
            return f"error: there is no tool {name!r}; available: {', '.join(self._functions)}"
        try:
            value = self._functions[name](**from_json(arguments))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:  # any error of a function is reported to the model
            return f"error: {type(error).__name__}: {error}"
