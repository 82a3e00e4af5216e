"""The OpenAPI document of the server, and the same as a page for people, without scripts or outside requests."""

from __future__ import annotations

from html import escape
from typing import Any

from vitrail import __version__
from vitrail.serving.settings import MOST_TOP, TOP, ServerSettings

SCRIPT_PATHS = tuple(f"/{name}.js" for name in ("page", "card", "look", "attention_map", "server", "strip", "words"))
"""The modules of the page."""
OPEN_PATHS = {"/", "/page.css", *SCRIPT_PATHS, "/docs.css", "/healthz", "/readyz", "/docs", "/openapi.json"}
"""Paths that need no token: they reveal nothing about models or clients."""
ERRORS = {
    400: "No image, or a damaged one.",
    404: "A model that is not served.",
    408: "The body came too slowly.",
    413: "Too many bytes, pixels or images.",
    415: "A content type that is no image.",
    422: "A wrong parameter, or a question that this model has no answer to.",
    429: "Too busy; Retry-After says when to come again.",
    503: "Starting, shutting down, or the deadline has passed.",
}


NUMBER, TEXT = {"type": "number"}, {"type": "string"}
LABELS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"label": TEXT, "probability": NUMBER},
        "required": ["label", "probability"],
    },
}
LINES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": TEXT,
            "text": {**TEXT, "description": "The value in words."},
            "share": {"anyOf": [NUMBER, {"type": "null"}], "description": "The length of a bar, from 0 to 1."},
            "is_chosen": {"type": "boolean", "description": "Whether it is a part of the answer."},
        },
        "required": ["name", "text", "share", "is_chosen"],
    },
}
JUDGEMENT = {
    "coverage": {**NUMBER, "description": "What was asked for, if a set of labels was."},
    "unknown": {"type": "boolean", "description": "Whether the image looks like nothing that the model knows."},
    "known_share": {**NUMBER, "description": "The share of known images that look at least as strange."},
}
"""Parts of an answer of models that `vitrail calibrate` has fitted."""
ANSWER = {
    "task": {**TEXT, "description": "Its kind: labels, tags, …"},
    "answer": {"type": "object", "description": "What the task answers, as plain data."},
    "lines": LINES,
}
EMBEDDING = {"type": "array", "items": NUMBER}
TIMING = {
    "type": "object",
    "properties": dict.fromkeys(("decode_ms", "queue_ms", "compute_ms", "total_ms"), NUMBER),
}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"code": TEXT, "message": TEXT, "request_id": TEXT}}},
    "required": ["error"],
}
BEARER = {"type": "http", "scheme": "bearer"}
MODEL_OPTION = {"name": "model", "in": "query", "schema": TEXT, "description": "Its name; the first if not given."}


INTEGER, NULLABLE = {"type": "integer"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}
COMPONENTS = {
    "Health": {"type": "object", "properties": {"state": TEXT}, "required": ["state"]},
    "Model": {
        "type": "object",
        "properties": {
            "name": TEXT,
            "image_size": {"type": "array", "prefixItems": [INTEGER, INTEGER], "minItems": 2, "maxItems": 2},
            "task": {"anyOf": [TEXT, {"type": "null"}], "description": "Its kind; null for a model without a head."},
            "answers": {"anyOf": [TEXT, {"type": "null"}], "description": "What it gives, in words."},
            "lines": {**INTEGER, "description": "Lines of a usual answer."},
            "classes": {**INTEGER, "description": "Labels; 0 for another task."},
            "layers": NULLABLE,
            "attention": {"type": "boolean"},
            "embedding": NULLABLE,
            "coverage": {"type": "boolean", "description": "Whether it gives sets of labels."},
            "unknown": {"type": "boolean", "description": "Whether it tells unknown images."},
        },
        "required": [
            *("name", "image_size", "task", "answers", "lines", "classes", "layers", "attention", "embedding"),
            *("coverage", "unknown"),
        ],
    },
    "Models": {
        "type": "object",
        "properties": {"default": TEXT, "models": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}},
        "required": ["default", "models"],
    },
}


