"""What a start reads before the model: sampling defaults, addresses, the example."""

import json
import resource
import socket
from pathlib import Path

import pytest
from server_fakes import write_model

from limelight.config import EngineConfig, ServerConfig
from limelight.server.startup import (
    MOST_FILES,
    address,
    allow_connections,
    example,
    listen,
    load_texts,
    sampling_defaults,
)
from limelight.text import answer_form


def write_defaults(folder: Path, **values: object) -> EngineConfig:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return EngineConfig(model=str(folder))


def test_the_model_s_sampling_defaults_are_read(tmp_path):
    engine = write_defaults(tmp_path, temperature=0.7, top_k=20, eos_token_id=3, top_p=None)
    read = {"temperature": 0.7, "top_k": 20}
    assert sampling_defaults(engine, "auto", {}) == read
    assert sampling_defaults(engine, "vllm", {}) == {}
    assert sampling_defaults(EngineConfig(), str(tmp_path), {}) == read


def test_sampling_defaults_of_the_command_line_go_before_the_model_s(tmp_path):
    engine = write_defaults(tmp_path, temperature=0.7, top_k=20)
    override: dict[str, object] = {"temperature": 0.5, "min_p": 0.1}
    assert sampling_defaults(engine, "auto", override) == {"top_k": 20, **override}
    assert sampling_defaults(engine, "vllm", override) == override
    assert sampling_defaults(engine, "auto", {"top_k": None}).keys() & {"top_k"} == set()


@pytest.mark.parametrize(
    ("override", "words"),
    [({"temprature": 1}, "no key 'temprature'; it has temperature"), ({"top_p": 2}, "top_p must")],
    ids=str,
)
def test_impossible_defaults_of_the_command_line_name_the_flag(tmp_path, override, words):
    with pytest.raises(ValueError, match=f"--override-generation-config.*{words}"):
        sampling_defaults(EngineConfig(), "auto", override)


def test_a_model_without_defaults_is_neutral(tmp_path):
    assert sampling_defaults(EngineConfig(model=str(tmp_path)), "auto", {}) == {}


@pytest.mark.parametrize(("name", "value"), [("temperature", 9), ("top_p", "high"), ("top_k", 1.5)])
def test_impossible_defaults_name_the_file(tmp_path, name, value):
    engine = write_defaults(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=rf"generation_config.json: {name}"):
        sampling_defaults(engine, "auto", {})


def test_a_model_without_a_tokenizer_is_served_by_ids(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    texts = load_texts(EngineConfig(model=str(tmp_path)), ServerConfig())
    assert texts.tokenizer is None and texts.template is None
    assert '"prompt": [0]' in example("http://x", "m", texts, ServerConfig())


BEAM = {"reasoning_parser": "beam", "tool_call_parser": "beam", "enable_auto_tool_choice": True}
GLM = {"reasoning_parser": "glm47", "tool_call_parser": "glm47", "enable_auto_tool_choice": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
        ({"enable_auto_tool_choice": True, "reasoning_parser": "glm47"}, "--tool-call-parser"),
        ({"reasoning_parser": "beam"}, "--tool-call-parser beam"),
        ({"tool_call_parser": "beam"}, "--reasoning-parser beam"),
        ({"reasoning_parser": "beam", "tool_call_parser": "glm47"}, "--tool-call-parser beam"),
        ({"reasoning_parser": "glm47", "tool_call_parser": "beam"}, "--reasoning-parser beam"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser must be one of glm47, beam"),
    ],
    ids=str,
)
def test_parsers_that_do_not_go_together_are_refused_with_what_would(fields, words):
    with pytest.raises(ValueError, match=words):
        ServerConfig(**fields)


def write_tokenizer(folder: Path, **template: object) -> EngineConfig:
    write_model(folder)
    if template:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"response_template": template}
        path.write_text(json.dumps(config))
    return EngineConfig(model=str(folder))


THINKING = {"thinking": {"open": "<think>", "close": "</think>"}}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({}, "has no response_template"),
        ({"fields": {"content": {}}}, "no field thinking"),
        ({"fields": THINKING}, "no field tool_calls"),
        ({"fields": {}}, "response_template.fields"),
    ],
    ids=str,
)
def test_beam_needs_a_template_with_the_fields_that_it_reads(tmp_path, template, words):
    engine = write_tokenizer(tmp_path, **(template and {"start_anchor": "<bot>", **template}))
    with pytest.raises(ValueError, match=words) as caught:
        load_texts(engine, ServerConfig(**BEAM))
    assert "tokenizer_config.json" in str(caught.value)


def test_beam_without_auto_tool_choice_reads_reasoning_alone(tmp_path, caplog):
    engine = write_tokenizer(tmp_path, start_anchor="<bot>", fields=THINKING)
    texts = load_texts(engine, ServerConfig(**{**BEAM, "enable_auto_tool_choice": False}))
    assert texts.form is not None
    assert "--enable-auto-tool-choice" in caplog.text


def test_parsers_need_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        load_texts(EngineConfig(model=str(tmp_path)), ServerConfig(**GLM))


def test_a_tool_parser_that_is_never_used_is_warned_of(tmp_path, caplog):
    texts = load_texts(write_tokenizer(tmp_path), ServerConfig(tool_call_parser="glm47"))
    assert texts.form is None
    assert "--enable-auto-tool-choice" in caplog.text


@pytest.mark.parametrize(
    ("template", "kwargs", "thinking"),
    [
        ("{{ enable_thinking }}", {}, None),
        ("{{ enable_thinking }}", {"enable_thinking": False}, False),
        ("{{ enable_thinking }}", {"thinking": False}, False),
        ("{{ enable_thinking }}", {"enable_thinking": False, "thinking": True}, True),
        ("no switch", {"enable_thinking": False}, None),
    ],
    ids=str,
)
def test_glm47_knows_whether_a_request_switched_thinking_off(
    tmp_path, monkeypatch, caplog, template, kwargs, thinking
):
    made = []
    monkeypatch.setattr(answer_form, "Glm47Parser", lambda tokenizer, **fields: made.append(fields))
    engine = write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    texts = load_texts(engine, ServerConfig(**GLM))
    texts.template.close()
    texts.form.parser(answer_form.Asked(token_ids=[1], text="x", template_kwargs=kwargs))
    assert made[0]["thinking"] is thinking
    assert ("cannot be turned off" in caplog.text) == (template == "no switch")


def test_an_open_host_without_a_key_is_warned_of(tmp_path, caplog):
    load_texts(EngineConfig(model=str(tmp_path)), ServerConfig(host="0.0.0.0"))
    assert "no --api-key" in caplog.text
    caplog.clear()
    load_texts(EngineConfig(model=str(tmp_path)), ServerConfig(host="0.0.0.0", api_key=["k"]))
    assert "no --api-key" not in caplog.text


def test_a_low_limit_on_open_files_is_raised_and_a_high_one_kept():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    try:
        for _ in range(2):
            allow_connections()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(soft, most), hard)
            soft = 256
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def test_the_address_is_one_that_can_be_visited():
    with listen("0.0.0.0", 0) as sock:
        port = sock.getsockname()[1]
        assert address(sock) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            pass
