"""``stoker plan``: a table for people, documents for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cli.plan import main
from stoker_operator.cluster import kube

ROOT = Path(__file__).parents[3]
LLAMA_8B = ["--model", "meta-llama/Meta-Llama-3-8B-Instruct", "--accelerator", "nvidia-a100-80gb", "--count", "4"]
LLAMA_405B = ["--model", "meta-llama/Llama-3.1-405B", "--accelerator", "nvidia-h100-80gb", "--count", "8"]


@pytest.fixture
def run(capsys: Any) -> Any:
    """Run the command; return exit code, standard output and standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture
def answer(run: Any) -> Any:
    """Run the command with ``-o json``; return exit code and document."""

    def call(*words: str) -> tuple[int, Any]:
        code, out, _ = run(*words, "-o", "json")
        return code, json.loads(out)

    return call


def test_table_shows_every_layout_and_the_chosen_one(run: Any) -> None:
    code, out, _ = run(*LLAMA_8B, "--runtime", "vllm")
    assert code == 0
    lines = out.splitlines()
    assert lines[1] == "accelerator  4 × nvidia-a100-80gb (81,920 MiB each)"
    titles = "TP  PP  DP  engines  weights/GPU  KV tokens/engine  max length  max concurrency  verdict      why"
    assert lines[3] == "recommended  count 1, replicas 4, tensor 1, data 1"
    assert lines[5] == titles
    assert [line.split()[:4] for line in lines[6:9]] == [list("4111"), list("2122"), list("1144")]
    assert lines[6].split()[4:] == ["3.7", "GiB", "2,191,440", "8,192", "267", "chosen"]
    assert lines[8].endswith(
        "56  recommended  the most engines, each with room for 4 sequences of 8,192 tokens; "
        "better as hardware.count 1, replicas 4: one engine per pod"
    )


def test_json_document_has_documented_fields(answer: Any) -> None:
    code, found = answer(*LLAMA_8B, "-tp", "2")
    assert code == 0
    assert list(found) == ["accepted", "options", "recommendation", "errors", "warnings"]
    assert found["accepted"] is True
    assert found["errors"] == []
    assert found["options"][1] == {
        "tensor": 2,
        "pipeline": 1,
        "data": 2,
        "weightBytesPerGpu": 8_030_527_488,
        "kvTokensPerCopy": 1_036_512,
        "maxModelLen": 8192,
        "maxConcurrency": 126,
        "verdict": "chosen",
        "reason": "",
    }
    assert [way["verdict"] for way in found["options"]] == ["possible", "chosen", "recommended"]
    assert found["recommendation"] == {
        "replicas": 4,
        "hardware": {"count": 1, "nodes": 1},
        "parallelism": {"tensor": 1, "pipeline": 1, "data": 1},
        "reason": found["options"][2]["reason"],
    }
    assert [warning.partition(":")[0] for warning in found["warnings"]] == ["a manifest with these settings is refused"]


def test_yaml_equals_json(run: Any) -> None:
    _, as_json, _ = run(*LLAMA_8B, "-o", "json")
    _, as_yaml, _ = run(*LLAMA_8B, "-o", "yaml")
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_refusal_shows_the_layouts_and_the_remedy(run: Any) -> None:
    code, out, err = run(*LLAMA_405B, "-o", "json")
    assert code == 2
    found = json.loads(out)
    assert found["accepted"] is False
    assert {way["verdict"] for way in found["options"]} == {"impossible"}
    (error,) = found["errors"]
    assert list(error) == ["field", "message", "remedy"]
    assert error["field"] == "spec.hardware"
    assert "at least 16 × nvidia-h100-80gb" in error["remedy"] and "fp8" in error["remedy"]
    assert err == f"stoker plan: {error['field']}: {error['message']}; {error['remedy']}\n"


