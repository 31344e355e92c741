"""A data file is read whole, or refused with the line and the fault."""

import json

import pytest

from limelight.checkpoint import locate
from limelight.training.lines import Reader, split

ASKED = {"messages": [{"role": "user", "content": "sort: b a"}]}


@pytest.fixture(scope="module")
def reader():
    folder = locate("flint-nano")
    with Reader.open(folder, model="flint-nano", vocab_size=4096, longest=8192) as reader:
        yield reader


def write(path, *values):
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


def test_prompts_are_texts_token_ids_or_messages(reader, tmp_path):
    tool = {"type": "function", "function": {"name": "look", "description": "Look."}}
    lines = reader.read(
        write(
            tmp_path / "data",
            {"prompt": "sort: b a ->", "task": "sort", "held_out": True},
            "",
            {"prompt": [5, 6], "answer": [7, 8]},
            ASKED | {"tools": [tool], "chat_template_kwargs": {"enable_thinking": True}},
            {"messages": [*ASKED["messages"], {"role": "assistant", "content": "a b"}]},
            ASKED | {"answer": "a b"},
        )
    )
    tell = reader.tokenizer.decode
    texts = [tell(line.prompt, skip_special_tokens=False) for line in lines]
    assert [line.number for line in lines] == [1, 3, 4, 5, 6]
    assert texts[0] == "sort: b a ->" and (lines[0].task, lines[0].held_out) == ("sort", True)
    assert (lines[1].prompt, lines[1].answer, lines[1].held_out) == ([5, 6], [7, 8], False)
    assert "look" in texts[2] and texts[2].endswith("<|assistant|><think>")
    assert texts[3] == texts[4] == "<|user|>sort: b a<|assistant|></think>"
    assert lines[3].answer is None and tell(lines[4].answer, skip_special_tokens=False) == "a b"


def test_every_20th_line_is_held_out_unless_some_say_so(reader, tmp_path):
    lines = reader.read(write(tmp_path / "data", *[{"prompt": [i]} for i in range(41)]))
    assert [i for i, line in enumerate(split(lines)) if line.held_out] == [19, 39]
    said = write(tmp_path / "said", *[{"prompt": [i], "held_out": i == 3} for i in range(41)])
    assert [i for i, line in enumerate(split(reader.read(said))) if line.held_out] == [3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting"),
        ([1], "expected a JSON object"),
        ({}, "give prompt or messages"),
        (ASKED | {"prompt": "a"}, "give prompt or messages"),
        ({"prompt": "a", "anwser": "b"}, "no key 'anwser' is known"),
        ({"prompt": "a", "tools": []}, "tools goes with messages"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": 5}, "prompt must be a text or a list of token ids"),
        ({"prompt": [True]}, "prompt must be a text or a list of token ids"),
        ({"prompt": [4096]}, "prompt has 4096; token ids are 0 to 4095"),
        ({"prompt": [1] * 8192}, "8193 tokens of prompt and answer; the target takes 8192"),
        ({"prompt": "a", "answer": 7}, "answer must be"),
        ({"prompt": "a", "task": 7}, "task must be a text"),
        ({"prompt": "a", "held_out": "yes"}, "held_out true or false"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": [{"content": "a"}]}, "messages[0] needs a role"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "unknown role: judge"),
        (ASKED | {"tools": {}}, "tools must be a list"),
        (ASKED | {"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        (ASKED | {"chat_template_kwargs": {"messages": 1}}, "'messages' cannot be set"),
    ],
)
def test_a_fault_is_told_with_its_line(reader, tmp_path, line, words):
    path = write(tmp_path / "data", ASKED, line)
    with pytest.raises(ValueError) as told:
        reader.read(path)
    assert str(told.value).startswith(f"{path}:2: ") and words in str(told.value)


def test_a_file_that_cannot_be_read_is_named(reader, tmp_path):
    with pytest.raises(ValueError, match="nothing: No such file"):
        reader.read(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ValueError, match="empty: no lines"):
        reader.read(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="bytes: .*decode"):
        reader.read(tmp_path / "bytes")


def test_a_target_without_a_tokenizer_takes_token_ids_alone(tmp_path):
    with Reader.open(tmp_path, model="target", vocab_size=97, longest=512) as reader:
        lines = reader.read(write(tmp_path / "data", {"prompt": [1, 2]}))
        assert lines[0].prompt == [1, 2]
        with pytest.raises(ValueError, match="target has no tokenizer: give prompt as token ids"):
            reader.read(write(tmp_path / "data", {"prompt": "a"}))
        with pytest.raises(ValueError, match="target has no chat template"):
            reader.read(write(tmp_path / "data", ASKED))
