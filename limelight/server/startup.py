"""What a start needs before the model: the port, the tokenizer, the template, the defaults."""

import json
import logging
import resource
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from limelight.checkpoint import locate, read_json
from limelight.config import EngineConfig, ServerConfig
from limelight.server.parsing import find_answer_form
from limelight.text.answer_form import AnswerForm
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import SamplingParams

logger = logging.getLogger(__name__)

BACKLOG = 2048
MOST_FILES = 65_536
OVERRIDE = "--override-generation-config"
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Texts:
    """What stands between texts and token ids, and the model's own sampling defaults.

    `form` is None where answers are text alone.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: dict[str, float | int]
    form: AnswerForm | None = None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; `ValueError` if the address cannot be had."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        # At once, or two servers could both believe that the port is theirs.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        text = f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        raise ValueError(text) from error
    return sock


def allow_connections():
    """Raise this process's limit on open files, often 1,024, as far as it may, up to MOST_FILES.

    Connections above it, a probe of /health too, are closed without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < most:  # no limit is -1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def address(sock: socket.socket) -> str:
    """The URL under which this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def load_texts(engine: EngineConfig, server: ServerConfig) -> Texts:
    """Read tokenizer, templates and defaults; `ValueError` names what is broken."""
    if server.host not in ("127.0.0.1", "::1", "localhost") and not server.api_key:
        logger.warning("%s is open to the network, and no --api-key is set", server.host)
    source = engine.text_source
    revision = engine.revision if source == engine.model else None
    folder = locate(source, revision=revision, weights=False)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
    else:
        logger.warning("the model has no tokenizer.json: prompts and answers are token ids")
    override = Path(server.chat_template) if server.chat_template else None
    template = ChatTemplate.load(folder, override=override)
    defaults = sampling_defaults(
        engine, server.generation_config, server.override_generation_config or {}
    )
    form = find_answer_form(server, folder, tokenizer, template)
    return Texts(tokenizer, template, defaults, form)


def sampling_defaults(
    engine: EngineConfig, choice: str, override: dict[str, object]
) -> dict[str, float | int]:
    """Sampling in generation_config.json, but for what `override` says: null is no default.

    `choice` is auto, vllm (neutral) or another model.
    """
    for name in override:
        if name not in DEFAULTS:
            raise ValueError(f"{OVERRIDE} has no key {name!r}; it has {', '.join(DEFAULTS)}")
    stated = _stated_defaults(engine, choice)
    values = {name: value for name, value in stated.items() if name not in override}
    values |= _checked(override, OVERRIDE)
    if values:
        logger.info("sampling defaults: %s", json.dumps(values))
    return values


def _stated_defaults(engine: EngineConfig, choice: str) -> dict[str, float | int]:
    if choice == "vllm":
        return {}
    source = (engine.hf_config_path or engine.model) if choice == "auto" else choice
    revision = engine.revision if source == engine.model else None
    folder = locate(source, revision=revision, weights=False)
    path = folder / "generation_config.json"
    if choice == "auto" and not path.is_file():
        return {}
    return _checked(read_json(path), str(path))


def _checked(stated: dict[str, object], where: str) -> dict[str, float | int]:
    """What is said of `DEFAULTS`; `ValueError` for what no request could have."""
    values: dict[str, float | int] = {}
    for name in DEFAULTS:
        value = stated.get(name)
        if isinstance(value, (int, float)):
            values[name] = value
        elif value is not None:
            raise ValueError(f"{where}: {name} must be a number, found {value!r}")
    try:
        make: Callable[..., SamplingParams] = SamplingParams
        make(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return values


def example(url: str, model: str, texts: Texts, server: ServerConfig) -> str:
    """A curl line that asks this server something."""
    path, body = "/v1/completions", {"model": model, "prompt": "Once upon", "max_tokens": 32}
    if texts.tokenizer is None:
        body["prompt"] = [0]
    elif texts.template is not None:
        path = "/v1/chat/completions"
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $LIMELIGHT_API_KEY"' if server.api_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {data}"