def test_flags_have_the_meaning_of_the_fields(answer: Any) -> None:
    code, found = answer(*LLAMA_405B, "--runtime", "vllm", "--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert code == 0
    fp8 = next(way for way in found["options"] if way["verdict"] == "chosen")
    _, found = answer(*LLAMA_405B, "--runtime", "vllm", "--quantization", "fp8", "--max-model-len", "4096")
    auto = next(way for way in found["options"] if way["verdict"] == "chosen")
    assert fp8["kvTokensPerCopy"] == pytest.approx(2 * auto["kvTokensPerCopy"], rel=0.001)
    assert (fp8["maxModelLen"], auto["maxModelLen"]) == (131072, 4096)
    code, found = answer(*LLAMA_405B, "--nodes", "2", "-tp", "8", "-pp", "2", "--runtime", "vllm", "--dtype", "float16")
    assert code == 0
    assert next(way for way in found["options"] if way["verdict"] == "chosen")["pipeline"] == 2
    code, found = answer(*LLAMA_8B, "-dp", "4")
    assert [way["data"] for way in found["options"] if way["verdict"] == "chosen"] == [4]


def test_uneven_sizes_are_refused_with_even_ones(answer: Any) -> None:
    code, found = answer(*LLAMA_8B, "-tp", "2", "-dp", "3")
    assert code == 2
    assert found["errors"] == [
        {
            "field": "spec.parallelism",
            "message": "tensor (2) × data (3) needs 6 GPUs, 4 available",
            "remedy": "use tensor 1, data 4 (recommended; better as hardware.count 1, replicas 4) or tensor 4, data 1 "
            "or tensor 2, data 2, or set hardware.count to 6",
        }
    ]
    assert [way["verdict"] for way in found["options"]] == ["possible", "possible", "recommended"]
    code, found = answer(*LLAMA_405B, "--nodes", "2")  # by default an engine would span nodes
    assert code == 2
    assert [way["pipeline"] for way in found["options"] if way["verdict"] == "recommended"] == [2]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("0*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_planned(answer: Any, example: Path) -> None:
    code, found = answer("-f", str(example))
    assert (code, found["errors"]) == (0, [])
    assert "chosen" in {way["verdict"] for way in found["options"]}


def test_manifest_is_refused_as_by_the_operator(answer: Any, document: Any, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"

    def planned(**spec: Any) -> tuple[int, list[str]]:
        file.write_text(yaml.safe_dump(document(**spec)))
        code, found = answer("-f", str(file))
        return code, [error["field"] for error in found["errors"]]

    assert planned() == (0, [])
    assert planned(engine={"args": ["--no-such-flag"]}) == (2, ["spec.engine.args"])
    assert planned(hardware={"accelerator": "nvidia-l4"}) == (2, ["spec.engine.image"])
    assert planned(hardware={"accelerator": "nvidia-l5"}) == (2, ["spec.hardware.accelerator"])
    assert planned(hardware={"accelerator": "cpu", "counts": 1}) == (2, ["spec.hardware.counts"])


def test_model_folder_is_read_for_its_shape(answer: Any, tmp_path: Path, run: Any) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, found = answer("--model", str(tmp_path), "--memory", "4Gi")
    assert code == 0
    (way,) = found["options"]
    # 2 × 100 × 64, two layers of 4 × 64² + 3 × 64 × 128 + 2 × 64, and the last norm; 4 bytes each.
    assert way["weightBytesPerGpu"] == 4 * (2 * 100 * 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64)
    assert way["maxModelLen"] == 4096
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    code, _, err = run("--model", str(tmp_path))
    assert code == 2
    assert "BertForMaskedLM is not served: it is an encoder that fills masks" in err
    (tmp_path / "config.json").write_text("no JSON")
    code, _, err = run("--model", str(tmp_path))
    assert code == 2 and "not valid JSON" in err


def test_unknown_memory_is_explained(answer: Any, run: Any) -> None:
    words = ["--model", "org/unknown", "--accelerator", "nvidia-l4", "--runtime", "vllm"]
    code, found = answer(*words)
    assert code == 0
    assert found["options"][0]["weightBytesPerGpu"] is None
    assert found["warnings"][0].startswith("nothing about org/unknown was checked, because its config.json")
    _, out, _ = run(*words)
    assert "unknown      the model's config.json has not been fetched" in out
    assert "(`hf download org/unknown config.json --local-dir FOLDER`) and plan with --model FOLDER" in out
    assert "was checked" not in run(*LLAMA_8B)[1]


def test_path_that_names_no_model_is_refused(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no model")
    Path("model.gguf").write_text("")
    for path in ("./missing", "/no/such", "file:///no/such", "missing.gguf", "./missing.gguf"):
        code, out, err = run("--model", path)
        assert (code, out) == (2, "")
        absolute = Path(path.removeprefix("file://")).resolve()
        assert err == f"stoker plan: --model: there is no {absolute} on this machine; use the path of a model\n"
    code, _, err = run("--model", "notes.txt")
    assert code == 2 and f"--model: {tmp_path}/notes.txt is not a GGUF file; use the model's folder" in err
    assert run("--model", "model.gguf")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "specify either -f FILE or --model MODEL"),
        (["-f", "x", "--model", "y"], "specify either -f FILE or --model MODEL"),
        (["-f", "x", "--count", "2"], "--count cannot be used with -f; set it in x"),
    ],
)
def test_manifest_and_flags_exclude_each_other(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_file_with_several_endpoints_is_refused(tmp_path: Any, document: Any, capsys: Any) -> None:
    (tmp_path / "m.yaml").write_text(yaml.safe_dump_all([document(), document()]))
    assert main(["-f", str(tmp_path / "m.yaml")]) == 2
    assert "the file contains several endpoints (demo, demo); put each into its own file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a: b: c", "[]", "- 1", "kind: Pod"])
