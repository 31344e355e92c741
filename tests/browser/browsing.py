"""What tests of the page do all the time: answer for the server, ask, look at what was sent."""

import json
import re

CHAT = "**/v1/chat/completions"


def stream(*deltas, finish="stop", end="data: [DONE]\n\n"):
    """A route that answers with a stream of these deltas."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    if finish:
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    lines = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    body = "".join(lines) + end
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def refusal(status, message, param=None):
    """A route that answers with an error as the server would."""
    error = {"error": {"message": message, "param": param}}
    return lambda route: route.fulfill(status=status, json=error)


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def setting(page, name):
    return page.locator(f"[name={name}]")


def bodies(page):
    """The chat requests that the page sends from now on, as they are sent."""
    sent = []
    is_chat = re.compile("/v1/chat/completions$")

    def note(request):
        if is_chat.search(request.url):
            sent.append(request.post_data_json)

    page.on("request", note)
    return sent
