"""GET /v1/models, GET /v1/models/{id}."""

from __future__ import annotations

from sterna.server.context import AppContext
from sterna.server.exchange import Exchange
from sterna.server.fields import check_model
from sterna.server.openai.models.protocol import ModelCard, ModelList


async def list_models(exchange: Exchange, context: AppContext) -> None:
    await exchange.respond_json(ModelList(data=[_card(context)]))


async def get_model(exchange: Exchange, context: AppContext) -> None:
    """Raises ModelNotFound."""
    check_model(exchange.path_params["model"], context.manager)
    await exchange.respond_json(_card(context))


def _card(context: AppContext) -> ModelCard:
    manager = context.manager
    return ModelCard(id=manager.served_model_name, created=context.started, root=manager.model.name, max_model_len=manager.context_len)
