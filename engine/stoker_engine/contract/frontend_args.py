"""The arguments of the HTTP front end, with vLLM's names where vLLM has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.contract.names import CONTENT_FORMATS, REASONING_PARSERS, TOOL_CALL_PARSERS, ContentFormat

#: Listened on by a socket of IPv6 that takes IPv4 too; one of IPv4 alone where a machine has no IPv6.
EVERY_ADDRESS: Final = "::"

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_LOG_FORMATS = ("text", "json")
_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")


def _secret(help: str, default: Any, group: str) -> Any:
    """A flag that no `repr` shows."""
    metadata = {"help": help, "choices": (), "positional": False, "group": group}
    return field(default=default, repr=False, metadata=metadata)


@dataclass(frozen=True)
class FrontendArgs:
    """How the HTTP server listens, what it admits, how it renders prompts, what it logs, and how it stops.

    Raises:
        ArgumentError: a value is out of range, naming the flag and the remedy.
    """

    host: str = flag("address to listen on; :: is every address of IPv6 and IPv4", EVERY_ADDRESS)
    port: int = flag("port to listen on", 8000)
    root_path: str = flag("path prefix under which a proxy serves this server", "")
    headless: bool = flag("serve no API: this node runs its ranks for node 0 (--nnodes, --node-rank)", False)
    ssl_keyfile: str | None = flag("private key of the TLS certificate (PEM)", None, group="TLS")
    ssl_certfile: str | None = flag("TLS certificate (PEM); with it the server serves HTTPS", None)
    ssl_ca_certs: str | None = flag("certificates that clients' own are checked against (PEM)", None)
    ssl_cert_reqs: int = flag("client certificates: 0 none, 1 optional, 2 required", 0)
    ssl_ciphers: str | None = flag("OpenSSL's list of ciphers, for TLS 1.2 and below", None)

    api_key: tuple[str, ...] = _secret(
        "key(s) of which a client must present one; anyone on this machine can read a command line, so prefer "
        "--api-key-file, or the environment's STOKER_API_KEY or VLLM_API_KEY, which count where neither flag is given",
        (),
        group="who may call",
    )
    api_key_file: str | None = flag(
        "file with such keys, one a line, or folder of such files (a mounted Secret); read again when it changes", None
    )
    allowed_origins: tuple[str, ...] = flag("origins whose web pages may call this server (CORS); * is any", ())
    allowed_methods: tuple[str, ...] = flag("HTTP methods they may use", ("*",))
    allowed_headers: tuple[str, ...] = flag("headers they may send", ("*",))
    allow_credentials: bool = flag("let them send cookies and credentials", False)

    max_num_queued_reqs: int | None = flag(
        "most sequences in flight, running or waiting, of all engines of the model together; further requests get 429; "
        "default: no limit",
        None,
        group="limits",
    )
    max_num_queued_tokens: int | None = flag(
        "most prompt tokens of requests that wait for their first token, of all engines of the model together; beyond "
        "it new requests get 429; default: no limit",
        None,
    )
    max_request_bytes: int = flag("largest request body; a larger one gets 413", 8 * 1024**2)
    h11_max_incomplete_event_size: int = flag("most bytes of a request's line and headers; beyond it 431", 4 * 1024**2)
    h11_max_header_count: int = flag("most headers of a request; beyond it 431", 256)
    request_header_timeout: float = flag(
        "seconds in which a request's line and headers must have come; else 408; 0: no limit", 60.0
    )
    request_body_timeout: float = flag(
        "seconds over which the rate at which a body comes is measured; one that comes slower than "
        "--min-request-body-data-rate gets 408; 0: no limit",
        60.0,
    )
    min_request_body_data_rate: int = flag("bytes/s at which a body must come; 0: any progress will do", 240)
    send_timeout: float = flag(
        "seconds after which a response ends, and its generation with it, whose client takes nothing of it; "
        "0: no limit",
        60.0,
    )

    chat_template: str | None = flag(
        "a Jinja chat template: a file, or the template itself; default: the tokenizer's own",
        None,
        group="prompts and answers",
    )
    chat_template_content_format: ContentFormat = flag(
        "how the chat template is given what messages say: as strings, or as lists of parts (openai); default: as it "
        "was sent, where the template writes that, else as the other",
        "auto",
        choices=CONTENT_FORMATS,
    )
    trust_request_chat_template: bool = flag("let a request bring a chat template of its own", False)
    default_chat_template_kwargs: str | None = flag(
        "JSON object: variables for the chat template; a request's chat_template_kwargs come before them", None
    )
    exclude_tools_when_tool_choice_none: bool = flag(
        "leave tools out of the prompt of a request with tool_choice: none", False
    )
    tool_call_parser: str | None = flag(
        "how the model writes calls of tools; default: what its chat template shows, where that is sure",
        None,
        choices=TOOL_CALL_PARSERS,
    )
    enable_auto_tool_choice: bool = flag(
        "needs nothing here: the model may call tools by itself wherever it is known how it writes calls", False
    )
    reasoning_parser: str | None = flag(
        "how the model sets its reasoning apart; default: what its chat template shows, where that is sure",
        None,
        choices=REASONING_PARSERS,
    )
    return_tokens_as_token_ids: bool = flag("write tokens in logprobs as token_id:N", False)
    enable_prompt_tokens_details: bool = flag("report cached prompt tokens in usage", True)
    enable_force_include_usage: bool = flag("end every stream with its usage", False)
    disable_fastapi_docs: bool = flag("do not serve /openapi.json", False)

    lora_modules: tuple[str, ...] = flag(
        "adapters that are served from the start, each as NAME=PATH, or as vLLM's JSON: "
        '{"name": …, "path": …, "base_model_name": …}; the flag may be repeated',
        (),
        group="LoRA adapters (--enable-lora)",
        repeatable=True,
    )
    lora_config: str | None = flag(
        "YAML or JSON file with the adapters to serve, adapters: [{name: …, path: …}]; read again when it changes: new "
        "ones are loaded, missing ones unloaded, those with another path loaded again",
        None,
    )
    lora_dir: tuple[str, ...] = flag(
        "folder(s) that the paths of --lora-config and of /v1/load_lora_adapter must lead into", (), repeatable=True
    )
    allow_runtime_lora_updating: bool = flag(
        "serve /v1/load_lora_adapter and /v1/unload_lora_adapter to --admin-api-key-file; the environment's "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING counts where the flag is not given",
        False,
    )
    admin_api_key_file: str | None = flag(
        "file with the keys for these two, in the form of --api-key-file; keys of --api-key do not open them", None
    )

    log_format: str = flag("how log lines are written", "text", choices=_LOG_FORMATS, group="logs")
    uvicorn_log_level: str = flag("log level of the HTTP server", "info", choices=_LOG_LEVELS)
    disable_uvicorn_access_log: bool = flag("do not log HTTP requests", False)
    disable_access_log_for_endpoints: str = flag(
        "comma-separated paths whose HTTP requests are not logged",
        "/health,/ready,/live,/ping,/metrics,/load,/copies",
    )
    enable_log_requests: bool = flag("log each request's prompt and parameters", False)
    max_log_len: int | None = flag("most characters of a logged prompt; default: no limit", None)
    disable_log_stats: bool = flag("do not log the throughput, which is otherwise logged every 10 s while busy", False)

    step_timeout: float = flag(
        "seconds after which a step or a phase of loading counts as stuck: that engine is killed",
        300.0,
        group="health and the end",
    )
    max_engine_restarts: int = flag(
        "how many deaths of the engine an hour the server outlives, by loading it again while new requests wait; "
        "beyond that, or where memory ran out or the engine was stuck, it ends. An engine beside others that "
        "serve is loaded again whatever it died of, 3 times an hour at least",
        0,
    )
    shutdown_grace: float = flag(
        "seconds after SIGTERM in which requests that still arrive are served, while traffic is led elsewhere",
        5.0,
    )
    shutdown_timeout: float = flag("seconds that requests in flight then get to finish", 30.0)

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, _json_list(name, getattr(self, name)))
        if not 0 <= self.port <= 65535:
            raise ArgumentError("--port", f"must be 0 to 65535, got {self.port}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ArgumentError("--root-path", f"must begin with a slash and not end with one, got {self.root_path!r}")
        for name, allowed in (
            ("uvicorn_log_level", _LOG_LEVELS),
            ("log_format", _LOG_FORMATS),
            ("chat_template_content_format", CONTENT_FORMATS),
            ("tool_call_parser", (None, *TOOL_CALL_PARSERS)),
            ("reasoning_parser", (None, *REASONING_PARSERS)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    argv.flag_name(name), f"{getattr(self, name)!r} is not one of {', '.join(filter(None, allowed))}"
                )
        self._check_ssl()
        for name in (
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "min_request_body_data_rate",
            "max_log_len",
            "max_engine_restarts",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ArgumentError(argv.flag_name(name), f"must be at least 0, got {value}")
        for name in ("max_request_bytes", "h11_max_incomplete_event_size", "h11_max_header_count"):
            if getattr(self, name) < 1:
                raise ArgumentError(argv.flag_name(name), f"must be at least 1, got {getattr(self, name)}")
        for name in (
            "request_header_timeout",
            "request_body_timeout",
            "send_timeout",
            "shutdown_grace",
            "shutdown_timeout",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(
                    argv.flag_name(name), f"must be 0 or more seconds, and finite, got {getattr(self, name)}"
                )
        if not 0 < self.step_timeout < float("inf"):
            raise ArgumentError("--step-timeout", f"must be above 0 seconds, and finite, got {self.step_timeout}")
        if not all(key and key == key.strip() and key.isprintable() for key in self.api_key):
            raise ArgumentError(
                "--api-key", "a key must not be empty, nor hold spaces at its ends or control characters"
            )
        _ = self.chat_template_defaults
        self._check_adapters()

    @property
    def adapters(self) -> tuple[LoRAModule, ...]:
        """`lora_modules`, parsed."""
        try:
            return tuple(map(LoRAModule.of_word, self.lora_modules))
        except ValueError as error:
            raise ArgumentError("--lora-modules", str(error)) from error

    @property
    def lora_flags(self) -> list[str]:
        """The flags that are given and mean something only with ``--enable-lora``."""
        names = ("lora_modules", "lora_config", "lora_dir", "allow_runtime_lora_updating", "admin_api_key_file")
        return [argv.flag_name(name) for name in names if getattr(self, name)]

    def check_runtime_lora_updating(self, source: str = "--allow-runtime-lora-updating") -> None:
        """Checks what loading adapters at runtime needs.

        Args:
            source: what allows it.

        Raises:
            ArgumentError: a key or a folder is missing.
        """
        if self.admin_api_key_file is None:
            raise ArgumentError(
                source, "needs --admin-api-key-file: a client that loads adapters chooses what this server answers"
            )
        if not self.lora_dir:
            raise ArgumentError(source, "needs --lora-dir, the folders that adapters may be loaded from")

    @property
    def chat_template_defaults(self) -> dict[str, Any]:
        """`default_chat_template_kwargs`, parsed."""
        if self.default_chat_template_kwargs is None:
            return {}
        try:
            parsed = json.loads(self.default_chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("--default-chat-template-kwargs", f"is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ArgumentError(
                "--default-chat-template-kwargs", 'must be an object such as {"enable_thinking": false}'
            )
        return parsed

    def _check_adapters(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise ArgumentError("--lora-modules", f"two adapters have the name {doubled!r}; give each its own")
        if not all(self.lora_dir):
            raise ArgumentError("--lora-dir", "must name a folder")
        if self.lora_config is not None and not self.lora_dir:
            raise ArgumentError("--lora-config", "needs --lora-dir, the folders that its paths may lead into")
        if self.allow_runtime_lora_updating:
            self.check_runtime_lora_updating()

    def _check_ssl(self) -> None:
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_ciphers or self.ssl_cert_reqs) and not self.ssl_certfile:
            raise ArgumentError("--ssl-certfile", "is needed by the other --ssl-* flags")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ArgumentError("--ssl-cert-reqs", f"must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ArgumentError("--ssl-ca-certs", "is needed to check clients' certificates")


def _json_list(name: str, value: tuple[str, ...]) -> tuple[str, ...]:
    """vLLM takes these lists as one word of JSON; we take that too."""
    if len(value) != 1 or not value[0].startswith("["):
        return value
    try:
        parsed = json.loads(value[0])
    except (ValueError, RecursionError) as error:
        raise ArgumentError(argv.flag_name(name), f"is not JSON: {error}") from error
    if not all(isinstance(item, str) for item in parsed):
        raise ArgumentError(argv.flag_name(name), "must be a list of strings")
    return tuple(parsed)
