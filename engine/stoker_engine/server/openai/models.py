"""/v1/models: names of the served model and adapters."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from stoker_engine.server.conversation.service import Service
from stoker_engine.server.fields.field_types import Extra


class ModelCard(BaseModel):
    """A name under which the model or an adapter is served.

    Attributes:
        root: source of the model or the adapter.
        parent: name of an adapter's base model.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stoker"
    root: str
    parent: str | None = None
    max_model_len: int
    dtype: Extra[str] = None
    quantization: Extra[str] = None
    weights: Extra[str] = None
    kv_cache_dtype: Extra[str] = None
    license: Extra[str] = None
    model_card: Extra[str] = None


class ModelList(BaseModel):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def routes(service: Service) -> APIRouter:
    """Return the endpoints; `service` handles their requests."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        adapter = service.adapters.get(name)
        if adapter is None:
            service.check_model(name)
        info = service.client.info
        return ModelCard(
            id=name,
            created=service.created if adapter is None else adapter.created,
            root=service.args.engine.model if adapter is None else adapter.module.path,
            parent=None if adapter is None else adapter.module.base_model_name or service.model_name,
            max_model_len=info.max_model_len,
            dtype=info.dtype or None,
            quantization=info.quantization or None,
            weights=info.weights or None,
            kv_cache_dtype=info.kv_cache_dtype or None,
            license=info.licence,
            model_card=info.model_card,
        )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """List the names of the model and of the served adapters."""
        await service.wait_ready()
        adapters = [adapter.module.name for adapter in service.adapters]
        return ModelList(data=[card(name) for name in (*service.model_names, *adapters)])

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        """Describe one model or adapter."""
        await service.wait_ready()
        return card(name)

    return router
