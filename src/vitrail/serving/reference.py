"""OpenAPI's description of the app, and a page of it for people: no script, no outside request."""

from __future__ import annotations

from html import escape
from typing import Any

from pydantic import BaseModel

from vitrail.serving.settings import Settings

ERRORS = {
    400: "No image, or a damaged one.",
    401: "The token is missing or wrong.",
    404: "A model that is not served.",
    408: "The body came too slowly.",
    413: "Too many bytes, pixels or images.",
    415: "A content type that is no image.",
    422: "A wrong parameter, or a question that this model has no answer to.",
    429: "Too busy; Retry-After says when to come again.",
    503: "Starting, shutting down, or the deadline has passed.",
}


class Model(BaseModel):
    """One that is served."""

    name: str
    image_size: tuple[int, int]
    classes: int
    layers: int | None
    attention: bool
    embedding: int | None


class Models(BaseModel):
    """All that are served."""

    default: str
    models: list[Model]


class Health(BaseModel):
    """A word on the server."""

    state: str


NUMBER, TEXT = {"type": "number"}, {"type": "string"}
LABELS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"label": TEXT, "probability": NUMBER},
        "required": ["label", "probability"],
    },
}
EMBEDDING = {"type": "array", "items": NUMBER}
TIMING = {
    "type": "object",
    "properties": dict.fromkeys(("decode_ms", "queue_ms", "compute_ms", "total_ms"), NUMBER),
}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"code": TEXT, "message": TEXT}}},
    "required": ["error"],
}
MODEL_OPTION = {"name": "model", "in": "query", "schema": TEXT, "description": "Its name; the first if not given."}


def described(generated: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What FastAPI has generated, with the three questions, which it does not see."""
    top = {"name": "top", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": 5}}
    layer = {
        "name": "layer",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1},
        "description": "An attention layer; the last if not given.",
    }
    paths = {
        "/v1/classify": _question(
            "Ranked labels of an image, or of several", [MODEL_OPTION, top], _one("labels", LABELS), True
        ),
        "/v1/embed": _question(
            "The representation of an image, or of several", [MODEL_OPTION], _one("embedding", EMBEDDING), True
        ),
        "/v1/attention": _question(
            "Attention rollout as a grey PNG, a pixel for each patch", [MODEL_OPTION, layer], _picture(), False
        ),
    }
    found = {**generated, "paths": {**paths, **generated["paths"]}}
    if settings.token is not None:
        schemes = {"token": {"type": "http", "scheme": "bearer"}}
        found["components"] = {**generated.get("components", {}), "securitySchemes": schemes}
        found["security"] = [{"token": []}]
    return found


def _question(summary: str, options: list[Any], answer: dict[str, Any], several: bool) -> dict[str, Any]:
    binary: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
    content = {"image/*": binary, "application/octet-stream": binary}
    if several:
        files = {"type": "array", "items": binary["schema"]}
        content["multipart/form-data"] = {"schema": {"type": "object", "properties": {"files": files}}}
    refusals = {
        str(status): {"description": said, "content": {"application/json": {"schema": ERROR}}}
        for status, said in ERRORS.items()
    }
    return {
        "post": {
            "summary": summary,
            "tags": ["images"],
            "operationId": summary.split(",")[0].lower().replace(" ", "_"),
            "parameters": options,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": answer, **refusals},
        }
    }


def _one(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Of one image, or of several."""
    single = {
        "type": "object",
        "properties": {"model": TEXT, name: schema, "timing": TIMING},
        "required": ["model", name],
    }
    row = {"type": "object", "properties": {"name": TEXT, name: schema, "error": TEXT}, "required": ["name"]}
    several = {
        "type": "object",
        "properties": {"model": TEXT, "images": {"type": "array", "items": row}, "timing": TIMING},
        "required": ["model", "images"],
    }
    return {"description": "Found.", "content": {"application/json": {"schema": {"oneOf": [single, several]}}}}


def _picture() -> dict[str, Any]:
    headers = {
        "X-Vitrail-Box": "left,top,width,height in fractions of the upright image: the part that the model saw",
        "X-Vitrail-Layer": "the layer",
        "X-Vitrail-Peak": "the largest share, which is 255 in the image",
    }
    return {
        "description": "Found.",
        "headers": {name: {"schema": TEXT, "description": said} for name, said in headers.items()},
        "content": {"image/png": {"schema": {"type": "string", "format": "binary"}}},
    }


def page_of(openapi: dict[str, Any]) -> str:
    """The description as a page."""
    parts = []
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation.get('summary', ''))}.</p>"
            )
            rows = [
                (option["name"], option.get("description") or f"default {option['schema'].get('default', 'none')}")
                for option in operation.get("parameters", [])
            ]
            parts.append(_table("parameter", rows))
            parts.append(_table("body", [(kind, "") for kind in operation.get("requestBody", {}).get("content", {})]))
            answers = operation.get("responses", {}).items()
            parts.append(_table("status", [(status, answer["description"]) for status, answer in answers]))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>vitrail: reference</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="/docs.css"></head><body><main>'
        f"<h1>vitrail {escape(str(openapi['info']['version']))}</h1>"
        '<p>The same for programs: <a href="/openapi.json">openapi.json</a>. The page: <a href="/">/</a>.</p>'
        f"{''.join(parts)}</main></body></html>"
    )


def _table(heading: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(first)}</code></td><td>{escape(second)}</td></tr>" for first, second in rows
    )
    return f"<table><thead><tr><th>{heading}</th><th></th></tr></thead><tbody>{cells}</tbody></table>" if rows else ""
