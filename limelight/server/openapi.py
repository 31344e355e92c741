"""What the routes take, as an OpenAPI document: made from the fields that bodies are read by."""

import msgspec

from limelight import __version__
from limelight.server.adapters import LoadFields, ReplaceFields, UnloadFields
from limelight.server.anthropic import MessageFields
from limelight.server.bodies import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    SharedFields,
    TokenizeFields,
)
from limelight.server.generate import GenerateFields
from limelight.server.messages import ConversationFields
from limelight.server.responses import ResponseFields

JSON = dict[str, object]

# The fields of each body, in structs that are read one after another.
BODIES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "/v1/chat/completions": (SharedFields, ChatFields, ConversationFields),
    "/v1/chat/completions/render": (SharedFields, ChatFields, ConversationFields),
    "/v1/completions": (SharedFields, CompletionFields),
    "/inference/v1/generate": (GenerateFields,),
    "/skyrl/v1/generate": (GenerateFields,),
    "/v1/responses": (SharedFields, ResponseFields),
    "/v1/messages": (SharedFields, MessageFields),
    "/v1/messages/count_tokens": (SharedFields, MessageFields),
    "/tokenize": (TokenizeFields, ConversationFields),
    "/detokenize": (DetokenizeFields,),
    "/v1/load_lora_adapter": (LoadFields,),
    "/v1/unload_lora_adapter": (UnloadFields,),
    "/skyrl/v1/load_lora_adapter": (ReplaceFields,),
}
# Fields of these structs that mean nothing in a body: it has others for them, or none.
UNUSED: dict[str, tuple[str, ...]] = {
    "/v1/responses": (
        "max_tokens", "n", "prompt_logprobs", "response_format", "stream_options",
    ),
    "/v1/messages": ("n", "prompt_logprobs", "response_format", "stop", "stream_options"),
}  # fmt: skip
UNUSED["/v1/messages/count_tokens"] = UNUSED["/v1/messages"]
NEEDED = {
    "/v1/chat/completions": ["messages"],
    "/v1/chat/completions/render": ["messages"],
    "/v1/completions": ["prompt"],
    "/inference/v1/generate": ["token_ids"],
    "/skyrl/v1/generate": ["token_ids"],
    "/v1/responses": ["input"],
    "/v1/messages": ["max_tokens", "messages"],
    "/v1/messages/count_tokens": ["messages"],
    "/detokenize": ["tokens"],
    "/v1/load_lora_adapter": ["lora_name", "lora_path"],
    "/v1/unload_lora_adapter": ["lora_name"],
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# What answers without a body, and in which media type.
READS = {
    "/v1/models": "application/json",
    "/health": None,
    "/ready": "application/json",
    "/ping": None,
    "/version": "application/json",
    "/load": "application/json",
    "/metrics": "text/plain",
    "/openapi.json": "application/json",
}


def describe() -> JSON:
    """The document."""
    structs = list(dict.fromkeys(struct for fields in BODIES.values() for struct in fields))
    _, schemas = msgspec.json.schema_components(
        structs, schema_hook=_anything, ref_template="#/components/schemas/{name}"
    )
    of_bodies = {struct: schemas.pop(struct.__name__) for struct in structs}
    paths: JSON = {path: {"get": _operation(path, media)} for path, media in READS.items()}
    named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    one = _operation("/v1/models/{name}", "application/json") | {"parameters": [named]}
    paths["/v1/models/{name}"] = {"get": one}
    paths["/finish_session"] = {"post": _operation("/finish_session", "application/json")}
    for path, fields in BODIES.items():
        properties: JSON = {}
        for struct in fields:
            properties |= of_bodies[struct]["properties"]
        for name in UNUSED.get(path, ()):
            del properties[name]
        body: JSON = {"type": "object", "properties": properties, "required": NEEDED.get(path, [])}
        content = {"application/json": {"schema": body}}
        operation = _operation(path, "application/json")
        paths[path] = {"post": operation | {"requestBody": {"required": True, "content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Limelight", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SCHEMES},
        "security": [{}, *({name: []} for name in SCHEMES)],
    }


def _anything(kind: type) -> JSON:
    assert kind is object, f"{kind} has no schema"
    return {"description": "any JSON"}


def _operation(path: str, media: str | None) -> JSON:
    kinds = [media] if media else []
    if path in STREAMS:
        kinds.append("text/event-stream")
    answer: JSON = {"description": "The answer"}
    if kinds:
        answer["content"] = {kind: {"schema": {}} for kind in kinds}
    error = {"description": "An error", "content": {"application/json": {"schema": {}}}}
    return {"responses": {"200": answer, "default": error}}