def describe_api(settings: ServerSettings) -> dict[str, Any]:
    """Return the OpenAPI document of the server."""
    number = {"type": "integer", "minimum": 1, "maximum": MOST_TOP, "default": TOP}
    top = {"name": "top", "in": "query", "schema": number}
    coverage = {
        "name": "coverage",
        "in": "query",
        "schema": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "description": "A share such as 0.95: give the set of labels that holds the right one with it.",
    }
    layer = {
        "name": "layer",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1},
        "description": "An attention layer; the last if not given.",
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "vitrail", "version": __version__},
        "paths": {
            "/v1/classify": _describe_post(
                "Ranked labels of an image, or of several",
                [MODEL_OPTION, top, coverage],
                _describe_json({"labels": LABELS}, JUDGEMENT),
                True,
            ),
            "/v1/predict": _describe_post(
                "The answer for an image, or for several, whatever the model's task is",
                [MODEL_OPTION, top, coverage],
                _describe_json(ANSWER, {**JUDGEMENT, "set": LABELS}),
                True,
            ),
            "/v1/embed": _describe_post(
                "The representation of an image, or of several",
                [MODEL_OPTION],
                _describe_json({"embedding": EMBEDDING}),
                True,
            ),
            "/v1/attention": _describe_post(
                "Attention rollout as a grey PNG, a pixel for each patch", [MODEL_OPTION, layer], _describe_png(), False
            ),
            "/v1/models": _describe_get("The models that are served", "models", "models_v1_models_get", "Models"),
            "/healthz": _describe_get("Whether the process lives", "state", "healthz_healthz_get", "Health"),
            "/readyz": _describe_get("Whether requests are welcome", "state", "readyz_readyz_get", "Health"),
            "/metrics": _describe_get("Counters and timings in Prometheus' format", "state", "metrics_metrics_get"),
        },
        "components": {"schemas": COMPONENTS},
    }
    if settings.token is not None:
        document["components"] = {**document["components"], "securitySchemes": {"token": BEARER}}
        _add_token(document["paths"])
    return document


def _add_token(paths: dict[str, Any]) -> None:
    """Say which operations need the token, and that they answer 401 without it."""
    for path, methods in paths.items():
        for operation in methods.values() if path not in OPEN_PATHS else ():
            operation["security"] = [{"token": []}]
            operation["responses"]["401"] = _describe_error("The token is missing or wrong.")


def _describe_error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": ERROR}}}


def _describe_get(summary: str, tag: str, operation_id: str, schema: str | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Successful Response"}
    if schema is not None:
        answer["content"] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"get": {"tags": [tag], "summary": summary, "operationId": operation_id, "responses": {"200": answer}}}


def _describe_post(summary: str, options: list[Any], answer: dict[str, Any], takes_several: bool) -> dict[str, Any]:
    binary: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
    content = {"image/*": binary, "application/octet-stream": binary}
    if takes_several:
        files = {"type": "array", "items": binary["schema"]}
        content["multipart/form-data"] = {"schema": {"type": "object", "properties": {"files": files}}}
    errors = {str(status): _describe_error(description) for status, description in ERRORS.items()}
    return {
        "post": {
            "summary": summary,
            "tags": ["images"],
            "operationId": summary.split(",")[0].lower().replace(" ", "_"),
            "parameters": options,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": answer, **errors},
        }
    }


def _describe_json(parts: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe the answer for one image, and the answer for several, by their parts and those that may be missing."""
    more = more or {}
    single = {
        "type": "object",
        "properties": {"model": TEXT, **parts, **more, "timing": TIMING},
        "required": ["model", *parts],
    }
    row = {"type": "object", "properties": {"name": TEXT, **parts, **more, "error": TEXT}, "required": ["name"]}
    several = {
        "type": "object",
        "properties": {"model": TEXT, "images": {"type": "array", "items": row}, "timing": TIMING},
        "required": ["model", "images"],
    }
    return {"description": "Found.", "content": {"application/json": {"schema": {"oneOf": [single, several]}}}}


def _describe_png() -> dict[str, Any]:
    headers = {
        "X-Vitrail-Box": "left,top,width,height in fractions of the upright image: the part that the model saw",
        "X-Vitrail-Layer": "the layer",
        "X-Vitrail-Peak": "the largest share, which is 255 in the image",
    }
    return {
        "description": "Found.",
        "headers": {name: {"schema": TEXT, "description": text} for name, text in headers.items()},
        "content": {"image/png": {"schema": {"type": "string", "format": "binary"}}},
    }


def render_reference(openapi: dict[str, Any]) -> str:
    """Return the OpenAPI document as an HTML page."""
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
            parts.append(_render_table("parameter", rows))
            parts.append(
                _render_table("body", [(kind, "") for kind in operation.get("requestBody", {}).get("content", {})])
            )
            answers = operation.get("responses", {}).items()
            parts.append(_render_table("status", [(status, answer["description"]) for status, answer in answers]))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>vitrail: reference</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="/docs.css"></head><body><main>'
        f"<h1>vitrail {escape(str(openapi['info']['version']))}</h1>"
        '<p>The same for programs: <a href="/openapi.json">openapi.json</a>. The page: <a href="/">/</a>.</p>'
        f"{''.join(parts)}</main></body></html>"
    )


def _render_table(heading: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(first)}</code></td><td>{escape(second)}</td></tr>" for first, second in rows
    )
    return f"<table><thead><tr><th>{heading}</th><td></td></tr></thead><tbody>{cells}</tbody></table>" if rows else ""
