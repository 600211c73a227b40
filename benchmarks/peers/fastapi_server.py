"""A server of the same ranker as most people write one: FastAPI, a model of pydantic, a `def` that asks the model.

    python -m benchmarks.peers.fastapi_server EXPORT PORT

Each request is computed alone, in one of the threads that FastAPI gives functions without `async`. Preprocessing and
model are ours, the same as behind our server: what differs is what stands around them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from ziggurat.serving.recommender import Recommender


class Question(BaseModel):
    user: dict[str, Any]
    items: list[str]


class Item(BaseModel):
    id: str
    score: float


def make_app(export: str) -> FastAPI:
    app = FastAPI()
    recommender = Recommender.load(export)

    @app.post("/rank")
    def rank(question: Question) -> list[Item]:
        with torch.inference_mode():
            answer = recommender.rank(question.user, question.items)
        return [Item(id=item.id, score=item.score) for item in answer.items]

    return app


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(make_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", http="httptools")
