"""vLLM flags that Stoker does not have, with the message for users who migrate a command line."""

from __future__ import annotations

from typing import Final

_GRAPHS = "compilation and graph capture are automatic; omit it, or use --enforce-eager"
_TEXT = "only text input is supported; omit it"
_UNBUILT = "is not supported yet; omit it"

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
    "-q": "use --quantization",
    "--lora-extra-vocab-size": "adapters with additional tokens are not supported; omit it",
    "--long-lora-scaling-factors": "adapters for longer contexts are not supported; omit it",
    "--max-lora-cls-labels": "only text generation is supported; omit it",
    "--default-mm-loras": _TEXT,
    **dict.fromkeys(("--enable-tower-connector-lora", "--no-enable-tower-connector-lora"), _TEXT),
    **dict.fromkeys(
        (
            *("--fully-sharded-loras", "--no-fully-sharded-loras"),
            *("--specialize-active-lora", "--no-specialize-active-lora"),
            *("--enable-mixed-moe-lora-format", "--no-enable-mixed-moe-lora-format"),
            *("--enable-moe-shared-loras", "--no-enable-moe-shared-loras"),
        ),
        "how adapters are split and computed is chosen automatically; omit it",
    ),
    **dict.fromkeys(("--speculative-config", "--speculative-model"), f"speculative decoding {_UNBUILT}"),
    **dict.fromkeys(
        ("--tool-parser-plugin", "--reasoning-parser-plugin"),
        "external parsers are not supported; choose one with --tool-call-parser or --reasoning-parser",
    ),
    **dict.fromkeys(
        ("--guided-decoding-backend", "--structured-outputs-config"), "all grammars use llguidance; omit it"
    ),
    **dict.fromkeys(
        ("--swap-space", "--cpu-offload-gb", "--preemption-mode"),
        "nothing is swapped or offloaded: preempted requests are recomputed; omit it",
    ),
    **dict.fromkeys(
        ("--load-format", "--tokenizer-mode", "--config-format"), "detected from the model's files; omit it"
    ),
    **dict.fromkeys(
        ("--disable-log-requests", "--no-enable-log-requests"),
        "prompts are logged only with --enable-log-requests; omit it",
    ),
    **dict.fromkeys(("--task", "--runner", "--convert"), "only text generation is supported; omit it"),
    **dict.fromkeys(
        ("--distributed-executor-backend", "--worker-cls", "--data-parallel-backend"),
        "the engine chooses its own processes; omit it",
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
        "engines are distributed equally over the nodes, and node 0 routes to all; use --nnodes and --node-rank",
    ),
    **dict.fromkeys(("--data-parallel-address", "-dpa"), "nodes connect to node 0; use --master-addr and --nnodes"),
    **dict.fromkeys(("--data-parallel-rpc-port", "-dpp"), "nodes connect to node 0; use --master-port and --nnodes"),
    **dict.fromkeys(("--num-scheduler-steps", "--use-v2-block-manager"), "there is only one scheduler; omit it"),
    "--kv-transfer-config": f"disaggregated prefill {_UNBUILT}",
    "--otlp-traces-endpoint": f"tracing {_UNBUILT}",
    "--hf-token": "set the environment variable HF_TOKEN instead",
    "--download-dir": "set the environment variable HF_HOME instead",
    "--config": "flags are read only from the command line",
    "--rope-scaling": "edit the model's config.json instead",
    "--rope-theta": "edit the model's config.json instead",
    "--hf-overrides": "edit the model's config.json instead",
    "--disable-frontend-multiprocessing": "the engine always runs in a process of its own; omit it",
}
