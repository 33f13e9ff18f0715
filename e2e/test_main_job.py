"""The main job: chart → manifest → operator → pod → engine → OpenAI client, then a new spec, then nothing left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SYSTEM = "stoker-system"
PROMPT = "The three laws of robotics are as follows."
TOKENS = 48

# Runs in a pod of the cluster, as a user's application would: told nothing but the endpoint's URL.
APPLICATION = """
import json, sys
from openai import OpenAI

url, prompt, tokens = sys.argv[1:]
client = OpenAI(base_url=url, api_key="unused")
model = client.models.list().data[0].id
stream = client.completions.create(
    model=model, prompt=prompt, max_tokens=int(tokens), temperature=0, stream=True,
    extra_body={"return_token_ids": True, "ignore_eos": True},
)
text, token_ids, chunks = "", [], 0
for chunk in stream:
    for choice in chunk.choices:
        text += choice.text
        token_ids += choice.token_ids
        chunks += bool(choice.text)
chat = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hello!"}], max_completion_tokens=8, temperature=0
)
print(json.dumps({
    "model": model, "text": text, "token_ids": token_ids, "chunks": chunks, "chat": chat.choices[0].message.content,
}))
"""


@pytest.fixture(scope="module")
def chart(cluster: Any, images: Any) -> Iterator[None]:
    """The operator, installed by its chart."""
    cluster.helm(
        "upgrade", "--install", "stoker", str(ROOT / "charts/stoker"),
        "--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "3m",
        "--set", f"images.operator={images.operator}", "--set", f"images.engine.cpu={images.engine}",
    )  # fmt: skip
    yield
    cluster.helm("uninstall", "stoker", "--namespace", SYSTEM, "--wait")


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Transformers' greedy tokens, in fp32, from the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker_engine.models.demo import demo_model

    file = demo_model("gemma-3-270m")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
    generated: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
    return generated


def wait_for(look: Callable[[], Any], what: str, timeout: float) -> Any:
    """What `look` returns as soon as that is something."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(1)
    raise AssertionError(f"not within {timeout:.0f} s: {what}")


def everything(cluster: Any, namespace: str) -> set[str]:
    """Every object of every kind: those in the namespace, and those of the whole cluster."""
    found = set()
    for scope, where in (("true", ["--namespace", namespace]), ("false", [])):
        kinds = cluster.kubectl("api-resources", "--verbs=list", f"--namespaced={scope}", "-o", "name").split()
        kinds = [kind for kind in kinds if not kind.startswith("events")]
        found |= set(cluster.kubectl("get", ",".join(kinds), *where, "-o", "name", "--ignore-not-found").splitlines())
    return {name for name in found if "/" in name}


def ready(cluster: Any, namespace: str, generation: int) -> dict[str, Any] | None:
    """The endpoint's status, once it is about this generation of the spec and ready."""
    status: dict[str, Any] = cluster.get("inferenceendpoint", "demo", "--namespace", namespace).get("status", {})
    if status.get("observedGeneration") != generation:
        return None
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    return status if conditions["Ready"] == "True" else None


def application(cluster: Any, image: str, namespace: str, name: str, url: str) -> dict[str, Any]:
    """What the client in a pod of the cluster got."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "application",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-c", APPLICATION, url, PROMPT, str(TOKENS)],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    cluster.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=json.dumps(pod))

    def ended() -> Any:
        phase = cluster.get("pod", name, "--namespace", namespace)["status"]["phase"]
        return phase if phase in ("Succeeded", "Failed") else None

    phase = wait_for(ended, "the application has ended", 180)
    log = cluster.kubectl("logs", name, "--namespace", namespace)
    assert phase == "Succeeded", log
    got: dict[str, Any] = json.loads(log.splitlines()[-1])
    return got


@pytest.mark.timeout(1200)
def test_main_job(cluster: Any, images: Any, chart: None, namespace: str, expected: list[int]) -> None:
    here = ("--namespace", namespace)
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    wait_for(lambda: "serviceaccount/default" in everything(cluster, namespace), "the namespace is furnished", 30)
    before = everything(cluster, namespace)

    cluster.kubectl("apply", *here, "-f", str(ROOT / "examples/01-demo.yaml"))
    status = wait_for(lambda: ready(cluster, namespace, 1), "the endpoint is ready", 420)
    assert status["url"] == f"http://demo.{namespace}.svc:8000/v1"
    assert status["workloads"] == [{"name": "main", "image": images.engine, "plan": {"tensor": 1, "data": 1}}]

    got = application(cluster, images.client, namespace, "application-1", status["url"])
    assert got["model"] == "gemma-3-270m"
    assert got["token_ids"] == expected
    assert got["chunks"] > TOKENS / 2  # it did stream
    assert got["chat"]

    mine = (*here, "-l", "app.kubernetes.io/instance=demo")
    pods = {pod["metadata"]["name"] for pod in cluster.get("pods", *mine)["items"]}
    cluster.kubectl(
        "patch", "inferenceendpoint", "demo", *here, "--type=merge", "-p", '{"spec":{"engine":{"maxNumSeqs":4}}}'
    )
    status = wait_for(lambda: ready(cluster, namespace, 2), "the new spec has rolled out", 420)
    assert status["availableReplicas"] == status["updatedReplicas"] == status["replicas"] == 1
    after = [pod for pod in cluster.get("pods", *mine)["items"] if "deletionTimestamp" not in pod["metadata"]]
    assert len(after) == 1
    assert after[0]["metadata"]["name"] not in pods
    assert "--max-num-seqs=4" in after[0]["spec"]["containers"][0]["args"]
    assert application(cluster, images.client, namespace, "application-2", status["url"])["token_ids"] == expected

    endpoint = cluster.get("inferenceendpoint", "demo", *here)
    assert "finalizers" not in endpoint["metadata"]
    cluster.kubectl("delete", "inferenceendpoint", "demo", *here)
    cluster.kubectl("delete", "pod", "application-1", "application-2", *here)
    left: set[str] = set()

    def nothing_left() -> bool:
        nonlocal left
        left = everything(cluster, namespace) - before
        return not left

    try:
        wait_for(nothing_left, "nothing is left", 90)
    except AssertionError:
        pytest.fail(f"left behind: {sorted(left)}")


def test_a_wrong_manifest_is_refused_by_the_api_server(cluster: Any, chart: None, namespace: str) -> None:
    manifest = (ROOT / "examples/02-four-gpus.yaml").read_text()
    for right, wrong, said in (
        (
            "{tensor: 2}",
            "{tensor: 2, data: 3}",
            "tensor (2) × data (3) needs 6 GPUs but hardware.count is 4; use tensor 4",
        ),
        ("kvCacheDtype: fp8", "kvCacheDtype: int3", 'spec.engine.kvCacheDtype: Unsupported value: "int3"'),
    ):
        assert right in manifest
        answer = cluster.kubectl(
            "apply", "--namespace", namespace, "-f", "-", stdin=manifest.replace(right, wrong), check=False
        )
        assert said in answer
