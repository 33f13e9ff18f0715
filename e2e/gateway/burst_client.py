"""Sends requests at given times, each on its own connection and without retries, and reports each.

    python burst_client.py URL API_KEY MODEL TOKENS SECONDS [SECONDS ...]

Request i is sent SECONDS[i] after a line, or the end, of standard input; in a pod without standard input, that is at
once. It prints one line of JSON per request:

    {"number", "start", "end": seconds since 1970, "status": of HTTP, "held": seconds, "error"}
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

#: Timeout of a request in seconds, longer than any hold.
_TIMEOUT_S = 600
_print = threading.Lock()


def send(number: int, url: str, key: str, model: str, tokens: int) -> None:
    """Send one request and print its result."""
    body = {"model": model, "prompt": [17 + number] * 8, "max_tokens": tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    record: dict[str, Any] = {"number": number, "start": time.time(), "status": 0, "held": 0.0, "error": ""}
    try:
        try:
            answer: Any = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = error
        text = answer.read().decode()
        record |= {"status": answer.status, "held": float(answer.headers.get("x-stoker-held-seconds", 0))}
        if answer.status != 200:
            record["error"] = text
        elif json.loads(text)["usage"]["completion_tokens"] != tokens:
            record["error"] = f"not {tokens} tokens: {text}"
    except Exception as error:  # reported; the test evaluates it
        record["error"] = f"{type(error).__name__}: {error}"
    record["end"] = time.time()
    with _print:
        print(json.dumps(record), flush=True)


def main() -> None:
    url, key, model, tokens, *times = sys.argv[1:]
    sys.stdin.readline()
    began, threads = time.monotonic(), list[threading.Thread]()
    for number, at in enumerate(map(float, times)):
        time.sleep(max(0.0, began + at - time.monotonic()))  # sleeps: until the time of the next request
        threads.append(threading.Thread(target=send, args=(number, url, key, model, int(tokens))))
        threads[-1].start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
