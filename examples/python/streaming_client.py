"""Stream a chat's answer with the openai package.

    stoker serve demo://gemma-3-270m --chat-template examples/chat-template.jinja
    python examples/python/streaming_client.py "What is a steam engine?"

A second argument is the server's address.
"""

import sys
import time

from openai import APIConnectionError, OpenAI


def main(question: str = "What is a steam engine?", url: str = "http://localhost:8000") -> None:
    """Print the answer while it is generated, then its length and times."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    started = time.monotonic()
    first = None
    usage = None
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            first = first or time.monotonic() - started
            print(text, end="", flush=True)
        usage = chunk.usage or usage  # in the last chunk
    print()
    if first is not None and usage is not None:
        seconds = time.monotonic() - started
        print(f"{usage.completion_tokens} tokens in {seconds:.2f} s, the first after {first:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except APIConnectionError as error:
        sys.exit(f"no server answers at {error.request.url}; the first lines of this script start one")
