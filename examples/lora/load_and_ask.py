"""Load a LoRA adapter into a running server, ask it a question, and unload it.

    openssl rand -hex 16 >admin-keys
    stoker serve MODEL --enable-lora --lora-dir /adapters --allow-runtime-lora-updating --admin-api-key-file admin-keys
    STOKER_ADMIN_KEY=$(cat admin-keys) python examples/lora/load_and_ask.py \\
        http://localhost:8000 support /adapters/support-v3 "Hello?"

`/adapters/support-v3` is a folder that PEFT's `save_pretrained` wrote for MODEL, with adapter_config.json and
adapter_model.safetensors. With API keys (`--api-key`), set STOKER_API_KEY to one of them.
"""

import argparse
import os
import sys

import httpx
import openai


def ask(url: str, admin_key: str, api_key: str, name: str, path: str, question: str) -> str:
    """Load the adapter in folder `path` of the server under `name`. Return its answer to `question`."""
    admin = httpx.Client(base_url=url, headers={"authorization": f"Bearer {admin_key}"}, timeout=60)
    try:
        loaded = admin.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    except httpx.ConnectError:
        raise SystemExit(f"no server answers at {url}; the first lines of this script start one") from None
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
    parser = argparse.ArgumentParser(description="Load a LoRA adapter, ask it a question, and unload it.")
    parser.add_argument("url", help="the server's address: http://localhost:8000")
    parser.add_argument("name", help="the adapter's name in requests: support")
    parser.add_argument("path", help="the adapter's folder on the server: /adapters/support-v3")
    parser.add_argument("question")
    options = parser.parse_args()
    if "STOKER_ADMIN_KEY" not in os.environ:
        sys.exit("set STOKER_ADMIN_KEY to a key of the server's --admin-api-key-file")
    keys = os.environ["STOKER_ADMIN_KEY"], os.environ.get("STOKER_API_KEY", "none")
    print(ask(options.url, *keys, options.name, options.path, options.question))
