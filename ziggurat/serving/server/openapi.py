"""The description of a server in OpenAPI 3.1, made from the export: its columns, labels and filters, with examples.

Every example is a request that this export answers: the values of columns are those that the export keeps as examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from ziggurat.features.items import Repeats
from ziggurat.features.kinds import Feature
from ziggurat.serving.answers import Column, Info
from ziggurat.serving.server.config import LONGEST_PATH, ServerConfig

_TEXTS: dict[str, object] = {"type": "array", "items": {"type": "string"}}
_OPEN = ("/livez", "/readyz", "/", "/page.js", "/page.css")  # without an API key
_OF_CONNECTION = "Refused before its route: not received in time, wrong or too many headers, a Host of another server"


class RequestBody(TypedDict):
    """The body of an operation, as OpenAPI writes it."""

    required: bool
    content: dict[str, object]


class Operation(TypedDict):
    """A method of a route, as OpenAPI writes it."""

    summary: str
    responses: dict[str, object]
    parameters: NotRequired[Sequence[Mapping[str, object]]]
    requestBody: NotRequired[RequestBody]
    operationId: NotRequired[str]
    security: NotRequired[list[dict[str, list[str]]]]


Paths = dict[str, dict[str, Operation]]


def description(
    info: Info, *, config: ServerConfig, has_key: bool, can_swap: bool = True, can_change: bool = True
) -> dict[str, object]:
    """The whole description as plain data.

    Args:
        info: of the export.
        config: of the server, for its limits.
        has_key: requests need an API key.
        can_swap: there is /admin/swap.
        can_change: there is /admin/items.
    """
    paths: Paths = {}
    if info.can_recommend:
        paths["/recommend"] = {
            "post": _question("The best items for a user", "RecommendRequest", _recommend(info), config=config)
        }
    if info.can_rank:
        paths["/rank"] = {"post": _question("Scores for given items", "RankRequest", _rank(info), config=config)}
    paths |= {
        "/livez": {"get": _plain("Whether the process runs", schema=_ref("Liveness"))},
        "/readyz": {"get": _ready()},
        "/metrics": {"get": _plain("Figures for Prometheus", kind="text/plain", schema={"type": "string"})},
        "/openapi.json": {"get": _plain("This description", schema={"type": "object"})},
        "/info": {"get": _plain("What the export is, and the limits of the server", schema=_ref("Info"))},
        "/users": {"get": _plain("Users that the export knows, the most active first", schema=_ref("KnownUsers"))},
        "/items": {
            "post": _plain(
                "The columns of some items",
                body=_object({"ids": _TEXTS | {"maxItems": config.max_k}}, ["ids"]),
                example={"ids": [_example_id(info)]},
                schema=_ref("ShownItems"),
            ),
        },
        "/items/{id}": {
            "get": _plain(
                "The columns of an item",
                parameters=[_path_parameter("id")],
                schema=_ref("ShownItem"),
                errors={"404": "There is no such item"},
            )
        },
        "/history": {
            "post": _plain(
                "The items that a user had",
                body=_object({"user": _ref("UserColumns")}, ["user"]),
                example={"user": example_of(info.user_columns)},
                schema=_ref("ShownItems"),
            )
        },
        "/explain": {
            "post": _plain(
                "Why an item is in an answer, or is not: seen, excluded, or filtered, and by which term",
                body=_object({"request": _ref("RecommendRequest"), "item": {"type": "string"}}, ["request", "item"]),
                example=example_explanation(info),
                schema=_ref("ItemExplanation"),
            )
        },
    }
    paths |= _pages() | _admin(info, config, can_swap=can_swap, can_change=can_change)
    components: dict[str, object] = {"schemas": _schemas(info, config)}
    data: dict[str, object] = {
        "openapi": "3.1.0",
        "info": {"title": info.name or "Ziggurat", "version": info.version, "description": _about(info)},
        "paths": paths,
        "components": components,
    }
    for path, operations in paths.items():
        for operation in operations.values():
            operation["operationId"] = _operation_id(path)
            if has_key and path not in _OPEN:
                operation["responses"]["401"] = _error("No API key, or another one")
            elif has_key:
                # An empty list takes the key of the whole description back for this route.
                operation["security"] = []
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        data["security"] = [{"key": []}]
    return data


def _pages() -> Paths:
    kinds = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}
    text = {"type": "string"}
    return {path: {"get": _plain("The web page", kind=kind, schema=text)} for path, kind in kinds.items()}


def _ready() -> Operation:
    summary = "Whether it takes requests, and the shards of the index; 503 while it drains"
    operation = _plain(summary, schema=_ref("Readiness"))
    # Where no worker serves, the process that holds the port answers.
    either = {"anyOf": [_ref("Readiness"), _ref("ErrorAnswer")]}
    operation["responses"]["503"] = {"description": "It takes none", "content": _content(either)}
    return operation


def _operation_id(path: str) -> str:
    """Return the name of a route's function in generated clients."""
    return re.sub(r"\W+", "_", path.removesuffix(".json")).strip("_") or "page"


