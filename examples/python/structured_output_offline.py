"""Get answers as objects of a Pydantic class without a server.

    python examples/python/structured_output_offline.py

An argument is another model: a folder, a GGUF file, or a hub id.
"""

import sys
from typing import Literal

from pydantic import BaseModel, Field

from stoker_engine import LLM, SamplingParams, StructuredOutputs

REVIEWS = ("The kettle broke after two days.", "Quiet, fast, and it looks good. I would buy it again.")


class Review(BaseModel, extra="forbid"):
    """A judgement of a product review; extra="forbid" keeps the model from adding properties."""

    sentiment: Literal["positive", "neutral", "negative"]
    stars: int = Field(ge=1, le=5)


def main(model: str = "demo://gemma-3-270m") -> None:
    """Classify the reviews in one batch, and print the objects."""
    prompts = [f"Review: {review}\nClassification as JSON: " for review in REVIEWS]
    constraint = StructuredOutputs(json=Review.model_json_schema())
    with LLM(model) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=100, structured_outputs=constraint))
    for output in outputs:
        print(repr(Review.model_validate_json(output.outputs[0].text)))


if __name__ == "__main__":
    main(*sys.argv[1:])
