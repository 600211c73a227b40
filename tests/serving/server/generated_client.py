"""Asks a server through a client that openapi-python-client generated.

    python generated_client.py FOLDER PORT SOCKET EXPORT

Runs in the generator's own Python, where neither ziggurat nor the tests are. FOLDER has the package `shop_client`. Each
answer must be parsed into its type, and the type must say all that the answer says. It is type-checked, too: the types
stand in the assignments below.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

sys.path.insert(0, sys.argv[1])

from shop_client import Client
from shop_client.api.default import (
    admin_items,
    admin_swap,
    explain,
    history,
    info,
    items,
    items_id,
    livez,
    metrics,
    openapi,
    page,
    page_css,
    page_js,
    rank,
    readyz,
    recommend,
    users,
)
from shop_client.models import (
    AdminSwapBody,
    Answer,
    ChangedItems,
    ErrorAnswer,
    ExplainBody,
    HistoryBody,
    Info,
    ItemChanges,
    ItemChangesUpsertItem,
    ItemColumns,
    ItemExplanation,
    ItemsBody,
    KnownUsers,
    Liveness,
    LoadedVersion,
    RankRequest,
    Readiness,
    RecommendRequest,
    ShownItem,
    ShownItems,
    UserColumns,
)
from shop_client.types import Response

NUM_ROUTES = 17
seen: list[str] = []


def answered(name: str, response: Response[Any], status: int, kind: type) -> None:
    """Hold an answer to its type: the same data again, with nothing that the type does not name."""
    data = json.loads(response.content)
    assert response.status_code == status, (name, response.status_code, data)
    assert type(response.parsed) is kind, (name, status, type(response.parsed))
    parsed: Any = response.parsed
    assert parsed.to_dict() == data, (name, data)
    unnamed = {each: found for each, found in unnamed_of(parsed).items() if found}
    assert not unnamed, (name, unnamed)
    seen.append(f"{name} {status}")


def unnamed_of(value: Any, place: str = "") -> dict[str, list[str]]:
    """Return the fields that no type names, by their place; types that are open by nature hold nothing else."""
    if isinstance(value, list):
        return {key: found for each in value for key, found in unnamed_of(each, place).items()}
    slots = getattr(type(value), "__attrs_attrs__", ())
    names = [each.name for each in slots if each.name != "additional_properties"]
    found = {place: sorted(getattr(value, "additional_properties", {}))} if names else {}
    for name in names:
        found |= unnamed_of(getattr(value, name), f"{place}.{name}")
    return found


def text(name: str, response: Response[Any]) -> None:
    assert response.status_code == 200, (name, response.content)
    assert isinstance(response.parsed, str), name
    assert response.parsed, name
    seen.append(f"{name} 200")


def client_with(**headers: str) -> Client:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Client(base_url=f"http://127.0.0.1:{sys.argv[2]}", timeout=httpx.Timeout(60), headers=named)


client = client_with()
admin = Client(base_url="http://localhost", timeout=httpx.Timeout(60))
admin.set_httpx_client(httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=sys.argv[3])))

known: KnownUsers | ErrorAnswer | None = users.sync(client=client)
assert isinstance(known, KnownUsers)
user = UserColumns.from_dict({"user_id": known.users[0]})
nobody = UserColumns.from_dict({"age": "no number"})
asked = RecommendRequest(user=user, k=5, explain=True)
response: Response[Answer | ErrorAnswer] = recommend.sync_detailed(client=client, body=asked)
answered("recommend", response, 200, Answer)
assert isinstance(response.parsed, Answer)
best: str = response.parsed.items[0].id
score: float = response.parsed.items[0].score
like = response.parsed.items[0].tasks
best_columns = ItemColumns.from_dict({"item": best})

answered("recommend", recommend.sync_detailed(client=client, body=RecommendRequest(user=user, k=0)), 400, ErrorAnswer)
answered("recommend", recommend.sync_detailed(client=client, body=RecommendRequest(user=nobody)), 400, ErrorAnswer)
answered("recommend", recommend.sync_detailed(client=client, body=asked, x_deadline_ms=1e-6), 503, ErrorAnswer)
long = RecommendRequest(user=user, filter_="a" * (2 << 20))
answered("recommend", recommend.sync_detailed(client=client, body=long), 413, ErrorAnswer)
squeezed = client_with(Content_Encoding="gzip")
answered("recommend", recommend.sync_detailed(client=squeezed, body=asked), 415, ErrorAnswer)
foreign = client_with(Host="evil.example")
answered("recommend", recommend.sync_detailed(client=foreign, body=asked), 421, ErrorAnswer)
wordy = client_with(X_Long="a" * 40_000)
answered("info", info.sync_detailed(client=wordy), 431, ErrorAnswer)

ranked: Response[Answer | ErrorAnswer] = rank.sync_detailed(
    client=client, body=RankRequest(user=user, items=[best, best_columns])
)
answered("rank", ranked, 200, Answer)
answered("rank", rank.sync_detailed(client=client, body=RankRequest(user=user, items=[])), 400, ErrorAnswer)

explained: Response[ItemExplanation | ErrorAnswer] = explain.sync_detailed(
    client=client, body=ExplainBody(request=asked, item=best)
)
answered("explain", explained, 200, ItemExplanation)
answered("explain", explain.sync_detailed(client=client, body=ExplainBody(asked, "no such")), 400, ErrorAnswer)

had: Response[ShownItems | ErrorAnswer] = history.sync_detailed(client=client, body=HistoryBody(user=user))
answered("history", had, 200, ShownItems)
answered("history", history.sync_detailed(client=client, body=HistoryBody(user=nobody)), 400, ErrorAnswer)
shown: Response[ShownItems | ErrorAnswer] = items.sync_detailed(client=client, body=ItemsBody(ids=[best, "no such"]))
answered("items", shown, 200, ShownItems)
answered("items", items.sync_detailed(client=client, body=ItemsBody(ids=[best] * 2000)), 400, ErrorAnswer)
one: Response[ShownItem | ErrorAnswer] = items_id.sync_detailed(best, client=client)
answered("items_id", one, 200, ShownItem)
answered("items_id", items_id.sync_detailed("no such", client=client), 404, ErrorAnswer)

about: Response[Info | ErrorAnswer] = info.sync_detailed(client=client)
answered("info", about, 200, Info)
alive: Response[Liveness | ErrorAnswer] = livez.sync_detailed(client=client)
answered("livez", alive, 200, Liveness)
ready: Response[Readiness | ErrorAnswer] = readyz.sync_detailed(client=client)
answered("readyz", ready, 200, Readiness)
answered("users", users.sync_detailed(client=client), 200, KnownUsers)
described = openapi.sync_detailed(client=client)
assert described.parsed is not None
seen.append("openapi 200")
for name, module in (("metrics", metrics), ("page", page), ("page_css", page_css), ("page_js", page_js)):
    text(name, module.sync_detailed(client=client))

new = ItemChanges(upsert=[ItemChangesUpsertItem.from_dict({"item": "fresh"})])
changed: Response[ChangedItems | ErrorAnswer] = admin_items.sync_detailed(client=admin, body=new)
answered("admin_items", changed, 200, ChangedItems)
answered("admin_items", admin_items.sync_detailed(client=admin, body=ItemChanges()), 400, ErrorAnswer)
answered("admin_items", admin_items.sync_detailed(client=client, body=new), 403, ErrorAnswer)
answered("admin_swap", admin_swap.sync_detailed(client=client, body=AdminSwapBody("x")), 403, ErrorAnswer)
answered("admin_swap", admin_swap.sync_detailed(client=admin, body=AdminSwapBody("no/such")), 409, ErrorAnswer)
swapped: Response[LoadedVersion | ErrorAnswer] = admin_swap.sync_detailed(
    client=admin, body=AdminSwapBody(export=sys.argv[4])
)
answered("admin_swap", swapped, 200, LoadedVersion)

assert len({each.split()[0] for each in seen}) == NUM_ROUTES, seen
sys.stdout.write("\n".join(seen) + "\n")
