"""Load a LoRA adapter into a running server, ask it a question, and unload it.

STOKER_ADMIN_KEY=… python examples/lora/load_and_ask.py http://localhost:8000 support /adapters/support-v3 "Hello?"
"""

import os
import sys

import httpx
import openai


def ask(url: str, admin_key: str, api_key: str, name: str, path: str, question: str) -> str:
    """Load the adapter in folder `path` of the server under `name`. Return its answer to `question`."""
    admin = httpx.Client(base_url=url, headers={"authorization": f"Bearer {admin_key}"}, timeout=60)
    loaded = admin.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    if loaded.is_error:
        raise SystemExit(loaded.json()["error"]["message"])
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key)
        answer = client.chat.completions.create(model=name, messages=[{"role": "user", "content": question}])
        assert answer.model == name
        return answer.choices[0].message.content or ""
    finally:
        admin.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


if __name__ == "__main__":
    url, name, path, question = sys.argv[1:]
    print(ask(url, os.environ["STOKER_ADMIN_KEY"], os.environ.get("STOKER_API_KEY", "none"), name, path, question))
