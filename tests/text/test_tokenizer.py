import json
import threading

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from limelight.text.tokenizer import Tokenizer
from limelight.types import RequestError

TEXTS = ["", "the end", "  the  end ", "naïve café", "\U0001f468‍\U0001f469", "a\x00b\n\t", "नमस्ते"]
TEXTS += ["".join(map(chr, range(0x800)))]  # all bytes of UTF-8 below E0


def write(folder, name, **values):
    (folder / name).write_text(json.dumps(values))


def edit(folder, **values):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_library_and_decode_to_the_text(tokenizer, library, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_ids_decode_as_the_library_decodes_them(tokenizer, library, data, skip):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    expected = library.decode(ids, skip_special_tokens=skip)
    if tokenizer.drops_first_blank:
        # The library gives up a whole run of byte tokens for one bad byte; we keep what is valid.
        assume("�" not in expected)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_a_bad_byte_does_not_spoil_the_characters_beside_it(tokenizer):
    known = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [known[bytes([byte])] for byte in "xé".encode() + b"\xff" + "é".encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "xé�é"


@pytest.mark.parametrize("text", TEXTS[1:])
def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.removeprefix(b" " * tokenizer.drops_first_blank) == text.encode()


def test_tokens_with_different_bytes_have_different_texts_and_none_is_empty(tokenizer):
    by_bytes = {
        tokenizer.token_bytes(i): tokenizer.token_text(i) for i in range(tokenizer.vocab_size)
    }
    assert len(set(by_bytes.values())) == len(by_bytes) > 250
    assert "" not in by_bytes.values()
    assert not any("�" in text for text in by_bytes.values())


def test_half_a_character_is_named_by_its_bytes(tokenizer):
    texts = {tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}
    assert {"bytes:\\xf0", "bytes:\\x9f", "a"} <= texts


@pytest.mark.parametrize("token_id", [-1, -(2**70), 10_000, 2**31, 2**70])
def test_an_unknown_id_has_no_bytes_but_a_name(tokenizer, token_id):
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == f"token_id:{token_id}"
    assert tokenizer.decode([token_id], skip_special_tokens=False) == ""


def test_the_text_of_a_special_token_becomes_the_token_wherever_it_stands(folder):
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("the<|user|>the", add_special_tokens=False)
    assert [i for i in ids if i in tokenizer.special_ids] == [1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "thethe"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the<|user|>the"


def test_special_tokens_are_added_on_request_alone(folder):
    start, text = {"id": "<|user|>", "type_id": 0}, {"id": "A", "type_id": 0}
    template = [{"SpecialToken": start}, {"Sequence": text}]
    tokens = {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}}
    processor = {"type": "TemplateProcessing", "single": template, "pair": template}
    edit(folder, post_processor=processor | {"special_tokens": tokens})
    tokenizer = Tokenizer.load(folder)
    bare = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [1, *bare]


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\udc00\ud800"])
def test_half_a_surrogate_pair_is_refused(tokenizer, text):
    with pytest.raises(RequestError, match="not valid Unicode.*character"):
        tokenizer.encode(text, add_special_tokens=False)


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    beats, done = 0, threading.Event()

    def beat():
        nonlocal beats
        while not done.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    tokenizer.encode("word " * 50_000, add_special_tokens=False)
    done.set()
    thread.join()
    assert beats > 5


@pytest.mark.parametrize("unit", ["a", " ", "\0", "\U0001f600", "<|end|>"], ids=ascii)
def test_a_long_monotonous_text_comes_back_whole(folder, unit):
    tokenizer = Tokenizer.load(folder)
    text = unit * 100_003
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_lengths_that_a_file_was_saved_with_do_not_apply(folder):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|end|>",
    }  # fmt: skip
    before = Tokenizer.load(folder).encode("the quick brown fox", add_special_tokens=False)
    edit(folder, truncation=truncation, padding=padding)
    assert len(before) > 3
    assert Tokenizer.load(folder).encode("the quick brown fox", add_special_tokens=False) == before


def test_named_tokens_come_from_the_config_and_ids_from_the_vocabulary(folder):
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|user|>", "<|end|>")
    assert tokenizer.eos_token_ids == [0]
    assert tokenizer.special_ids == {0, 1}
    tokens = json.loads((folder / "tokenizer.json").read_text())
    ids = [*tokens["model"]["vocab"].values(), *(token["id"] for token in tokens["added_tokens"])]
    assert tokenizer.vocab_size == max(ids) + 1


def test_a_folder_with_nothing_but_the_vocabulary_has_no_named_tokens(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == (None, None, [])


def test_named_tokens_may_stand_in_the_special_tokens_map(folder):
    write(folder, "tokenizer_config.json")
    write(folder, "special_tokens_map.json", eos_token={"content": "<|user|>", "lstrip": False})
    assert Tokenizer.load(folder).eos_token_ids == [1]


def test_the_models_own_end_tokens_come_before_the_tokenizers(folder):
    write(folder, "config.json", eos_token_id=7)
    assert Tokenizer.load(folder).eos_token_ids == [7, 0]
    write(folder, "generation_config.json", eos_token_id=[5, 0, 6])
    assert Tokenizer.load(folder).eos_token_ids == [5, 0, 6]


@pytest.mark.parametrize("value", ["0", [1, "2"], True, -1, 1.5])
def test_an_end_token_that_is_no_id_is_refused(folder, value):
    write(folder, "generation_config.json", eos_token_id=value)
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id"):
        Tokenizer.load(folder)


def test_tokens_that_only_the_config_names_are_added(folder):
    size = Tokenizer.load(folder).vocab_size
    added = {
        f"{size}": {"content": "<|call|>", "special": True, "normalized": False, "lstrip": False},
        f"{size + 1}": {"content": "<arg>", "special": False},
        "0": {"content": "<|end|>", "special": True},
    }
    write(folder, "tokenizer_config.json", added_tokens_decoder=added)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<|call|><arg><|end|>", add_special_tokens=False) == [size, size + 1, 0]
    assert tokenizer.special_ids == {0, 1, size}
    assert tokenizer.vocab_size == size + 2


@pytest.mark.parametrize(
    "added",
    [{"999": {"content": "<|call|>"}}, {"999": {}}, {"x": {"content": "a"}}, {"999": "a"}, [1]],
)
def test_an_added_token_that_cannot_have_its_id_is_refused(folder, added):
    write(folder, "tokenizer_config.json", added_tokens_decoder=added)
    with pytest.raises(ValueError, match="tokenizer_config.json: bad added_tokens_decoder"):
        Tokenizer.load(folder)


def test_an_end_token_outside_the_vocabulary_is_refused(folder):
    write(folder, "tokenizer_config.json", eos_token="<|nowhere|>")
    with pytest.raises(ValueError, match=r"<\|nowhere\|>.*not in the vocabulary"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: no such file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Strip", "content": " ", "start": 2, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
    ids=str,
)
def test_a_decoder_without_a_rule_is_refused(folder, decoder):
    edit(folder, decoder=decoder)
    with pytest.raises(ValueError, match="tokenizer.json: no rule for the decoder"):
        Tokenizer.load(folder)
