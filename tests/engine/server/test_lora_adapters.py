"""Adapters for clients: selected by model in every API, listed, and loaded and unloaded with permission."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from stoker_common.errors import AdapterError, ArgumentError, EngineDeadError
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.adapters.registry import AdapterState
from stoker_engine.server.app import create_app
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.middleware.admin_keys import admin_keys

from ...support.waiting import until_async
from .conftest import FakeEngine, MakeService, serving_fake, wait_until
from .test_errors import error_of

MESSAGES = [{"role": "user", "content": "hi"}]
KEY = {"authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

MakeAdmin = Callable[..., Service]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder from which adapters may be loaded: a, b, and bad."""
    for name in ("a", "b", "bad"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "keys").write_text("admin\n")
    return tmp_path / "adapters"


@pytest.fixture
def make_admin(make_service: MakeService, folder: Path) -> MakeAdmin:
    """Create a service that loads adapters at runtime."""

    def make(**frontend: Any) -> Service:
        given = {
            "allow_runtime_lora_updating": True,
            "lora_dir": (str(folder),),
            "admin_api_key_file": str(folder.parent / "keys"),
        }
        return make_service(engine_args={"enable_lora": True}, **(given | frontend))

    return make


@pytest.fixture
def admin(make_admin: MakeAdmin) -> TestClient:
    return TestClient(create_app(make_admin()), raise_server_exceptions=False, headers=KEY)


def _load(client: TestClient, folder: Path, name: str = "ada", path: str = "a", **fields: Any) -> Any:
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(folder / path), **fields})


def test_adapters_are_loaded_replaced_and_unloaded(admin: TestClient, folder: Path, engine: FakeEngine) -> None:
    answer = _load(admin, folder)
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'ada' added successfully."
    assert "already been loaded" in error_of(_load(admin, folder), 400)["message"]
    assert _load(admin, folder, path="b", load_inplace=True).status_code == 200
    assert [Path(source.path).name for source in engine.adapters.values()] == ["b"]
    answer = admin.post(UNLOAD, json={"lora_name": "ada"})
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'ada' removed successfully."
    error = error_of(admin.post(UNLOAD, json={"lora_name": "ada"}), 404)
    assert "cannot be found" in error["message"]
    assert not engine.adapters


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"input": "a"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", REQUESTS)
def test_every_api_selects_the_adapter_by_model(
    admin: TestClient, folder: Path, engine: FakeEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    _load(admin, folder)
    for model, named, number in (("ada", "ada", 0), ("alias", "tiny", -1), ("tiny", "tiny", -1)):
        engine.adapters_asked.clear()
        answer = admin.post(path, json={"model": model, "stream": stream, **body})
        assert answer.status_code == 200, answer.text
        if stream:
            assert set(_models(answer.text)) == {named}
        else:
            assert answer.json()["model"] == named
        assert set(engine.adapters_asked) == {number}
    error = admin.post(path, json={"model": "bob", **body})
    assert error.status_code == 404
    assert "available: tiny, alias, ada" in error.json()["error"]["message"]


def _models(text: str) -> list[str]:
    """Return the models named in the events of a stream."""
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    whole = [event.get("message") or event.get("response") or event for event in events]
    return [each["model"] for each in whole if "model" in each]


def test_tokenization_accepts_adapter_names(admin: TestClient, folder: Path) -> None:
    _load(admin, folder)
    for model, status in (("ada", 200), ("bob", 404)):
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [65]}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ):
            assert admin.post(path, json={"model": model, **body}).status_code == status


def test_models_list_adapters(make_admin: MakeAdmin, folder: Path) -> None:
    module = {"name": "org/mod", "path": "/m", "base_model_name": "base"}
    service = make_admin(lora_modules=(json.dumps(module),))
    asyncio.run(service.load_modules())
    client = TestClient(create_app(service), headers=KEY)
    _load(client, folder)
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in models] == [
        ("tiny", "/models/tiny", None),
        ("alias", "/models/tiny", None),
        ("org/mod", "/m", "base"),
        ("ada", str(folder / "a"), "tiny"),
    ]
    assert {model["max_model_len"] for model in models} == {64}
    for model in models:
        assert client.get(f"/v1/models/{model['id']}").json() == model
    assert client.get("/v1/models/bob").status_code == 404


