"""Log-probabilities in the three shapes of the API: chat's, completions' and vLLM's for prompts."""

from limelight.text.tokenizer import Tokenizer
from limelight.types import TokenLogprobs

# JSON has no infinity; vLLM's floor.
LOWEST = -9999.0


class TokenNames:
    """How tokens are called in an answer: by their text, or as token_id:N."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool, skip_special_tokens: bool):
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None
        self.skip_special_tokens = skip_special_tokens

    def name(self, token_id: int) -> str:
        """The token for people to read."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def data(self, token_id: int) -> bytes:
        """What the token adds to the text; nothing for a special one that the text leaves out."""
        if self.tokenizer is None:
            return b""
        if self.skip_special_tokens and token_id in self.tokenizer.special_ids:
            return b""
        return self.tokenizer.token_bytes(token_id)


def chat_logprobs(
    entries: list[TokenLogprobs], names: TokenNames, top: int
) -> dict[str, list[object]]:
    """OpenAI's `logprobs` of a chat choice, with up to `top` likely tokens at each position."""
    content: list[object] = []
    for entry in entries:
        likely = [
            _chat_token(names, *pair) for pair in (entry.top if top == -1 else entry.top[:top])
        ]
        token = _chat_token(names, entry.token_id, entry.logprob)
        content.append({**token, "top_logprobs": likely})
    return {"content": content}


def _chat_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": names.name(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(names.data(token_id)),
    }


class CompletionLogprobs:
    """OpenAI's `logprobs` of a completion choice; remembers how far its text has come."""

    def __init__(self, names: TokenNames, top: int):
        self.names = names
        self.top = top
        self.offset = 0

    def first(self, token_id: int) -> dict[str, list[object]]:
        """The first token of a prompt, which nothing predicts."""
        return self._lists([(token_id, None, None)])

    def take(self, entries: list[TokenLogprobs]) -> dict[str, list[object]]:
        """The next tokens: `tokens`, `token_logprobs`, `top_logprobs` and `text_offset`."""
        return self._lists([(entry.token_id, entry.logprob, entry) for entry in entries])

    def _lists(
        self, rows: list[tuple[int, float | None, TokenLogprobs | None]]
    ) -> dict[str, list[object]]:
        offsets: list[object] = []
        for token_id, _, _ in rows:
            offsets.append(self.offset)
            # Characters are counted by their first bytes, since a token may hold a part of one.
            self.offset += sum(byte & 0xC0 != 0x80 for byte in self.names.data(token_id))
        return {
            "tokens": [self.names.name(token_id) for token_id, _, _ in rows],
            "token_logprobs": [
                None if value is None else max(value, LOWEST) for _, value, _ in rows
            ],
            "top_logprobs": [self._likely(entry) for _, _, entry in rows],
            "text_offset": offsets,
        }

    def _likely(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top = entry.top if self.top == -1 else entry.top[: self.top]
        pairs = [*top, (entry.token_id, entry.logprob)]
        return {self.names.name(token_id): max(value, LOWEST) for token_id, value in pairs}


def prompt_logprobs(
    entries: list[TokenLogprobs | None], names: TokenNames, top: int
) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token and the `top` likeliest."""
    return [None if entry is None else _by_id(entry, names, top) for entry in entries]


def _by_id(entry: TokenLogprobs, names: TokenNames, top: int) -> dict[str, object]:
    likely = entry.top if top == -1 else entry.top[:top]
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(likely, 1)]
    return {
        str(token_id): {
            "logprob": max(value, LOWEST),
            "rank": rank,
            "decoded_token": names.name(token_id),
        }
        for token_id, value, rank in ranked
    }
