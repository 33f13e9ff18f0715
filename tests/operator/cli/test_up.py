"""``stoker up``: the pod's command line, without a pod."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cli import machine, up
from stoker_operator.cli.render import render
from stoker_operator.manifests.variables import expand
from stoker_operator.plan.catalogue import Catalogue

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(monkeypatch: Any, tmp_path: Any, capsys: Any, document: Any) -> Any:
    """Run ``stoker up`` on a spec; return exit code, command line, environment and output."""

    def call(*options: str, **spec: Any) -> tuple[int, list[str], dict[str, str], Any]:
        started: list[Any] = []
        monkeypatch.setattr(os, "execve", lambda path, words, env: started.extend([words, env]))
        (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(document(**spec)))
        code = up.main(["-f", str(tmp_path / "manifest.yaml"), *options])
        words, env = started or ([], {})
        return code, words, env, capsys.readouterr()

    monkeypatch.setattr(machine, "nvidia_memory", list)
    for name in ("HF_TOKEN", "STOKER_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return call


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
}  # fmt: skip


def test_up_runs_the_pods_command_line(run: Any, endpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    spec = {
        "engine": {"dtype": "float32", "maxNumSeqs": 8},
        "model": {"source": f"file://{tmp_path}", "chatTemplate": {"value": "$(A)\nand more"}},
    }
    _, words, _, output = run(**spec)
    deployment = next(each for each in render(endpoint(**spec), Catalogue.load()) if each["kind"] == "Deployment")
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[:3] == [sys.executable, "-m", "stoker"]
    local = ("--host=127.0.0.1", "--shutdown-grace=0.0")
    assert [word for word in words[3:] if word not in local] == [expand(word, {}) for word in args]
    assert {*local} < {*words}
    assert output.out.startswith(f"demo: stoker serve {tmp_path} ")
    assert "--chat-template=$(A)\nand more" in words
    assert "'--chat-template=$(A)…'" in output.out and "and more" not in output.out


def test_grace_period_comes_only_from_the_manifest(run: Any) -> None:
    _, words, _, _ = run(engine={"args": ["--shutdown-grace=3"]})
    assert [word for word in words if "grace" in word] == ["--shutdown-grace=3.0"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("--a=b", "--a=b"), ("x" * up.SHOWN, "x" * up.SHOWN), ("x" * 200, "x" * up.SHOWN + "…"), ("a\nb", "a…")],
)
def test_shown_arguments_are_short(word: str, expected: str) -> None:
    assert up.shortened(word) == expected


def test_host_and_port_come_from_the_command(run: Any) -> None:
    _, words, _, _ = run("--host", "::", "--port", "8001")
    assert "--port=8001" in words
    assert not [word for word in words if word.startswith("--host")]  # the engine's own default


@pytest.mark.parametrize("port", ["99999", "65536", "-1"])
def test_impossible_port_is_refused(run: Any, capsys: Any, port: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(f"--port={port}")
    assert ended.value.code == 2
    assert f"--port must be 0 to 65535, not {port}" in capsys.readouterr().err


def test_unused_fields_are_listed(run: Any) -> None:
    hardware = {"accelerator": "nvidia-l4", "count": 4, "resources": {"limits": {"cpu": 1}}}
    engine = {"image": "x", "imagePullPolicy": "Always", "dtype": "float32"}
    rollout = {"maxSurge": 2, "drainSeconds": 9}
    unused = {"replicas": 2, "service": {"port": 80}, "rollout": rollout, "storage": {}, "parallelism": {"tensor": 4}}
    unused |= {"template": {"spec": {}}, "monitoring": {"podMonitor": "Auto"}, "networkPolicy": {"mode": "Open"}}
    unused |= {"routing": {"sessionHeader": "X-Session-Id"}}
    _, words, _, output = run("--accelerator=cpu", hardware=hardware, engine=engine, **unused)
    assert output.out.splitlines()[0] == (
        "Not used on one machine: spec.replicas, spec.hardware.resources, spec.engine.image, "
        "spec.engine.imagePullPolicy, spec.template, spec.storage, spec.service, spec.rollout.maxSurge, "
        "spec.networkPolicy, spec.monitoring, spec.routing, spec.hardware.count, spec.parallelism"
    )
    assert "--shutdown-timeout=9" in words
    assert "--device=cpu" in words
    assert "--dtype=float32" in words
    assert not [word for word in words if "parallel" in word]


def test_tutorial_names_the_unused_fields() -> None:
    text = (ROOT / "docs/tutorials/02-first-endpoint.md").read_text(encoding="utf-8")
    names = {up.camel(name).split(".")[0] for name in up.CLUSTER_FIELDS} | {"image", "imagePullPolicy", "resources"}
    assert not {name for name in names - {"hardware", "engine"} if f"`{name}`" not in text}


def test_memory_limit_of_a_cpu_sizes_the_cache(run: Any, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(up, "host_memory", lambda: 64 << 30)
    source = {"model": {"source": f"file://{tmp_path}"}}

    def cache(limits: dict[str, Any], args: tuple[str, ...] = (), **resources: Any) -> tuple[list[str], str]:
        hardware = {"accelerator": "cpu", "resources": {"limits": limits, **resources}}
        _, words, _, output = run(hardware=hardware, **source, **({"engine": {"args": [*args]}} if args else {}))
        return [word.rpartition("=")[2] for word in words if word.startswith("--kv-cache-mem")], output.out

    def size(limit: str) -> int:
        [found], output = cache({"memory": limit})
        assert "Not used" not in output
        return int(found)

    assert 0 < size("2Gi") < 1 << 30, "a GiB of the limit is kept free"
    assert size("3Gi") - size("2Gi") == pytest.approx(0.92 * (1 << 30), abs=2), "the engine uses 92 % of the limit"
    assert size("32Gi") == 4 << 30
    assert cache({"memory": "64Gi"})[0] == [], "the engine derives the size from the machine's memory"
    assert cache({"cpu": 2})[0] == []
    assert cache({"memory": "2Gi"}, ("--kv-cache-memory-bytes=64M",))[0][-1] == str(64 << 20)
    parts = cache({"memory": "2Gi", "cpu": 2}, requests={"memory": "1Gi"})[1].splitlines()[0]
    assert parts == "Not used on one machine: spec.hardware.resources.limits[cpu], spec.hardware.resources.requests"
    assert cache({"cpu": 2})[1].startswith("Not used on one machine: spec.hardware.resources\n")


def test_environment_is_passed_on(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    ref = {"secretKeyRef": {"name": "s", "key": "k"}}
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2$$"}, {"name": "TOKEN", "valueFrom": ref}]
    _, _, environment, _ = run(engine={"env": env})
    assert (environment["A"], environment["B"], environment["TOKEN"]) == ("1", "12$", "secret")
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    "ref", [{"secretKeyRef": {"name": "s", "key": "k"}}, {"configMapKeyRef": {"name": "c", "key": "k"}}]
)
def test_optional_variables_may_be_missing(run: Any, monkeypatch: Any, ref: Any) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    optional = {kind: {**key, "optional": True} for kind, key in ref.items()}
    env = [{"name": "TOKEN", "valueFrom": optional}, {"name": "A", "value": "$(TOKEN)"}]
    _, words, environment, _ = run(engine={"env": env})
    assert "serve" in words
    assert "TOKEN" not in environment
    assert environment["A"] == "$(TOKEN)", "as in a pod, a missing variable is not expanded"
    required = {kind: {**key, "optional": False} for kind, key in ref.items()}
    code, _, _, output = run(engine={"env": [{"name": "TOKEN", "valueFrom": required}]})
    assert code == 2
    assert "spec.engine.env[TOKEN].valueFrom" in output.err


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        (
            {"hardware": {"accelerator": "nvidia-l4"}},
            [],
            "spec.hardware.accelerator: this machine lacks 1 × nvidia-l4: it has no NVIDIA GPU; run it on the CPU with "
            "--accelerator cpu",
        ),
        (
            {"hardware": {"accelerator": "amd-mi300x"}},
            [],
            "spec.hardware.accelerator: it is unknown whether this machine has amd-mi300x",
        ),
        (
            {"model": {"source": "pvc://a/b"}},
            [],
            "spec.model.source: one machine has no PersistentVolumeClaims; copy the mod",
        ),
        ({"model": {"source": "pvc://a/b"}}, ["--accelerator", "cpu"], "spec.model.source: one machine has no Persist"),
        (
            {"model": {"source": "file:///m"}},
            [],
            "spec.model.source: there is no /m on this machine; use the path of a model",
        ),
        (
            {"model": {"source": f"file://{__file__}"}},
            [],
            f"spec.model.source: {__file__} is not a GGUF file; use the model's folder",
        ),
        (
            {"model": {"source": "file:///m", "chatTemplate": {"configMapKeyRef": {"name": "a", "key": "b"}}}},
            [],
            "spec.model.chatTemplate.configMapKeyRef: one machine has no ConfigMaps; put the template's text",
        ),
        (
            {"engine": {"env": [{"name": "NOPE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
            [],
            "spec.engine.env[NOPE].valueFrom: there is no cluster to read the value from; set the environment var",
        ),
        (
            {"hardware": {"accelerator": "nvidia-l4"}, "engine": {"quantization": "experts_int8"}},
            ["--accelerator", "cpu"],
            "spec.engine.quantization: runtime stoker does not support experts_int8 on cpu; ",
        ),
        ({"engine": {"kvCacheDtype": "int3"}}, [], "spec.engine.kvCacheDtype: input should be 'auto', 'bfloat16'"),
        ({"engine": {"args": ["--nonsense"]}}, [], "spec.engine.args: there is no flag --nonsense; see `stoker serve"),
        (
            {"hardware": {"accelerator": "nvidia-l4", "count": 4}, "parallelism": {"tensor": 2, "data": 4}},
            [],
            "spec.parallelism: tensor (2) × data (4) needs 8 GPUs, 4 available; use tensor 1, data 4",
        ),
    ],
)
def test_spec_that_cannot_run_on_this_machine_is_refused(
    run: Any, spec: Any, options: list[str], expected: str
) -> None:
    code, words, _, output = run(*options, **spec)
    assert code == 2
    assert words == []
    assert output.err.startswith(f"stoker up: {expected}")


@pytest.mark.parametrize(
    ("spec", "variable", "field"),
    [
        ({"auth": {"apiKeysSecretRef": {"name": "s"}}}, "STOKER_API_KEY", "spec.auth.apiKeysSecretRef"),
        (
            {"model": {"source": "hf://org/name", "tokenSecretRef": {"name": "s", "key": "k"}}},
            "HF_TOKEN",
            "spec.model.tokenSecretRef",
        ),
    ],
)
def test_secrets_come_from_the_environment(run: Any, monkeypatch: Any, spec: Any, variable: str, field: str) -> None:
    code, words, _, output = run(**spec)
    assert (code, words) == (2, [])
    assert output.err.startswith(f"stoker up: {field}: one machine has no Secrets; set the environment variab")
    monkeypatch.setenv(variable, "secret")
    code, words, env, _ = run(**spec)
    assert env[variable] == "secret"
    assert not [word for word in words if "key" in word or "secret" in word]


def test_installed_vllm_is_run(run: Any, monkeypatch: Any, tmp_path: Any) -> None:
    spec = {"model": {"source": "hf://org/name"}, "engine": {"runtime": "vllm", "args": ["--seed=7"]}}
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, _, output = run(**spec)
    assert code == 2
    assert output.err.startswith("stoker up: spec.engine.runtime: there is no program vllm on this machine's PATH; ins")
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    _, words, _, output = run(**spec)
    assert words[:3] == [str(tmp_path / "vllm"), "serve", "org/name"]
    assert words[-3:] == ["--host=127.0.0.1", "--port=8000", "--seed=7"]
    assert output.out.startswith("demo: vllm serve org/name ")


def test_gpu_with_the_required_memory_is_accepted(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(machine, "nvidia_memory", lambda: [143771])
    _, words, _, _ = run(hardware={"accelerator": "nvidia-h100-80gb"})
    assert "--device=cuda" in words
    code, _, _, output = run(hardware={"accelerator": "nvidia-h100-80gb", "count": 2})
    assert code == 2
    assert "lacks 2 × nvidia-h100-80gb: it has GPUs of 143,771 MiB" in output.err


def test_demo_runs_on_any_machine(run: Any, monkeypatch: Any, capsys: Any) -> None:
    spec = yaml.safe_load((ROOT / "examples/01-demo.yaml").read_text())["spec"]
    _, words, _, _ = run(**spec)
    assert words[3:5] == ["serve", "demo://gemma-3-270m"]


def test_ranks_run_on_any_machine(run: Any) -> None:
    spec = yaml.safe_load((ROOT / "examples/09-ranks-on-cpu.yaml").read_text())["spec"]
    _, words, _, _ = run(**spec)
    assert {"--tensor-parallel-size=2", "--data-parallel-size=2", "--device=cpu"} <= set(words)
    code, _, _, output = run(**{**spec, "parallelism": {"tensor": 3}})
    assert code == 2
    assert "tensor 3 does not divide the model's 4 attention heads" in output.err


def test_missing_file_is_reported(capsys: Any) -> None:
    assert up.main(["-f", "/no/such/file"]) == 2
    assert capsys.readouterr().err == "stoker up: /no/such/file: cannot be read: No such file or directory\n"


def test_file_that_is_no_yaml_is_named(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "manifest.yaml"
    file.write_text("a: b: c")
    assert up.main(["-f", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stoker up: {file}: the text is not YAML: mapping values are not allowed here")
    assert "at line 1, column 5" in error and "unicode" not in error
