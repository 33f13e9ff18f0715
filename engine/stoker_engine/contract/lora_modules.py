"""LoRA adapters as users specify them: ``--lora-modules``, and the entries of ``--lora-config``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

#: Maximum number of characters of an adapter's name, which appears in responses, logs and metrics.
MAX_NAME: Final = 256


@dataclass(frozen=True)
class LoRAModule:
    """An adapter to serve.

    Attributes:
        name: name by which requests select the adapter.
        path: folder with the adapter's files.
        base_model_name: the `parent` that /v1/models reports; None: the model's first name.
    """

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def of_word(cls, word: str) -> LoRAModule:
        """Parse one value of ``--lora-modules``: ``NAME=PATH``, or vLLM's JSON.

        Raises:
            ValueError: the value is invalid; the message says why.
        """
        if not word.lstrip().startswith("{"):
            name, separator, path = word.partition("=")
            if not separator:
                raise ValueError(f'{word[:200]!r} is neither NAME=PATH nor JSON such as {{"name": …, "path": …}}')
            return cls._checked(name, path, None)
        try:
            value = json.loads(word)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{word[:200]!r} is not JSON: {error}") from None
        return cls.of_object(value)

    @classmethod
    def of_object(cls, value: Any) -> LoRAModule:
        """Parse an object with ``name``, ``path`` and optionally ``base_model_name``.

        Raises:
            ValueError: the object is invalid; the message says why.
        """
        if not isinstance(value, dict):
            raise ValueError(f"an adapter must be an object with name and path, got {str(value)[:100]!r}")
        if unknown := [name for name in value if name not in ("name", "path", "base_model_name")]:
            raise ValueError(
                f"unknown field {str(unknown[0])[:100]!r} of an adapter; allowed are name, path and base_model_name"
            )
        for name in ("name", "path"):
            if name not in value:
                raise ValueError(f"an adapter requires the field {name}")
        return cls._checked(value["name"], value["path"], value.get("base_model_name"))

    @classmethod
    def _checked(cls, name: Any, path: Any, base: Any) -> LoRAModule:
        for field, text in (("name", name), ("path", path), ("base_model_name", "" if base is None else base)):
            if not isinstance(text, str):
                raise ValueError(f"an adapter's {field} must be a string, got {str(text)[:100]!r}")
        check_adapter_name(name)
        if not path or "\0" in path:
            raise ValueError(f"the adapter {name!r} requires the path of a folder")
        return cls(name, path, base)


def check_adapter_name(name: str) -> None:
    """Check the name of an adapter, which appears in requests, responses, logs and metrics.

    Raises:
        ValueError: the name is empty or too long, or contains forbidden characters; the message says which.
    """
    if not name or len(name) > MAX_NAME:
        raise ValueError(f"an adapter's name must have 1 to {MAX_NAME} characters, got {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"an adapter's name must be printable, without spaces at start and end, got {name!r}")
    if "," in name:
        raise ValueError(f"an adapter's name must not contain commas, which separate names in metrics, got {name!r}")