def _admin(info: Info, config: ServerConfig, *, can_swap: bool, can_change: bool) -> Paths:
    """Routes that are answered through the admin socket; 403 through a port."""
    paths: Paths = {}
    refused = {"403": _error("It comes through a port, which strangers may reach")}
    if can_swap:
        swap = _plain(
            "Load another version, and swap when it is ready; through the admin socket alone",
            body=_object(
                {
                    "export": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": LONGEST_PATH,
                        "description": "folder on this machine",
                    },
                    "accept_loss": {
                        "type": "boolean",
                        "default": False,
                        "description": "take one that answers less than the served one",
                    },
                },
                ["export"],
            ),
            example={"export": "exports/next"},
            schema=_ref("LoadedVersion"),
        )
        swap["responses"] |= refused | {"409": _error("The export is damaged, or a swap is under way; nothing changed")}
        paths["/admin/swap"] = {"post": swap}
    if can_change:
        change = _plain(
            "Items that come, change or go; through the admin socket alone",
            body=_ref("ItemChanges"),
            schema=_ref("ChangedItems"),
        )
        # `_plain` has one example at most; a change has two, one for each of its fields.
        content = _content(_ref("ItemChanges"), examples=_changes(info))
        change["requestBody"] = {"required": True, "content": content}
        change["responses"] |= refused | {
            "400": _error("A row without an id, an unknown column, a value that it cannot hold; nothing changed"),
            "409": _error("The change cannot be written down; nothing changed"),
            "507": _error("No room on the disk for the change; nothing changed"),
            "413": _error(f"More than {config.max_body_bytes:,} bytes"),
        }
        paths["/admin/items"] = {"post": change}
    return paths


def example_changes(info: Info) -> dict[str, object]:
    """A change of items that the export takes, as plain data: an item that it has, with the columns that it has."""
    return {"upsert": [example_of(info.item_columns)]}


def _changes(info: Info) -> dict[str, object]:
    deleted = {"delete": [_example_id(info)]}
    return {"put": {"value": example_changes(info)}, "delete": {"value": deleted}}


def _example_id(info: Info) -> str:
    ids = [str(each.example) for each in info.item_columns if each.example is not None and each.name == info.item_id]
    return ids[0] if ids else "17"


def _about(info: Info) -> str:
    items = f"{info.num_items:,} items." if info.num_items else ""
    labels = f"Labels: {', '.join(info.labels)}." if info.labels else ""
    order = f"Order of answers: {info.value_model}." if info.value_model else ""
    return " ".join(part for part in (items, labels, order) if part)


def example_of(columns: tuple[Column, ...]) -> dict[str, object]:
    """The example values of columns, by name."""
    return {column.name: column.example for column in columns if column.example is not None}


def example_request(info: Info) -> dict[str, object]:
    """A request for recommendations that the export answers, as plain data."""
    return {"user": example_of(info.user_columns), "k": 10}


