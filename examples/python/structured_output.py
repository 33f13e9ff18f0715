"""Get an answer as an object of a Pydantic class from a server.

    stoker serve demo://gemma-3-270m --chat-template examples/chat-template.jinja
    python examples/python/structured_output.py

The server allows only tokens that keep the answer valid by the class's JSON Schema. An argument is the server's
address. `structured_output_offline.py` does the same without a server.
"""

import sys
from typing import Literal

from openai import APIConnectionError, OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    """A judgement of a product review."""

    sentiment: Literal["positive", "neutral", "negative"]
    stars: int = Field(ge=1, le=5)


def main(url: str = "http://localhost:8000") -> None:
    """Classify a review, and print the object."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    completion = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Classify this review: The kettle broke after two days."}],
        response_format=Review,
        max_completion_tokens=100,
        temperature=0,
    )
    review = completion.choices[0].message.parsed
    print(repr(review))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIConnectionError as error:
        sys.exit(f"no server answers at {error.request.url}; the first lines of this script start one")
