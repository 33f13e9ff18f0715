"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's fields and responses.

`middleware.admin_keys` controls access to them.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import PlainTextResponse

from stoker_common.errors import AdapterError, EngineDeadError, RequestError
from stoker_engine.contract.lora_modules import MAX_NAME, LoRAModule, check_adapter_name
from stoker_engine.server.adapters.registry import Origin
from stoker_engine.server.connection.body import JSONRoute
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.fields.field_types import StrictModel
from stoker_engine.server.unavailable import UnavailableError

_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_Path = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterRequest(StrictModel):
    """An adapter to load."""

    lora_name: _Name
    lora_path: _Path
    load_inplace: bool | None = False


class UnloadAdapterRequest(StrictModel):
    """An adapter to unload."""

    lora_name: _Name


def routes(service: Service) -> APIRouter:
    """Return the endpoints; `service` handles their requests."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest) -> PlainTextResponse:
        """Load an adapter, which requests may then name. A disconnecting client does not cancel the loading."""
        await service.wait_ready()
        try:
            check_adapter_name(body.lora_name)
        except ValueError as error:
            raise RequestError(str(error), "lora_name") from None
        folder = await service.adapter_folders.resolve(body.lora_path)
        module = LoRAModule(body.lora_name, body.lora_path)
        try:
            await service.adapters.load(module, Origin.RUNTIME, folder=folder, in_place=body.load_inplace or False)
        except AdapterError as error:
            raise RequestError(str(error), "lora_path") from None
        except EngineDeadError:
            raise UnavailableError(f"the engine died before the adapter {body.lora_name!r} was loaded; retry") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> PlainTextResponse:
        """Unload an adapter: new requests cannot name it; running ones that use it finish."""
        await service.adapters.unload(body.lora_name, Origin.RUNTIME)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router