def test_only_admin_keys_permit_loads(make_admin: MakeAdmin, folder: Path, engine: FakeEngine) -> None:
    client = TestClient(create_app(make_admin(api_key=("user",), max_request_bytes=10)))
    for headers in ({}, {"authorization": "Bearer user"}, {"authorization": "admin"}, {"x-api-key": "user"}):
        for path in (LOAD, UNLOAD):
            answer = client.post(path, content=b"x" * 100, headers=headers)  # refused before it is read
            error = error_of(answer, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "--admin-api-key-file" in error["message"]
    assert client.post(LOAD, content=b"x" * 100, headers=KEY).status_code == 413
    assert client.get("/v1/models", headers=KEY).status_code == 401, "an admin key permits nothing else"
    assert not engine.adapter_loads


def test_admin_keys_are_reread_when_the_file_changes(make_admin: MakeAdmin, folder: Path) -> None:
    client = TestClient(create_app(make_admin()))
    assert _load(client, folder).status_code == 401
    (folder.parent / "keys").write_text("other\n")
    assert client.post(UNLOAD, json={"lora_name": "x"}, headers=KEY).status_code == 401
    assert client.post(UNLOAD, json={"lora_name": "x"}, headers={"x-api-key": "other"}).status_code == 404


def test_runtime_loads_are_refused_by_default(make_service: MakeService, folder: Path) -> None:
    client = TestClient(create_app(make_service(engine_args={"enable_lora": True}, api_key=("user",))))
    for path in (LOAD, UNLOAD):
        assert path in client.get("/openapi.json", headers={"x-api-key": "user"}).json()["paths"]
        error = error_of(client.post(path, json={}, headers=KEY), 403)
        assert error["type"] == "permission_error"
        assert "--allow-runtime-lora-updating" in error["message"]
    client = TestClient(create_app(make_service()))
    for path in (LOAD, UNLOAD):
        message = error_of(client.post(path, json={}), 404)["message"]
        assert "--enable-lora" in message and "--allow-runtime-lora-updating" in message
    assert LOAD not in client.get("/openapi.json").json()["paths"]


def test_vllms_environment_variable_permits_runtime_loads(folder: Path) -> None:
    keys = str(folder.parent / "keys")
    args = FrontendArgs(lora_dir=(str(folder),), admin_api_key_file=keys)
    variable = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    for value, allowed in (("1", True), ("true", True), ("True", True), ("0", False), ("", False), ("no", False)):
        assert (admin_keys(args, {variable: value}) is not None) is allowed
    for fields in ({}, {"lora_dir": ("/a",)}, {"admin_api_key_file": keys}):
        assert admin_keys(FrontendArgs(**fields), {}) is None
        with pytest.raises(ArgumentError, match=f"{variable}: requires --(admin-api-key-file|lora-dir)"):
            admin_keys(FrontendArgs(**fields), {variable: "1"})
    with pytest.raises(ArgumentError, match="--admin-api-key-file: cannot read"):
        admin_keys(FrontendArgs(admin_api_key_file=f"{keys}2"), {})


@pytest.mark.parametrize(
    "body, status, param",
    [
        ({"lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "", "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "a,b", "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": 1, "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "alias", "lora_path": "a"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": 1}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "nothing"}, 404, "lora_path"),
        ({"lora_name": "x", "lora_path": "../keys"}, 403, "lora_path"),
        ({"lora_name": "x", "lora_path": "bad"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "a", "load_inplace": "yes"}, 400, "load_inplace"),
        ({"lora_name": "x", "lora_path": "a", "rank": 8}, 400, "rank"),
        ([], 400, None),
    ],
)
def test_invalid_loads_are_refused(
    admin: TestClient, folder: Path, engine: FakeEngine, body: Any, status: int, param: str | None
) -> None:
    engine.bad_adapters["bad"] = AdapterError("peft_type LOHA is not served; use LORA")
    if isinstance(body, dict) and isinstance(body.get("lora_path"), str):
        body["lora_path"] = str(folder / body["lora_path"])
    error = error_of(admin.post(LOAD, json=body), status)
    assert error["param"] == param
    assert not engine.adapters
    if body and str(body.get("lora_path")).endswith("bad"):
        assert error["message"] == "peft_type LOHA is not served; use LORA"


def test_a_load_that_kills_the_engine_is_503(admin: TestClient, folder: Path, engine: FakeEngine) -> None:
    engine.bad_adapters["bad"] = EngineDeadError("the engine died")
    assert "the engine died before the adapter" in error_of(_load(admin, folder, path="bad"), 503)["message"]
    assert admin.get("/v1/models").json()["data"][-1]["id"] == "alias"
    engine.is_ready = False
    assert _load(admin, folder).status_code == 503


