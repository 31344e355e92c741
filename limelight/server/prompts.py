"""From conversations and texts to token ids. Long ones take seconds: all here is for threads."""

from dataclasses import dataclass

from limelight.server.messages import Conversation
from limelight.text.template import ChatTemplate
from limelight.text.tokenizer import Tokenizer
from limelight.types import RequestError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it, and its text where it came as one."""

    token_ids: list[int]
    text: str | None


class Prompts:
    """Renders and tokenizes; a model that lacks what that takes gets a `RequestError`."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None):
        self.tokenizer = tokenizer
        self.template = template

    def read(
        self, source: Conversation | list[str | list[int]], *, add_special_tokens: bool
    ) -> list[Prompt]:
        """The prompts of a question, in order; `RequestError` says what cannot be one."""
        parts = [self._render(source)] if isinstance(source, Conversation) else source
        return [
            Prompt(self._encode(part, add_special_tokens), part)
            if isinstance(part, str)
            else Prompt(part, None)
            for part in parts
        ]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids", param="prompt")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render(self, conversation: Conversation) -> str:
        if self.template is None:
            raise RequestError(
                "this model has no chat template; the server takes one with --chat-template",
                param="messages",
            )
        try:
            return self.template.render(
                conversation.messages,
                tools=conversation.tools.shown,
                documents=conversation.documents,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                **conversation.template_kwargs,
            )
        except RecursionError as error:
            raise RequestError("messages are nested too deeply", param="messages") from error

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """Each token as text for people."""
        assert self.tokenizer is not None, "there were no token ids without a tokenizer"
        return [self.tokenizer.token_text(token_id) for token_id in token_ids]

    def text(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones included; `RequestError` for ids that do not exist."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", param="tokens")
        size = self.tokenizer.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            raise RequestError(f"tokens must be from 0 to {size - 1}", param="tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)