def example_ranking(info: Info) -> dict[str, object]:
    """A request for a ranking that the export answers, as plain data.

    Without a catalogue, as a stream publishes it, no column has an example: then it is a golden request, and where
    there is none, one with a value for each column that its kind can read.
    """
    user = example_of(info.user_columns)
    item = example_of(info.item_columns)
    if user or item:
        return {"user": user, "items": [item]}
    names = {column.name for column in info.user_columns}
    for each in info.examples:
        golden = each.get("rank")
        if isinstance(golden, dict) and isinstance(found := golden.get("user"), dict):
            # The columns of `info` alone, which may be a few of those of the export.
            return {"user": {name: value for name, value in found.items() if name in names}, "items": [{}]}
    # An id that nobody knows is read as well.
    by_kind: dict[str, object] = {"dense": 1.0, "categorical": "1", "multi_hot": ["1"], "sequence": ["1"]}
    user = {column.name: by_kind[column.kind] for column in info.user_columns if column.kind in by_kind}
    return {"user": user, "items": [{}]}


def example_explanation(info: Info) -> dict[str, object]:
    """A question why an item is in an answer; the item is the example of the catalogue, where there is one."""
    request = example_request(info) | ({"filter": info.filter_example} if info.filter_example else {})
    return {"request": request, "item": _example_id(info)}


def _recommend(info: Info) -> dict[str, object]:
    examples: dict[str, object] = {"plain": {"value": example_request(info)}}
    if info.filter_example:
        filtered = example_request(info) | {"filter": info.filter_example, "explain": True}
        examples["filtered"] = {"value": filtered}
    return examples


def _rank(info: Info) -> dict[str, object]:
    return {"plain": {"value": example_ranking(info)}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, object], required: list[str]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _content(schema: Mapping[str, object], **more: object) -> dict[str, object]:
    return {"application/json": {"schema": schema, **more}}


def _error(text: str) -> dict[str, object]:
    return {"description": text, "content": _content(_ref("ErrorAnswer"))}


def _question(summary: str, schema: str, examples: dict[str, object], *, config: ServerConfig) -> Operation:
    bounds = {"type": "number", "exclusiveMinimum": 0, "maximum": config.max_deadline_ms, "default": config.deadline_ms}
    deadline = {"name": "X-Deadline-Ms", "in": "header", "schema": bounds}
    busy = _error("No time to answer within the deadline; Retry-After says when to come again")
    busy["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    answer: dict[str, object] = {"description": "The answer", "content": _content(_ref("Answer"))}
    answer["headers"] = {"X-Export-Version": {"schema": {"type": "string"}, "description": "that answered"}}
    responses: dict[str, object] = {"200": answer}
    responses |= _refusals(has_body=True)
    responses["503"] = busy
    return {
        "summary": summary,
        "parameters": [deadline | {"description": "milliseconds that the answer may take"}],
        "requestBody": {"required": True, "content": _content(_ref(schema), examples=examples)},
        "responses": responses,
    }


def _refusals(*, has_body: bool) -> dict[str, object]:
    """Return the errors that any route may answer."""
    of_body = {
        "400": _error("The request cannot be answered, and why"),
        "413": _error("The body is too long"),
        "415": _error("The body is compressed"),
    }
    errors: dict[str, object] = {}
    if has_body:
        errors |= of_body
    errors["default"] = _error(_OF_CONNECTION)
    return errors


def _plain(
    summary: str,
    *,
    schema: Mapping[str, object],
    kind: str = "application/json",
    body: Mapping[str, object] | None = None,
    example: dict[str, object] | None = None,
    parameters: Sequence[Mapping[str, object]] = (),
    errors: dict[str, str] | None = None,
) -> Operation:
    responses: dict[str, object] = {"200": {"description": summary, "content": {kind: {"schema": schema}}}}
    responses |= {status: _error(text) for status, text in (errors or {}).items()}
    responses |= _refusals(has_body=body is not None)
    operation: Operation = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body, examples={"plain": {"value": example}})}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _path_parameter(name: str) -> dict[str, object]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _columns(columns: tuple[Column, ...]) -> dict[str, object]:
    shown = {}
    kinds = Feature.kinds()
    for column in columns:
        kind = kinds.get(column.kind)
        # A copy: examples of this column are added, and the schema of the kind is shared.
        schema: dict[str, object] = {} if kind is None else {**kind.json_schema}
        if column.example is not None:
            schema["examples"] = [column.example]
        shown[column.name] = schema | {"description": column.kind}
    return {"type": "object", "properties": shown}