def _async_client(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://test", headers=KEY)


def test_a_reload_leaves_running_requests_alone(make_admin: MakeAdmin, folder: Path, engine: FakeEngine) -> None:
    async def run() -> None:
        async with _async_client(make_admin()) as client:
            body = {"lora_name": "ada", "lora_path": str(folder / "a")}
            ask = {"model": "ada", "prompt": "a"}
            await client.post(LOAD, json=body)
            engine.hangs_at = 2
            running = asyncio.create_task(client.post("/v1/completions", json=ask))
            await until_async(lambda: engine.alive)
            engine.hangs_at = None
            answer = await client.post(LOAD, json={**body, "load_inplace": True})
            assert answer.status_code == 200
            assert (await client.post("/v1/completions", json=ask)).status_code == 200
            assert engine.adapters_asked == [0, 1]
            assert set(engine.adapters) == {0, 1}
            await client.post(UNLOAD, json={"lora_name": "ada"})
            assert (await client.post("/v1/completions", json=ask)).status_code == 404
            assert set(engine.adapters) == {0}
            engine.released.set()
            assert (await running).json()["model"] == "ada"
            assert not engine.adapters

    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_adapter_unloaded_during_tokenization_is_404(
    make_admin: MakeAdmin, folder: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No response was started, so it is an ordinary 404, streamed or not."""

    async def run() -> None:
        service = make_admin()
        async with _async_client(service) as client:
            encode = engine.tokenizer.encode

            async def encode_and_unload(*args: Any) -> Any:
                await client.post(UNLOAD, json={"lora_name": "ada"})
                return await encode(*args)

            monkeypatch.setattr(engine.tokenizer, "encode", encode_and_unload)
            for stream in (False, True):
                await client.post(LOAD, json={"lora_name": "ada", "lora_path": str(folder / "a")})
                answer = await client.post("/v1/completions", json={"model": "ada", "prompt": "a", "stream": stream})
                assert error_of(answer, 404)["code"] == "model_not_found"
            assert not engine.requests_seen
            assert not engine.adapters

    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_adapter_lost_by_a_restarted_engine_is_503(admin: TestClient, folder: Path, engine: FakeEngine) -> None:
    _load(admin, folder)
    engine.lost_adapters[0] = "its files have changed"
    error = error_of(admin.post("/v1/completions", json={"model": "ada", "prompt": "a"}), 503)
    assert "its files have changed" in error["message"]
    assert admin.get("/v1/models").json()["data"][-1]["id"] == "ada"
    states = {
        sample.labels["state"]: sample.value
        for family in text_string_to_metric_families(admin.get("/metrics").text)
        for sample in family.samples
        if sample.name == "stoker:lora_adapters"
    }
    assert states == {"loaded": 0, "loading": 0, "failed": 1}
    assert admin.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 200


def test_modules_are_loaded_before_the_server_is_ready(engine: FakeEngine) -> None:
    engine.adapters_come.clear()
    modules = {"lora_modules": ("ada=/a", "bob=/b")}
    with serving_fake(engine, enable_lora=True, **modules) as served:
        wait_until(lambda: served.service.adapters.count(AdapterState.LOADING) == 2)
        assert httpx.get(f"{served.url}/ready").status_code == 503
        assert httpx.get(f"{served.url}/health").status_code == 200
        body = {"model": "ada", "prompt": "a"}
        assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 503
        assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 200
        served.call(engine.adapters_come.set)
        wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 200)
        assert httpx.post(f"{served.url}/v1/completions", json=body).json()["model"] == "ada"


def test_a_module_that_fails_to_load_ends_the_start(engine: FakeEngine) -> None:
    engine.bad_adapters["b"] = AdapterError("another base model")
    with serving_fake(engine, enable_lora=True, lora_modules=("ada=/a", "bob=/b")) as served:
        served.join()
    assert isinstance(served.server.failure, ArgumentError)
    assert str(served.server.failure) == "--lora-modules: bob: another base model"


def test_a_server_is_ready_once_each_listed_adapter_is_loaded_or_failed(engine: FakeEngine, folder: Path) -> None:
    engine.bad_adapters["bad"] = AdapterError("another base model")
    engine.adapters_come.clear()
    listed = [{"name": name, "path": str(folder / name)} for name in ("a", "b", "bad")]
    file = folder.parent / "adapters.json"
    file.write_text(json.dumps({"adapters": listed}))
    with serving_fake(engine, enable_lora=True, lora_config=str(file), lora_dir=(str(folder),)) as served:
        wait_until(lambda: len(engine.adapter_loads) == 3)
        assert httpx.get(f"{served.url}/ready").status_code == 503
        served.call(engine.adapters_come.set)
        wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 200)
        models = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert {model["id"] for model in models} == {"tiny", "a", "b"}
        error = httpx.post(f"{served.url}/v1/completions", json={"model": "bad", "prompt": "a"}).json()["error"]
        assert "another base model" in error["message"]


def test_a_load_continues_after_its_client_disconnects(engine: FakeEngine, folder: Path) -> None:
    """Otherwise the results of other clients would depend on this one."""
    engine.adapters_come.clear()
    admin = {"admin_api_key_file": str(folder.parent / "keys"), "lora_dir": (str(folder),)}
    with serving_fake(engine, enable_lora=True, allow_runtime_lora_updating=True, **admin) as served:
        wait_until(lambda: served.service.is_loaded)
        body = {"lora_name": "ada", "lora_path": str(folder / "a")}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}{LOAD}", json=body, headers=KEY, timeout=httpx.Timeout(60, read=0.2))
        wait_until(lambda: engine.adapter_loads)
        served.call(engine.adapters_come.set)
        wait_until(lambda: served.service.adapters.get("ada"))
        assert httpx.get(f"{served.url}/v1/models/ada").status_code == 200
