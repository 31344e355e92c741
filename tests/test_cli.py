import json
import resource
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import pytest

from limelight import SamplingParams, StructuredOutputsParams, cli
from limelight.checkpoint import BUNDLED_PARSERS
from limelight.config import EngineConfig, ServerConfig
from limelight.flags import check_foreign, config_from


def engine(*argv):
    return config_from(cli.parse(["serve", *argv]), EngineConfig)


def server(*argv):
    return config_from(cli.parse(["serve", *argv]), ServerConfig)


def complaint(capsys, *argv):
    """What the command says, in one line, after failing with exit code 2."""
    assert cli.main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("limelight: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def run(*argv):
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_help_answers_in_under_a_third_of_a_second():
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("-m", "limelight", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        assert all(name in done.stdout for name in cli.COMMANDS)
    # Of a core's time, the least of five, as other processes may take the cores meanwhile.
    assert min(seconds) < 0.3


def test_the_help_of_every_command_needs_no_torch():
    program = (
        "import sys; from limelight import cli\n"
        "for argv in (['serve'], ['chat'], ['generate'], ['inspect'], ['quantize'],\n"
        "             ['bench', 'decode'], ['bench', 'serve'], ['draft', 'train'],\n"
        "             ['draft', 'eval']):\n"
        "    try: cli.main([*argv, '--help'])\n"
        "    except SystemExit as error: assert error.code == 0\n"
        "heavy = {'torch', 'rich', 'transformers', 'starlette', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


def test_every_field_of_the_configs_is_a_flag_and_its_default_is_stated_once():
    help_text = run("-m", "limelight", "serve", "--help").stdout
    for item in [*fields(EngineConfig), *fields(ServerConfig)]:
        assert "--" + item.name.replace("_", "-") in help_text
    assert engine() == EngineConfig()
    assert server() == ServerConfig()


def test_the_model_is_the_first_argument_or_a_flag():
    assert engine("beam-nano").model == "beam-nano"
    assert engine("--model", "beam-nano").model == "beam-nano"
    assert engine("beam-nano", "--port", "1").model == "beam-nano"


def test_dashes_and_underscores_spell_the_same_flag():
    for flag in ("--max-num-seqs", "--max_num_seqs", "--max-num_seqs"):
        assert engine(flag, "3").max_num_seqs == 3
        assert engine(f"{flag}=3").max_num_seqs == 3


def test_a_switch_can_be_turned_on_and_off():
    assert engine("--enable-prefix-caching").enable_prefix_caching
    assert not engine("--no-enable-prefix-caching").enable_prefix_caching
    assert not engine("--no_enable_prefix_caching").enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("8K", 8192), ("8k", 8000), ("25.6k", 25_600)]
)
def test_a_number_may_have_a_unit(text, number):
    assert engine("--max-model-len", text).max_model_len == number
    assert engine("--kv-cache-memory-bytes=2G").kv_cache_memory_bytes == 2**31


def test_a_list_takes_several_values_or_one_json_list():
    assert server("--served-model-name", "a", "b").served_model_name == ["a", "b"]
    assert server("--allowed-origins", '["http://x", "http://y"]').allowed_origins == [
        "http://x",
        "http://y",
    ]


def test_a_json_flag_is_whole_or_dotted_or_both():
    both = server(
        "--default-chat-template-kwargs", '{"a": {"b": 1}, "c": "x"}',
        "--default_chat_template_kwargs.a.d", "true",
        "--default-chat-template-kwargs.e=some text",
    )  # fmt: skip
    assert both.default_chat_template_kwargs == {
        "a": {"b": 1, "d": True},
        "c": "x",
        "e": "some text",
    }


def test_a_text_that_looks_like_a_flag_is_left_alone():
    args = cli.parse(["generate", "--prompt", "--- a_b.c_d", "x_y"])
    assert args.prompt == ["--- a_b.c_d", "x_y"]


def test_the_environment_gives_keys_unless_the_command_line_does(monkeypatch):
    monkeypatch.setenv("LIMELIGHT_API_KEY", "from the environment")
    assert server().api_key == ["from the environment"]
    assert server("--api-key", "a", "b").api_key == ["a", "b"]


def test_an_unknown_flag_is_refused_with_the_nearest_name(capsys):
    line = complaint(capsys, "serve", "flint-nano", "--max-model-length", "100")
    assert "--max-model-length" in line
    assert "did you mean --max-model-len?" in line
    assert "did you mean" not in complaint(capsys, "serve", "--zzzzzzzz")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--port", "http"], "--port"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "70000"], "port must be at most 65535"),
        (["serve", "--max-model-len", "25.6K"], "a whole number, also as 8k (thousands)"),
        (["serve", "--max-model-len", "1.0005k"], "got '1.0005k'"),
        (["serve", "--max-model-len", "k"], "got 'k'"),
        (["serve", "--served-model-name", ""], "a served_model_name is empty"),
        (["serve", "--device", "tpu"], "choose from auto, cpu, cuda"),
        (["serve", "--default-chat-template-kwargs", "{"], "not valid JSON"),
        (["serve", "--default-chat-template-kwargs", "[1]"], "expected a JSON object"),
        (["serve", "--default-chat-template-kwargs.a"], "expected a value"),
        (["serve", "--allowed-origins", "[1"], "not a JSON list"),
        (["serve", "flint-nano", "beam-nano"], "'beam-nano'"),
        (["sreve"], "'sreve'"),
        (["bench"], "limelight bench --help"),
        (["bench", "decode", "--batch", "4", "0"], "a whole number above 0, got '0'"),
        (["bench", "startup", "--context", "0"], "a whole number above 0, got '0'"),
        (["bench", "serve", "--num-requests", "-3"], "--num-requests"),
        (["bench", "decode", "--json", "/nowhere/x.json"], "--json: there is no folder '/nowhere'"),
        (["draft", "train", "--json", "/nowhere/x.json"], "--json: there is no folder '/nowhere'"),
        ([], "limelight --help"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "a", "--sampling.top_q", "1"], "'top_q'"),
        (["generate", "--prompt", "a", "--sampling.structured_outputs.jsn", "1"], "'jsn'"),
        (["generate", "--prompt", "a", "--sampling.structured_outputs", "1"], "structured_outputs"),
        (["chat", "--reasoning-parser", "glm46"], "glm46"),
        (["chat", "--reasoning-parser", "beam", "--tool-call-parser", "none"], "together"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line(capsys, argv, words):
    assert words in complaint(capsys, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["-pp"],
        ["--kv-cache-dtype", "fp8_e5m2"],
        ["--quantization=fp8"],
        ["--cpu-offload-gb", "4"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_feature_still_to_come_is_refused_by_name(capsys, argv):
    line = complaint(capsys, "serve", "flint-nano", *argv)
    assert "not supported yet" in line
    name = argv[0].split(".")[0].split("=")[0].replace("_", "-")
    long = {"-pp": "pipeline-parallel-size"}
    assert long.get(name, name) in line


def test_all_features_still_to_come_are_named_at_once(capsys):
    line = complaint(capsys, "serve", "-pp", "4", "--enable-eplb", "-ep")
    assert "--pipeline-parallel-size, --enable-eplb are not supported yet" in line


def test_experts_are_shared_by_vllms_flag():
    given = engine("-ep", "--expert-placement", "a.json", "b.json", "--num-redundant-experts", "4")
    assert given.enable_expert_parallel and given.expert_placement == ["a.json", "b.json"]


def test_a_way_to_the_experts_that_is_another_engines_stands_for_the_default():
    args = cli.parse(["serve", "--moe-backend", "flashinfer_moe_ep_cutedsl", "-ep"])
    (warning,) = check_foreign(args)
    assert warning.startswith("--moe-backend flashinfer_moe_ep_cutedsl is ignored")
    assert config_from(args, EngineConfig).moe_backend == "auto"
    assert engine("--moe-backend", "all2all", "-ep").moe_backend == "all2all"


def test_flags_without_a_meaning_here_are_ignored_with_a_line_each():
    args = cli.parse(
        ["serve", "--trust-remote-code", "--swap-space", "4", "--no-enable-chunked-prefill",
         "--attention-config.backend", "FLASHINFER",
         "--kernel-config", '{"enable_flashinfer_autotune": false}',
         "--cudagraph-capture-sizes", "1", "2", "--max-num-seqs", "7"]
    )  # fmt: skip
    assert config_from(args, EngineConfig) == EngineConfig(max_num_seqs=7)
    warnings = check_foreign(args)
    assert [line.split()[0] for line in warnings] == [
        "--trust-remote-code",
        "--swap-space",
        "--enable-chunked-prefill",
        "--attention-config",
        "--kernel-config",
        "--cudagraph-capture-sizes",
    ]


def test_an_unknown_key_of_an_ignored_json_flag_is_still_a_mistake(capsys):
    line = complaint(capsys, "serve", "--attention-config", '{"backend": "X", "bakcend": "Y"}')
    assert "'bakcend'" in line


def test_serve_hands_the_configs_to_the_server_and_its_exit_code_back(monkeypatch):
    seen = []
    app = type(sys)("limelight.server.app")
    app.run = lambda *configs: seen.append(configs) or 7
    monkeypatch.setitem(sys.modules, "limelight.server.app", app)
    assert cli.main(["serve", "org/model", "--port", "0", "--seed", "3"]) == 7
    assert seen == [(EngineConfig(model="org/model", seed=3), ServerConfig(port=0), None)]


@pytest.mark.parametrize(("model", "parser"), BUNDLED_PARSERS.items())
def test_a_bundled_model_is_served_with_its_parsers_unless_one_is_named(
    monkeypatch, capsys, model, parser
):
    seen = []
    app = SimpleNamespace(run=lambda engine, server, torchrun: seen.append(server) or 0)
    monkeypatch.setitem(sys.modules, "limelight.server.app", app)
    cli.main(["serve", model])
    assert f"{model} has the parsers {parser} and" in capsys.readouterr().out
    cli.main(["serve", model, "--reasoning-parser", "glm47"])
    cli.main(["serve", model, "--no-enable-auto-tool-choice"])
    assert capsys.readouterr().out == ""
    both = {"reasoning_parser": parser, "tool_call_parser": parser}
    assert seen == [
        ServerConfig(**both, enable_auto_tool_choice=True),
        ServerConfig(reasoning_parser="glm47"),
        ServerConfig(),
    ]


def test_a_failure_at_start_has_another_exit_code_than_a_mistake(monkeypatch, capsys):
    def run(*configs):
        raise OSError("port 8000 is taken")

    app = type(sys)("limelight.server.app")
    app.run = run
    monkeypatch.setitem(sys.modules, "limelight.server.app", app)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "limelight: error: port 8000 is taken\n"


def test_generate_prints_texts_or_json(monkeypatch, capsys):
    seen, error = [], None

    def generate(prompts, params):
        seen.append(params)
        choice = SimpleNamespace(text="!", token_ids=(7,), finish_reason="length", error=error)
        return [SimpleNamespace(outputs=[choice]) for _ in prompts]

    llm = nullcontext(SimpleNamespace(generate=generate))
    module = SimpleNamespace(LLM=lambda **config: seen.append(config["model"]) or llm)
    monkeypatch.setitem(sys.modules, "limelight.engine.llm", module)
    argv = ["generate", "beam-nano", "--prompt", "a", "b", "--sampling.top_p", "0.5"]
    assert cli.main([*argv, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == "!\n!\n"
    assert seen == ["beam-nano", SamplingParams(max_tokens=1, temperature=0.0, top_p=0.5)]
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {
        "prompt": "b",
        "text": "!",
        "token_ids": [7],
        "finish_reason": "length",
    }
    error = "no memory"
    assert cli.main(argv) == 1
    assert capsys.readouterr() == ("!\n!\n", "limelight: error: no memory; no memory\n")


def test_chat_finds_its_parsers_by_the_model_unless_they_are_named(monkeypatch):
    seen = []
    module = SimpleNamespace(run=lambda config, params, **fields: seen.append(fields) or 0)
    monkeypatch.setitem(sys.modules, "limelight.chat", module)
    assert cli.main(["chat", "beam-nano", "--system", "Hi"]) == 0
    assert cli.main(["chat", "--reasoning-parser", "glm47", "--tool_call_parser", "none"]) == 0
    assert seen == [
        {"system": "Hi", "reasoning_parser": "auto", "tool_call_parser": "auto"},
        {"system": None, "reasoning_parser": "glm47", "tool_call_parser": None},
    ]


def test_what_an_answer_must_be_is_a_field_of_sampling():
    argv = ["--prompt", "a", "--sampling.structured_outputs.choice", '["b", "c"]']
    params = cli.sampling_params(cli.parse(["generate", *argv]))
    assert params.structured_outputs == StructuredOutputsParams(choice=["b", "c"])


def test_python_m_limelight_is_the_same_command():
    done = run("-m", "limelight", "--version")
    assert (done.returncode, done.stdout[:10]) == (0, "limelight ")
    done = run("-m", "limelight", "serve", "--nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
