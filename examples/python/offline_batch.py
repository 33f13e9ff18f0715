"""Complete a file of prompts without a server, and write the results to a file.

    python examples/python/offline_batch.py examples/python/prompts.jsonl results.jsonl

Each line of the input is a JSON object with "prompt" and, optionally, "output_tokens". The engine batches the requests
itself. A third argument is another model: a folder, a GGUF file, or a hub id.
"""

import json
import sys
from pathlib import Path

from stoker_engine import LLM, SamplingParams

PROMPTS = str(Path(__file__).parent / "prompts.jsonl")


def main(source: str = PROMPTS, target: str = "results.jsonl", model: str = "demo://gemma-3-270m") -> None:
    """Complete the prompts in file `source`; write prompts, texts, finish reasons and token counts to `target`."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"{source} cannot be read ({error.strerror}); examples/python/prompts.jsonl is an example")
    requests = [json.loads(line) for line in text.split("\n") if line.strip()]
    params = [SamplingParams(temperature=0, max_tokens=request.get("output_tokens", 64)) for request in requests]
    with LLM(model) as llm:
        outputs = llm.generate([request["prompt"] for request in requests], params)

    with Path(target).open("w") as results:
        for output in outputs:
            [completion] = output.outputs
            result = {
                "prompt": output.prompt,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.token_ids),
            }
            results.write(json.dumps(result) + "\n")
    print(f"{len(outputs)} results in {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
