"""Arguments of the HTTP front end, with vLLM's names where vLLM has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from stoker_common.errors import ArgumentError
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.lora_modules import LoRAModule
from stoker_engine.contract.names import CONTENT_FORMATS, REASONING_PARSERS, TOOL_CALL_PARSERS, ContentFormat

#: Listen on all addresses, IPv6 and IPv4, with one IPv6 socket; on a machine without IPv6 on all IPv4 addresses.
EVERY_ADDRESS: Final = "::"

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_LOG_FORMATS = ("text", "json")
_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")


def _secret(help: str, default: Any, group: str) -> Any:
    """Declare a flag whose value `repr` omits."""
    metadata = {"help": help, "choices": (), "positional": False, "group": group}
    return field(default=default, repr=False, metadata=metadata)


@dataclass(frozen=True)
class FrontendArgs:
    """How the HTTP server listens, admits requests, renders prompts, logs and stops.

    Raises:
        ArgumentError: a value is invalid, or a flag lacks another one that it requires; the message names the flag and
            the remedy.
    """

    host: str = flag("address to listen on; :: means all addresses of IPv6 and IPv4", EVERY_ADDRESS)
    port: int = flag("port to listen on", 8000)
    api_server_count: int = flag(
        "number of front-end processes that share the port; several are worth their memory if one core cannot write "
        "all streams",
        1,
        short="-asc",
    )
    root_path: str = flag("path prefix under which a proxy serves this server", "")
    headless: bool = flag("serve no API: this node runs its ranks for node 0 (--nnodes, --node-rank)", False)
    ssl_keyfile: str | None = flag("private key of the TLS certificate (PEM)", None, group="TLS")
    ssl_certfile: str | None = flag("TLS certificate (PEM); enables HTTPS", None)
    ssl_ca_certs: str | None = flag("CA certificates that verify client certificates (PEM)", None)
    ssl_cert_reqs: int = flag("client certificates: 0 none, 1 optional, 2 required", 0)
    ssl_ciphers: str | None = flag("OpenSSL cipher list, for TLS up to 1.2", None)

    api_key: tuple[str, ...] = _secret(
        "accepted API key(s); command lines are visible to all users of this machine, so prefer --api-key-file, or the "
        "environment variables STOKER_API_KEY and VLLM_API_KEY, which apply if neither flag is given",
        (),
        group="access",
    )
    api_key_file: str | None = flag(
        "file with API keys, one a line, or folder of such files (a mounted Secret); reread when it changes", None
    )
    allowed_origins: tuple[str, ...] = flag("origins of web pages that may call this server (CORS); * means any", ())
    allowed_methods: tuple[str, ...] = flag("HTTP methods that pages of --allowed-origins may use", ("*",))
    allowed_headers: tuple[str, ...] = flag("headers that pages of --allowed-origins may send", ("*",))
    allow_credentials: bool = flag("allow pages of --allowed-origins to send cookies and credentials", False)

    max_num_queued_reqs: int | None = flag(
        "maximum sequences in flight, running or waiting, over all engines; further requests get 429; "
        "default: no limit",
        None,
        group="limits",
    )
    max_num_queued_tokens: int | None = flag(
        "maximum prompt tokens of requests that wait for their first token, over all engines; above it new requests "
        "get 429; default: no limit",
        None,
    )
    max_request_bytes: int = flag("maximum size of a request body; larger ones get 413", 8 * 1024**2)
    h11_max_incomplete_event_size: int = flag("maximum bytes of request line and headers; above it 431", 4 * 1024**2)
    h11_max_header_count: int = flag("maximum headers of a request; above it 431", 256)
    request_header_timeout: float = flag(
        "seconds that a client may take to send the request's line and headers; later ones get 408; 0: no limit", 60.0
    )
    request_body_timeout: float = flag(
        "seconds over which the data rate of a body is measured; below --min-request-body-data-rate the request gets "
        "408; 0: no limit",
        60.0,
    )
    min_request_body_data_rate: int = flag("minimum data rate of a body in bytes/s; 0: any progress", 240)
    send_timeout: float = flag(
        "seconds after which a response whose client reads nothing is aborted, with its generation; 0: no limit",
        60.0,
    )

    chat_template: str | None = flag(
        "Jinja chat template: a file, or the template itself; default: the tokenizer's",
        None,
        group="prompts and answers",
    )
    chat_template_content_format: ContentFormat = flag(
        "form in which the chat template gets message contents: string, or lists of parts (openai); auto: as sent, if "
        "the template renders it, otherwise converted to the other form",
        "auto",
        choices=CONTENT_FORMATS,
    )
    trust_request_chat_template: bool = flag("accept chat templates in requests", False)
    default_chat_template_kwargs: str | None = flag(
        "JSON object: variables for the chat template; a request's chat_template_kwargs take precedence", None
    )
    exclude_tools_when_tool_choice_none: bool = flag(
        "omit tools from the prompt of a request with tool_choice: none", False
    )
    tool_call_parser: str | None = flag(
        "format of the model's tool calls; default: detected from the chat template, if certain",
        None,
        choices=TOOL_CALL_PARSERS,
    )
    enable_auto_tool_choice: bool = flag(
        "no effect; accepted for vLLM: models may call tools whenever their call format is known", False
    )
    reasoning_parser: str | None = flag(
        "format of the model's reasoning; default: detected from the chat template, if certain",
        None,
        choices=REASONING_PARSERS,
    )
    return_tokens_as_token_ids: bool = flag("write tokens in logprobs as token_id:N", False)
    enable_prompt_tokens_details: bool = flag("report cached prompt tokens in usage", True)
    stream_interval: int = flag(
        "tokens after which a stream sends its next event, except the first event; a request's stream_interval is used "
        "if it is larger",
        1,
    )
    enable_force_include_usage: bool = flag("end every stream with an event that reports usage", False)
    disable_fastapi_docs: bool = flag("do not serve /openapi.json", False)

    lora_modules: tuple[str, ...] = flag(
        "adapters to load at the start, each as NAME=PATH, or as vLLM's JSON: "
        '{"name": …, "path": …, "base_model_name": …}; may be repeated',
        (),
        group="LoRA adapters (--enable-lora)",
        repeatable=True,
    )
    lora_config: str | None = flag(
        "YAML or JSON file with the adapters to serve, adapters: [{name: …, path: …}]; reread when it changes: new "
        "adapters are loaded, missing ones unloaded, those with another path reloaded",
        None,
    )
    lora_dir: tuple[str, ...] = flag(
        "folder(s) that must contain all adapters of --lora-config and /v1/load_lora_adapter", (), repeatable=True
    )
    allow_runtime_lora_updating: bool = flag(
        "serve /v1/load_lora_adapter and /v1/unload_lora_adapter to keys of --admin-api-key-file; also enabled by the "
        "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        False,
    )
    admin_api_key_file: str | None = flag(
        "file with keys for /v1/load_lora_adapter and /v1/unload_lora_adapter, in the form of --api-key-file; keys of "
        "--api-key are not accepted there",
        None,
    )

    log_format: str = flag("format of log lines", "text", choices=_LOG_FORMATS, group="logs")
    uvicorn_log_level: str = flag("log level of the HTTP server", "info", choices=_LOG_LEVELS)
    disable_uvicorn_access_log: bool = flag("do not log HTTP requests", False)
    disable_access_log_for_endpoints: str = flag(
        "comma-separated paths that the access log omits",
        "/health,/ready,/live,/ping,/metrics,/load,/copies",
    )
    enable_log_requests: bool = flag("log each request's prompt and parameters", False)
    max_log_len: int | None = flag("maximum characters of a logged prompt; default: no limit", None)
    disable_log_stats: bool = flag("do not log the throughput every 10 s while busy", False)

    step_timeout: float = flag(
        "seconds after which a step or a loading phase counts as stuck, and its engine is killed",
        300.0,
        group="health and shutdown",
    )
    max_engine_restarts: int = flag(
        "maximum restarts of a dead engine per hour, while new requests wait; after that, or if memory ran out or the "
        "engine was stuck, the server ends. While other engines serve, an engine is restarted whatever the cause, at "
        "least 3 times an hour",
        0,
    )
    shutdown_grace: float = flag(
        "seconds after SIGTERM in which new requests are still served, until traffic goes elsewhere",
        5.0,
    )
    shutdown_timeout: float = flag("seconds after --shutdown-grace in which requests in flight may finish", 30.0)

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
        for name in (
            "api_server_count",
            "max_request_bytes",
            "h11_max_incomplete_event_size",
            "h11_max_header_count",
            "stream_interval",
        ):
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
                "--api-key", "a key must not be empty, begin or end with a space, or contain control characters"
            )
        _ = self.chat_template_defaults
        self._check_adapters()

    @property
    def adapters(self) -> tuple[LoRAModule, ...]:
        """The adapters of `lora_modules`, parsed."""
        try:
            return tuple(map(LoRAModule.of_word, self.lora_modules))
        except ValueError as error:
            raise ArgumentError("--lora-modules", str(error)) from error

    @property
    def lora_flags(self) -> list[str]:
        """The given flags that require ``--enable-lora``."""
        names = ("lora_modules", "lora_config", "lora_dir", "allow_runtime_lora_updating", "admin_api_key_file")
        return [argv.flag_name(name) for name in names if getattr(self, name)]

    def check_runtime_lora_updating(self, source: str = "--allow-runtime-lora-updating") -> None:
        """Check the flags that loading adapters at runtime requires.

        Args:
            source: flag or environment variable that enables loading at runtime, for messages.

        Raises:
            ArgumentError: `admin_api_key_file` or `lora_dir` is not set.
        """
        if self.admin_api_key_file is None:
            raise ArgumentError(
                source, "requires --admin-api-key-file: clients that load adapters control what the server answers"
            )
        if not self.lora_dir:
            raise ArgumentError(source, "requires --lora-dir, the folders from which adapters may be loaded")

    @property
    def chat_template_defaults(self) -> dict[str, Any]:
        """The object in `default_chat_template_kwargs`, parsed; empty if it is None."""
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
            raise ArgumentError("--lora-modules", f"two adapters have the name {doubled!r}; names must be unique")
        if not all(self.lora_dir):
            raise ArgumentError("--lora-dir", "must name a folder")
        if self.lora_config is not None and not self.lora_dir:
            raise ArgumentError("--lora-config", "requires --lora-dir, the folders that must contain its adapters")
        if self.allow_runtime_lora_updating:
            self.check_runtime_lora_updating()

    def _check_ssl(self) -> None:
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_ciphers or self.ssl_cert_reqs) and not self.ssl_certfile:
            raise ArgumentError("--ssl-certfile", "is required by the other --ssl-* flags")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ArgumentError("--ssl-cert-reqs", f"must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ArgumentError("--ssl-ca-certs", "is required to verify client certificates")


def _json_list(name: str, value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of a flag; as in vLLM, they may be given as one value that is a JSON list."""
    if len(value) != 1 or not value[0].startswith("["):
        return value
    try:
        parsed = json.loads(value[0])
    except (ValueError, RecursionError) as error:
        raise ArgumentError(argv.flag_name(name), f"is not JSON: {error}") from error
    if not all(isinstance(item, str) for item in parsed):
        raise ArgumentError(argv.flag_name(name), "must be a list of strings")
    return tuple(parsed)
