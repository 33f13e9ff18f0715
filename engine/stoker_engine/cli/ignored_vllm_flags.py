"""Flags of vLLM that mean nothing here, and why: who moves a command line over learns what to leave out."""

from __future__ import annotations

from typing import Final

_GRAPHS = "what is compiled and captured is chosen by itself; leave it out, or use --enforce-eager"
_TEXT = "only text goes in; leave it out"
_UNBUILT = "is not built yet; leave it out"

FOREIGN_FLAGS: Final[dict[str, str]] = {
    **dict.fromkeys(("--compilation-config", "-O", "--cuda-graph-sizes", "--max-seq-len-to-capture"), _GRAPHS),
    **dict.fromkeys(
        (
            "--limit-mm-per-prompt",
            "--mm-processor-kwargs",
            "--allowed-local-media-path",
        ),
        _TEXT,
    ),
    "-q": "write --quantization",
    "--lora-extra-vocab-size": "adapters that add tokens are refused; leave it out",
    "--long-lora-scaling-factors": "adapters for longer contexts are not served; leave it out",
    "--max-lora-cls-labels": "models generate text here, nothing else; leave it out",
    "--default-mm-loras": _TEXT,
    **dict.fromkeys(("--enable-tower-connector-lora", "--no-enable-tower-connector-lora"), _TEXT),
    **dict.fromkeys(
        (
            *("--fully-sharded-loras", "--no-fully-sharded-loras"),
            *("--specialize-active-lora", "--no-specialize-active-lora"),
            *("--enable-mixed-moe-lora-format", "--no-enable-mixed-moe-lora-format"),
            *("--enable-moe-shared-loras", "--no-enable-moe-shared-loras"),
        ),
        "how adapters are split and computed is chosen by itself; leave it out",
    ),
    **dict.fromkeys(("--speculative-config", "--speculative-model"), f"speculative decoding {_UNBUILT}"),
    **dict.fromkeys(
        ("--tool-parser-plugin", "--reasoning-parser-plugin"),
        "no parsers are loaded from elsewhere; choose one with --tool-call-parser or --reasoning-parser",
    ),
    **dict.fromkeys(
        ("--guided-decoding-backend", "--structured-outputs-config"), "llguidance keeps all grammars; leave it out"
    ),
    **dict.fromkeys(
        ("--swap-space", "--cpu-offload-gb", "--preemption-mode"),
        "nothing is swapped: a preempted request is computed again; leave it out",
    ),
    **dict.fromkeys(
        ("--load-format", "--tokenizer-mode", "--config-format"), "known from the model's files; leave it out"
    ),
    **dict.fromkeys(
        ("--disable-log-requests", "--no-enable-log-requests"),
        "prompts are logged only with --enable-log-requests; leave it out",
    ),
    **dict.fromkeys(("--task", "--runner", "--convert"), "models generate text here, nothing else; leave it out"),
    **dict.fromkeys(
        ("--distributed-executor-backend", "--worker-cls", "--api-server-count", "--data-parallel-backend"),
        "there is one server process, and the engine chooses its own processes; leave it out",
    ),
    **dict.fromkeys(
        (
            *(
                "--data-parallel-size-local",
                "-dpl",
                "--data-parallel-start-rank",
                "-dpr",
                "--data-parallel-rank",
                "-dpn",
            ),
            *("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe"),
        ),
        "copies are dealt to the nodes in equal parts, and node 0 routes to all; write --nnodes and --node-rank",
    ),
    **dict.fromkeys(("--data-parallel-address", "-dpa"), "nodes meet at node 0; write --master-addr, and --nnodes"),
    **dict.fromkeys(("--data-parallel-rpc-port", "-dpp"), "nodes meet at node 0; write --master-port, and --nnodes"),
    **dict.fromkeys(("--num-scheduler-steps", "--use-v2-block-manager"), "there is one scheduler; leave it out"),
    "--kv-transfer-config": f"disaggregated prefill {_UNBUILT}",
    "--otlp-traces-endpoint": f"tracing {_UNBUILT}",
    "--hf-token": "set the environment's HF_TOKEN instead",
    "--download-dir": "set the environment's HF_HOME instead",
    "--config": "flags are read from the command line only",
    "--rope-scaling": "edit the model's config.json instead",
    "--rope-theta": "edit the model's config.json instead",
    "--hf-overrides": "edit the model's config.json instead",
    "--disable-frontend-multiprocessing": "the engine always runs in a process of its own; leave it out",
}