def _schemas(info: Info, config: ServerConfig) -> dict[str, object]:
    text = {"type": "string"}
    number = {"type": "number"}
    filters = ", ".join(f"{name} ({kind})" for name, kind in info.filters.items())
    item = {
        "id": text,
        "score": number,
        "tasks": _ref("LabelScores"),
        "retrieval": number,
        "over_arch": number,
        "position": {"type": "integer"},
    }
    degraded = {"type": "array", "items": text, "description": "what was left out for lack of time; empty: nothing"}
    missing = {"type": "array", "items": {"type": "integer"}, "description": "shards of the index that did not answer"}
    counts = {name: {"type": "integer"} for name in ("added", "changed", "deleted", "num_items")}
    error = {"kind": text, "expected": text, "found": text, "where": text, "ways_out": {"type": "array", "items": text}}
    return {
        "UserColumns": _columns(info.user_columns)
        | {"description": "raw columns; those left out are missing values", "additionalProperties": False},
        "ItemColumns": _columns(info.item_columns)
        | {"description": "raw columns; those left out are as in the catalogue"},
        "RecommendRequest": _object(
            {
                "user": _ref("UserColumns"),
                "k": {"type": "integer", "minimum": 1, "maximum": config.max_k, "default": 10},
                "filter": {"type": "string", "default": "", "description": f"attributes: {filters or 'none'}"},
                "exclude_seen": {
                    "type": ["boolean", "null"],
                    "default": None,
                    "description": "leave out what the user has had; null: "
                    + ("it is left out" if info.exclude_seen else "it may be in the answer"),
                },
                "exclude": {"type": "array", "items": text, "maxItems": config.max_items},
                "explain": {"type": "boolean", "default": False},
            },
            ["user"],
        ),
        "RankRequest": _object(
            {
                "user": _ref("UserColumns"),
                "items": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": config.max_items,
                    "items": {"anyOf": [text | {"description": "id of an item of the catalogue"}, _ref("ItemColumns")]},
                },
            },
            ["user", "items"],
        ),
        "Answer": {
            "type": "object",
            "required": ["items", "version", "degraded"],
            "properties": {
                "items": {"type": "array", "items": _ref("ScoredItem")},
                "version": text,
                "degraded": degraded,
                "notes": {
                    "type": "array",
                    "items": text,
                    "description": "values in the filter that no item has, excluded ids of no item, an unknown user",
                },
                "plan": text | {"description": "how the candidates were found, if `explain` asked for it"},
                "missing_shards": missing,
            },
        },
        "ScoredItem": {"type": "object", "properties": item, "required": ["id", "score"]},
        "LabelScores": {"type": "object", "properties": dict.fromkeys(info.labels, number)},
        **_small_answers(),
        **_info_schemas(),
        "ShownItem": {
            "type": "object",
            "required": ["id", "columns"],
            "properties": {"id": text, "columns": {"type": "object", "description": "empty: no such item"}},
        },
        "ItemChanges": _object(
            {
                "upsert": {
                    "type": "array",
                    "items": {"type": "object"} | ({"required": [info.item_id]} if info.item_id else {}),
                    "maxItems": config.max_items,
                    "description": "columns of items by name; those left out of a known item stay as they are",
                },
                "delete": {"type": "array", "items": text, "maxItems": config.max_items, "description": "ids"},
            },
            [],
        ),
        "ChangedItems": {
            "type": "object",
            "required": [*counts, "unknown", "version"],
            "properties": counts | {"unknown": _TEXTS | {"description": "ids of no item"}, "version": text},
        },
        "ErrorAnswer": _object({"error": _ref("Error")}, ["error"]),
        "Error": _object(error, list(error)),
    }


