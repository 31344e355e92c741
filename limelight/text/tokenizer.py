"""Text to token ids and back, on the `tokenizers` library.

A token stands for bytes, so what a model says is decoded by joining bytes, whole or as it comes.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tokenizers

from limelight.checkpoint import read_json
from limelight.types import RequestError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DECODER_STEPS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip")


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters are their own byte, the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_characters()


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tokens of a vocabulary are written: what the decoder of tokenizer.json undoes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    drops_first_blank: bool = False

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            # A token with a character from outside the table is an added one, written as it is.
            known = all(character in BYTE_OF for character in token)
            return bytes(BYTE_OF[character] for character in token) if known else token.encode()
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def _read_spelling(backend: tokenizers.Tokenizer, path: Path) -> Spelling:
    decoder = json.loads(backend.decoder.__getstate__() if backend.decoder else '{"type": "none"}')
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    by_type = {step["type"]: step for step in steps}
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    strip = by_type.get("Strip", {"content": " ", "start": 0, "stop": 0})
    known = (
        all(name in DECODER_STEPS for name in by_type)
        and ("ByteLevel" not in by_type or len(steps) == 1)
        and all("String" in pattern for pattern, _ in replaced)
        and (strip["content"], strip["stop"]) == (" ", 0)
        and strip["start"] in (0, 1)
    )
    if not known:
        raise ValueError(
            f"{path}: no rule for the decoder {json.dumps(decoder)}; there is one for ByteLevel, "
            "and for Replace, ByteFallback, Fuse and Strip of one first blank"
        )
    return Spelling(
        byte_level="ByteLevel" in by_type,
        byte_fallback="ByteFallback" in by_type,
        replacements=tuple((pattern["String"], content) for pattern, content in replaced),
        drops_first_blank=strip["start"] == 1,
    )


class Tokenizer:
    """The vocabulary of a model: `vocab_size` is its highest id + 1, holes included.

    `config` is tokenizer_config.json, empty where there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling,
        *,
        bos_token: str | None,
        eos_token: str | None,
        eos_token_ids: list[int],
        config: dict[str, object],
    ):
        self.config = config
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.eos_token_ids = eos_token_ids
        self.drops_first_blank = spelling.drops_first_blank
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._backend = backend
        self._spelling = spelling
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a model folder; `ValueError` names the file that is missing or bad."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file, so the model has no tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: not a tokenizer: {error}") from error
        # A file saved in training may ask for prompts to be cut or filled up.
        backend.no_truncation()
        backend.no_padding()
        config = _optional_json(folder / "tokenizer_config.json")
        _add_tokens(backend, config, folder / "tokenizer_config.json")
        names = special_tokens(folder)
        return cls(
            backend,
            _read_spelling(backend, path),
            bos_token=names.get("bos_token"),
            eos_token=names.get("eos_token"),
            eos_token_ids=_eos_token_ids(folder, backend, names.get("eos_token")),
            config=config,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of `text`; takes about half a second a megabyte and lets other threads run.

        The text of a special token becomes that token, wherever it stands: a rendered chat prompt
        needs it, and a user's own text is not told apart. Raises `RequestError` for text that is
        not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: half a surrogate pair at character {error.start}"
            ) from error
        # A batch of one: `encode` itself holds all other threads up until it is done.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`: their bytes joined, with U+FFFD for what is not UTF-8.

        Byte-fallback bytes count one by one, so what stands around an invalid one is kept.
        """
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = data.decode(errors="replace")
        return text.removeprefix(" ") if self.drops_first_blank else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character; none for unknown ids."""
        data = self._bytes.get(token_id)
        if data is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            token = self._backend.id_to_token(token_id)
            data = self._spelling.to_bytes(token) if token is not None else b""
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        r"""The token as text for people; `bytes:\xf0\x9f` where it ends inside a character.

        Tokens with different bytes have different texts; one without bytes is `token_id:N`.
        """
        data = self.token_bytes(token_id)
        if not data:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def special_tokens(folder: Path) -> dict[str, str]:
    """The named tokens of a model folder: `bos_token`, `eos_token` and so on, with their texts."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _optional_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, object], path: Path):
    """Add what `added_tokens_decoder` names and tokenizer.json lacks, under the same ids."""
    listed = cast(dict[str, dict[str, object]], config.get("added_tokens_decoder", {}))
    present = backend.get_added_tokens_decoder()
    try:
        missing = {int(i): token for i, token in listed.items() if int(i) not in present}
        for token_id, token in sorted(missing.items()):
            flags = {flag: bool(token[flag]) for flag in ADDED_TOKEN_FLAGS if flag in token}
            backend.add_tokens([tokenizers.AddedToken(str(token["content"]), **flags)])
            if backend.id_to_token(token_id) != token["content"]:
                raise ValueError(f"{token['content']!r} cannot have the id {token_id}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: bad added_tokens_decoder: {error}") from error


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """The ids that end an answer: of the model's own files, then the tokenizer's."""
    ids: list[int] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _optional_json(path).get("eos_token_id")
        if value is not None:
            ids = cast(list[int], value if isinstance(value, list) else [value])
            if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
                raise ValueError(f"{path}: eos_token_id must be token ids, found {value!r}")
            break
    if eos_token is not None:
        token_id = backend.token_to_id(eos_token)
        if token_id is None:
            raise ValueError(f"{folder}: the eos_token {eos_token!r} is not in the vocabulary")
        ids = [*ids, token_id]
    return list(dict.fromkeys(ids))
