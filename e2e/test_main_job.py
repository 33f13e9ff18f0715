"""The main path: chart → manifest → operator → pod → engine → OpenAI client, then a new spec, then deletion.

Asserted: the tokens equal transformers'; streaming, chat and models work through the Service's name, in a namespace
with restricted PodSecurity; requests without the right API key are refused; the KV cache has the predicted size; a new
spec replaces the pod; deletion leaves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.cluster import Cluster, Images
from kit.endpoint import Endpoint, demo
from kit.traffic import client_pod
from kit.waiting import wait_for

ROOT = Path(__file__).parents[1]
PROMPT = "The three laws of robotics are as follows."
TOKENS = 48
KEYS = {"alice": "key-of-alice-1f0c", "bob": "key-of-bob-77aa"}

# Runs in a pod of the cluster like a user's application, with only the endpoint's URL and a key.
APPLICATION = """
import json, sys
from openai import AuthenticationError, OpenAI

url, key, prompt, tokens = sys.argv[1:]
client = OpenAI(base_url=url, api_key=key, max_retries=0)
try:
    model = client.models.list().data[0].id
except AuthenticationError as error:
    print(json.dumps({"status": error.status_code}))
    sys.exit()
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
    "status": 200, "model": model, "text": text, "token_ids": token_ids, "chunks": chunks,
    "chat": chat.choices[0].message.content,
}))
"""


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Return transformers' greedy tokens in float32, from the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker_engine.models.hub.demo import demo_model

    file = demo_model("gemma-3-270m")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS)
    generated: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
    return generated


def everything(cluster: Cluster, namespace: str) -> set[str]:
    """Return all objects except Events: those in the namespace, and cluster-scoped ones."""
    found = set()
    for scope, where in (("true", ["--namespace", namespace]), ("false", [])):
        kinds = cluster.kubectl("api-resources", "--verbs=list", f"--namespaced={scope}", "-o", "name").split()
        kinds = [kind for kind in kinds if not kind.startswith("events")]
        found |= set(cluster.kubectl("get", ",".join(kinds), *where, "-o", "name", "--ignore-not-found").splitlines())
    return {name for name in found if "/" in name}


def application(cluster: Cluster, image: str, namespace: str, name: str, url: str, key: str) -> dict[str, Any]:
    """Run the client in a pod of the cluster, and return its results."""
    command = ["python", "-c", APPLICATION, url, key, PROMPT, str(TOKENS)]
    cluster.apply(namespace, client_pod(name, image, command))

    def ended() -> Any:
        phase = cluster.get("pod", name, "--namespace", namespace)["status"]["phase"]
        return phase if phase in ("Succeeded", "Failed") else None

    phase = wait_for(ended, "the application has ended", 180)
    log = cluster.kubectl("logs", name, "--namespace", namespace)
    assert phase == "Succeeded", log
    got: dict[str, Any] = json.loads(log.strip("\n").split("\n")[-1])
    return got


@pytest.mark.timeout(1200)
def test_main_job(cluster: Cluster, images: Images, chart: None, namespace: str, expected: list[int]) -> None:
    in_namespace = ("--namespace", namespace)
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    cluster.apply(namespace, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS})
    furniture = {"serviceaccount/default", "configmap/kube-root-ca.crt"}
    wait_for(lambda: furniture <= everything(cluster, namespace), "the namespace has its default objects", 60)
    before = everything(cluster, namespace)

    endpoint = Endpoint(cluster, namespace)
    endpoint.apply(demo(auth={"apiKeysSecretRef": {"name": "keys"}}))
    status = endpoint.wait_ready(420)
    assert status["url"] == f"http://demo.{namespace}.svc:8000/v1"
    workload = status["workloads"][0]
    assert workload["image"] == images.engine
    assert (workload["plan"]["tensor"], workload["plan"]["data"]) == (1, 1)
    measured = wait_for(lambda: endpoint.get()["status"]["workloads"][0]["engine"].get("kvBlocks"), "kvBlocks", 60)
    assert measured == workload["plan"]["kvBlocks"]
    engine = endpoint.get()["status"]["workloads"][0]["engine"]
    assert engine["weights"].startswith("Q5_0, ") and engine["kvCacheDtype"] == "float32"

    for user, key in KEYS.items():
        got = application(cluster, images.client, namespace, f"application-{user}", status["url"], key)
        assert got["model"] == "gemma-3-270m"
        assert got["token_ids"] == expected
        assert got["chunks"] > TOKENS / 2  # the response was streamed
        assert got["chat"]
    refused = application(cluster, images.client, namespace, "application-wrong", status["url"], "key-of-nobody")
    assert refused == {"status": 401}

    pods = set(endpoint.lives())
    endpoint.patch(engine={"maxNumSeqs": 4})
    status = endpoint.wait_ready(420)
    assert status["availableReplicas"] == status["updatedReplicas"] == status["replicas"] == 1
    (pod,) = endpoint.pods()
    assert pod["metadata"]["uid"] not in pods
    assert "--max-num-seqs=4" in pod["spec"]["containers"][0]["args"]
    got = application(cluster, images.client, namespace, "application-2", status["url"], KEYS["alice"])
    assert got["token_ids"] == expected

    assert "finalizers" not in endpoint.get()["metadata"]
    endpoint.delete()
    cluster.kubectl("delete", "pods", *in_namespace, "-l", "app=application")
    remaining: set[str] = set()

    def nothing_left() -> bool:
        nonlocal remaining
        remaining = everything(cluster, namespace) - before
        return not remaining

    try:
        wait_for(nothing_left, "nothing is left", 90)
    except AssertionError:
        pytest.fail(f"left behind: {sorted(remaining)}")


def test_wrong_manifest_is_refused_on_apply(cluster: Cluster, chart: None, namespace: str) -> None:
    manifest = (ROOT / "examples/02-four-gpus.yaml").read_text()
    for right, wrong, sentence in (
        ("{tensor: 2}", "{tensor: 2, data: 3}", "needs 6 GPUs"),
        ("kvCacheDtype: fp8", "kvCacheDtype: int3", 'spec.engine.kvCacheDtype: Unsupported value: "int3"'),
        ("nvidia-a100-80gb", "nvidia-a1000", "nvidia-a1000"),
    ):
        assert right in manifest
        answer = cluster.kubectl(
            "apply", "--namespace", namespace, "-f", "-", stdin=manifest.replace(right, wrong), check=False
        )
        assert sentence in answer, answer
        assert not cluster.get("inferenceendpoints", "--namespace", namespace)["items"]
