"""Let the model call a Python function, and answer with the result.

    stoker serve demo://gemma-3-270m --chat-template examples/chat-template.jinja
    python examples/python/tool_calls.py

The demo model is too small to decide when to call a tool, and to use the result well. So the first request requires a
call; the server makes the arguments conform to the tool's schema. For a model that was trained to call tools, start
the server with --enable-auto-tool-choice and --tool-call-parser, and omit `tool_choice`. An argument is the server's
address.
"""

import json
import sys
from typing import Any, Literal

from openai import APIConnectionError, OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Weather(BaseModel):
    """Get the current weather of a city."""

    city: Literal["Oslo", "Paris", "Rome"]

    def call(self) -> dict[str, str | int]:
        """Return the tool's result."""
        return {"city": self.city, "celsius": {"Oslo": 4, "Paris": 11, "Rome": 19}[self.city]}


def main(url: str = "http://localhost:8000") -> None:
    """Ask a question, and answer the model's calls until it answers the question."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    for tool_choice in ("required", "none"):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[pydantic_function_tool(Weather)],
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            max_completion_tokens=60,
            temperature=0,
        )
        message = completion.choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        if not calls:
            print("answer:", message.content)
            return
        messages.append(
            {"role": "assistant", "content": message.content or "", "tool_calls": [call.to_dict() for call in calls]}
        )
        for call in calls:
            result = Weather.model_validate_json(call.function.arguments).call()
            print(f"call: {call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIConnectionError as error:
        sys.exit(f"no server answers at {error.request.url}; the first lines of this script start one")