def test_malformed_manifests_are_refused(text: str, tmp_path: Path, answer: Any) -> None:
    (tmp_path / "m.yaml").write_text(text)
    code, found = answer("-f", str(tmp_path / "m.yaml"))
    assert code == 2
    assert found["options"] == [] and found["errors"]


class Cluster:
    """Responses to lists, as from an API server."""

    def __init__(self, held: int) -> None:
        requests = {"limits": {"nvidia.com/gpu": str(held)}}
        self.objects = {
            "Node": [
                {
                    "metadata": {"name": "big", "labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}},
                    "spec": {},
                    "status": {
                        "allocatable": {"nvidia.com/gpu": "4", "cpu": "8"},
                        "conditions": [{"type": "Ready", "status": "True"}],
                    },
                }
            ],
            "Pod": [
                {
                    "metadata": {"name": "other", "namespace": "ns", "creationTimestamp": "2026-01-01T00:00:00Z"},
                    "spec": {"nodeName": "big", "containers": [{"name": "c", "resources": requests}]},
                    "status": {"phase": phase},
                }
                for phase in ("Running", "Succeeded")
            ],
        }

    def list(self, kind: str) -> kube.Listing:
        return kube.Listing(self.objects[kind], "1")


@pytest.mark.parametrize(
    ("held", "count", "verdict"),
    [
        (3, "4", "not now: 1 of 4 free on big, held by ns/other (3)"),
        (3, "1", "has room for a pod now"),
        (0, "8", "no node can ever hold 8 × nvidia.com/gpu: the largest has 4"),
    ],
)
def test_capacity_of_the_clusters_nodes_is_shown(
    held: int, count: str, verdict: str, answer: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube.Kube, "connect", lambda: Cluster(held))
    words = [*LLAMA_8B[:-1], count, "--runtime", "vllm", "--cluster"]
    _, found = answer(*words)
    assert found["cluster"] == verdict
    _, out, _ = run(*words)
    assert f"cluster      {verdict}" in out


def test_missing_cluster_is_reported(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    code, out, _ = run(*LLAMA_8B, "--cluster")
    assert code == 0
    reason = "there is no kubeconfig (/nonexistent); set KUBECONFIG to one"
    assert f"cluster      unknown: no cluster: {reason}\n" in out


def test_documentation_shows_the_printed_output(run: Any) -> None:
    text = (ROOT / "docs/guides/planning.md").read_text(encoding="utf-8")
    shown = text.split("```")[1].strip("\n")
    command, _, printed = shown.partition("\n")
    _, out, _ = run(*command.removeprefix("$ stoker plan ").split())
    assert out.rstrip("\n") == printed


def test_every_reason_is_documented() -> None:
    """Each reason in the planner's sources is in the documentation's table."""
    shared = ROOT / "engine/stoker_engine/sizing/sharding.py"
    paths = [shared, *(ROOT / "operator/stoker_operator/plan").glob("*.py")]
    sources = "\n".join(path.read_text() for path in paths)
    pattern = r"reason=\"(\w+)\"|(?:Problem|Objection)\(\s*\"(\w+)\"|, \"(Unsupported\w+)\"\)"
    named = set(re.findall(pattern, sources))
    reasons = {name for names in named for name in names if name}
    text = (ROOT / "docs/guides/planning.md").read_text(encoding="utf-8")
    assert {"DoesNotFit", "HeadsNotDivisible", "UnsupportedDtype", "NoImage"} <= reasons
    assert not {reason for reason in reasons if f"`{reason}`" not in text}


def test_cpu_is_shared_by_ranks(run: Any, answer: Any) -> None:
    flags = ("--model", "Qwen/Qwen3-8B", "--accelerator", "cpu", "--memory", "96Gi", "-tp", "2", "-dp", "2")
    _, text, _ = run(*flags)
    assert "1 × cpu, shared by 4 ranks" in text
    code, found = answer(*flags)
    assert code == 0
    assert [(way["tensor"], way["data"]) for way in found["options"]] == [(4, 1), (2, 2), (1, 4)]
    assert found["recommendation"]["hardware"] == {"count": 1, "nodes": 1}


SMALL_DEMO = ["--model", "demo://gemma-3-270m", "--memory", "4Gi"]


def test_adapters_are_counted_and_shown(run: Any, answer: Any) -> None:
    _, without = answer(*SMALL_DEMO)
    code, out, _ = run(*SMALL_DEMO, "--enable-lora", "--max-loras", "8", "--max-lora-rank", "64")
    assert code == 0
    assert "adapters     0.7 GiB (8 × rank 64)" in out.splitlines()
    _, found = answer(*SMALL_DEMO, "--enable-lora", "--max-loras", "8", "--max-lora-rank", "64")
    _, few = answer(*SMALL_DEMO, "--enable-lora", "--max-lora-rank=64", "--lora-target-modules", "q_proj", "v_proj")
    (way,), (narrow,), (plain,) = found["options"], few["options"], without["options"]
    assert "adapterBytesPerGpu" not in plain
    assert 0 < narrow["adapterBytesPerGpu"] < way["adapterBytesPerGpu"]
    assert way["kvTokensPerCopy"] < narrow["kvTokensPerCopy"] < plain["kvTokensPerCopy"]


@pytest.mark.parametrize(("memory", "helps"), [("4Gi", True), ("1Gi", False)])
def test_fewer_adapters_are_proposed_only_if_that_suffices(memory: str, helps: bool, answer: Any) -> None:
    flags = ["--enable-lora", "--max-lora-rank", "512", "--max-cpu-loras", "50"]
    code, found = answer("--model", "demo://gemma-3-270m", "--memory", memory, *flags)
    assert code == 2
    (error,) = found["errors"]
    assert "adapters 36.4 GiB (50 × rank 512)" in error["message"]
    assert ("lower --max-loras, --max-cpu-loras or --max-lora-rank" in error["remedy"]) == helps


@pytest.mark.parametrize("flags", [["--max-loras", "8"], ["--lora-target-modules", "q_proj"]])
def test_adapter_flags_require_enable_lora(flags: list[str], run: Any) -> None:
    code, _, err = run(*SMALL_DEMO, *flags)
    assert code == 2 and f"{flags[0]}: requires --enable-lora" in err


def test_adapter_flags_do_not_change_other_runtimes_plans(answer: Any) -> None:
    flags = ["--runtime", "vllm", "--enable-lora", "--max-loras", "8"]
    assert answer(*LLAMA_8B, *flags) == answer(*LLAMA_8B, "--runtime", "vllm")


def test_plot_shows_each_layouts_memory(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--model", "meta-llama/Meta-Llama-3-70B", "--accelerator", "nvidia-h100-80gb", "--count", "8"]
    code, out, _ = run(*words, "--runtime", "vllm", "--plot")
    assert code == 0
    text = (ROOT / "docs/guides/planning.md").read_text(encoding="utf-8")
    picture = out.split("\n\n")[-1].strip("\n")
    assert picture in text, "the documentation shows what is printed"
    *fitting, impossible = [line.split("│") for line in picture.splitlines()[2:]]
    assert impossible[1].startswith("█"), "a layout that does not fit exceeds the mark"
    for _, beyond in fitting:
        parts = re.findall(r"\d+\.\d", beyond)
        assert sum(map(float, parts)) == pytest.approx(73.3, abs=0.2), "the parts add up to the usable memory"


def test_plot_needs_the_table_and_known_memory(run: Any, capsys: Any) -> None:
    for words in (["-o", "json"], ["-o", "yaml"]):
        with pytest.raises(SystemExit, match="2"):
            run(*LLAMA_8B, "--plot", *words)
        assert "--plot draws below the table" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run("--model", "meta-llama/Meta-Llama-3-8B", "--cluster", "--plot")
    assert "add --accelerator" in capsys.readouterr().err
    code, out, _ = run("--model", "demo://gemma-3-270m", "--plot")
    assert code == 0
    assert "nothing to plot: the memory is not known; set spec.hardware.resources.limits.memory" in out
    _, out, _ = run("--model", "org/unknown", "--accelerator", "nvidia-l4", "--plot")
    assert "nothing to plot: " in out


def test_steps_without_graphs_leave_more_memory_to_the_cache(answer: Any) -> None:
    def planned(*words: str) -> Any:
        _, found = answer("--model", "Qwen/Qwen3-8B", "--accelerator", "nvidia-l4", "--count", "1", *words)
        return next(way for way in found["options"] if way["verdict"] == "chosen")["kvTokensPerCopy"]

    captured = planned()
    assert captured == planned("--attention-backend", "triton") == planned("--attention-backend=auto")
    assert captured < planned("--enforce-eager") == planned("--attention-backend", "sdpa")
    assert captured < planned("--max-num-seqs", "8") < planned("--max-num-seqs", "8", "--max-num-batched-tokens", "64")


def test_attention_kernels_are_those_of_runtime_stoker(answer: Any) -> None:
    code, found = answer(*LLAMA_8B, "--runtime", "vllm", "--attention-backend", "triton")
    assert code == 2
    (error,) = found["errors"]
    assert (error["field"], error["remedy"]) == ("--attention-backend", "omit it")


def test_vllm_without_graphs_has_a_gibibyte_more(answer: Any) -> None:
    sizes = []
    for words in ([], ["--enforce-eager"]):
        code, found = answer(*LLAMA_8B, "--runtime", "vllm", *words)
        assert code == 0
        sizes.append(next(way["kvTokensPerCopy"] for way in found["options"] if way["tensor"] == 4))
    assert sizes[1] - sizes[0] == (1 << 30) // (2 * 32 * 2 * 128 * 2)
