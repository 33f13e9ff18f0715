"""/v1/models: what is served."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from stoker_engine.server.conversation.service import Service
from stoker_engine.server.fields.field_types import Extra


class ModelCard(BaseModel):
    """One name that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stoker"
    root: str
    parent: None = None
    max_model_len: int
    dtype: Extra[str] = None
    quantization: Extra[str] = None
    weights: Extra[str] = None
    kv_cache_dtype: Extra[str] = None
    license: Extra[str] = None
    model_card: Extra[str] = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def routes(service: Service) -> APIRouter:
    """The endpoints, for `service`."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        service.check_model(name)
        info = service.client.info
        return ModelCard(
            id=name,
            created=service.created,
            root=service.args.engine.model,
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
        """Every name the model answers to."""
        await service.wait_ready()
        return ModelList(data=[card(name) for name in service.model_names])

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        """One of them."""
        await service.wait_ready()
        return card(name)

    return router
