"""/v1/models: what is served."""

from __future__ import annotations

from fastapi import APIRouter

from stoker_engine.server.responses import ModelCard, ModelList
from stoker_engine.server.service import Service


def routes(service: Service) -> APIRouter:
    """The endpoints, for `service`."""
    router = APIRouter()
    cards = {
        name: ModelCard(id=name, created=service.created, root=service.root, max_model_len=service.client.max_model_len)
        for name in service.model_names
    }

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """Every name the model answers to."""
        return ModelList(data=list(cards.values()))

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> ModelCard:
        """One of them."""
        service.check_model(name)
        return cards[name]

    return router