def _small_answers() -> dict[str, object]:
    """Return the schemas of answers with few fields, each with a name for the types of generated clients."""
    text = {"type": "string"}
    ready = {"ready": {"type": "boolean"}, "version": text, "effort": text}
    return {
        "Liveness": _object({"live": {"type": "boolean"}}, ["live"]),
        "Readiness": {
            "type": "object",
            "properties": ready
            | {
                "published": _ref("Published"),
                "pointer": {"type": "string", "enum": ["damaged", "gone"]},
                "shards": {"type": "array", "items": _ref("ShardState")},
            },
            "required": list(ready),
        },
        "ShardState": {
            "type": "object",
            "properties": {"shard": {"type": "integer"}, "state": text},
            "required": ["shard", "state"],
        },
        "KnownUsers": _object({"users": _TEXTS}, ["users"]),
        "ShownItems": _object({"items": {"type": "array", "items": _ref("ShownItem")}}, ["items"]),
        "ItemExplanation": _object({"item": text, "explanation": text}, ["item", "explanation"]),
        "LoadedVersion": _object({"version": text}, ["version"]),
    }


def _info_schemas() -> dict[str, object]:
    """Return the schemas of what `Info.to_json` says, with the limits of the server."""
    text = {"type": "string"}
    number = {"type": "integer"}
    columns = {"type": "array", "items": _ref("Column")}
    counts = ("live_items", "deleted_items", "unmerged_items", "changes", "merged_changes", "journal_bytes")
    limits = {"max_k": number, "max_items": number, "deadline_ms": {"type": "number"}}
    properties: dict[str, object] = {
        "name": text,
        "version": text,
        "made_with": text,
        "can_recommend": {"type": "boolean"},
        "can_rank": {"type": "boolean"},
        "num_items": number,
        "labels": _TEXTS,
        "user_columns": columns,
        "item_columns": columns,
        "filters": {"type": "object", "additionalProperties": text},
        "value_model": text,
        "filter_example": text,
        "num_candidates": number,
        "user_id": text,
        "item_id": text,
        "num_over_arch": number,
        "products": {"type": "object", "additionalProperties": text},
        "repeats": {"type": "string", "enum": [each.value for each in Repeats]},
        "exclude_seen": {"type": "boolean"},
        "examples": {"type": "array", "items": _ref("Example")},
        "changes": _ref("ChangesSoFar"),
        "published": _ref("Published"),
        "limits": _ref("Limits"),
    }
    return {
        "Info": {"type": "object", "properties": properties, "required": list(properties)},
        "Column": {
            "type": "object",
            "required": ["name", "kind"],
            "properties": {"name": text, "kind": text, "example": {}},
        },
        "Example": {
            "type": "object",
            "description": "a request that is answered, of one of both kinds",
            "properties": {"recommend": {"type": "object"}, "rank": {"type": "object"}},
        },
        "ChangesSoFar": {
            "type": "object",
            "description": "of the items since the export was made; empty without a catalogue",
            "properties": dict.fromkeys(counts, number) | {"last_merge": text},
        },
        "Published": {
            "type": "object",
            "description": "the version of a published folder that is served; empty of any other export",
            "properties": {
                "number": number,
                "window": text,
                "watermark": text,
                "created": text,
                "metrics": {
                    "type": "object",
                    "description": "of the window, by the weights before it was trained",
                    "additionalProperties": {"type": ["number", "null"]},
                },
                "age_s": {"type": "number"},
                "watermark_age_s": {"type": "number"},
            },
            "additionalProperties": False,
        },
        "Limits": {"type": "object", "properties": limits, "required": list(limits)},
    }
