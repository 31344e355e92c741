"""A conversation on the page: a real browser, the real server, and where a model cannot be made to
say or fail what is needed, the server's answer in its place.
"""

import json
import re

import pytest
from browsing import CHAT, ask, bodies, refusal, setting, stream


def test_an_answer_streams_in_and_its_reasoning_folds(open_page, expect):
    page = open_page()
    page.get_by_role("button", name="What is 17 + 25?").click()
    expect(page.locator(".prose")).to_have_text("42")
    reasoning = page.locator("details.reasoning")
    expect(reasoning.locator("summary")).to_have_text(
        re.compile(r"^Thought for [\d.]+ m?s, \d+ tok")
    )
    expect(reasoning.locator("div")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.locator("div")).to_contain_text("7 + 5 = 12")
    figures = page.locator(".figures")
    for name in ("tokens/s", "to first token", "in the prompt", "from the cache"):
        expect(figures).to_contain_text(name)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#said")).to_have_text("Answer: 42")


def test_a_tool_runs_in_the_page_and_its_result_goes_back(open_page, expect):
    page = open_page()
    sent = bodies(page)
    setting(page, "temperature").fill("0")
    page.get_by_role("button", name="What time is it in Oslo?").click()
    card = page.locator("details.call")
    expect(card).to_contain_text("get_time ran in this page")
    expect(card).to_contain_text('{"city": "Oslo"}')
    result = card.locator("dd").last.text_content()
    assert re.fullmatch(r'\{"time": "\d\d:\d\d"\}', result)
    expect(page.locator(".prose")).to_contain_text(re.compile(r"\d\d:\d\d"))
    first, second = sent
    assert first["tool_choice"] == "auto" and len(first["tools"]) == 3
    user, call, told = second["messages"]
    assert user["content"] == "What time is it in Oslo?"
    assert told["role"] == "tool" and told["content"] == result
    assert told["tool_call_id"] == call["tool_calls"][0]["id"]


def test_what_a_tool_cannot_do_is_a_result_that_the_model_reads(open_page, expect):
    def call(name, arguments):
        function = {"name": name, "arguments": arguments}
        delta = {"index": 0, "id": "call", "type": "function", "function": function}
        return stream({"tool_calls": [delta]}, finish="tool_calls")

    answers = [
        call("constructor", "{}"), call("calculate", '{"expression": "1 +"}'),
        call("get_time", "{"), call("calculate", '{"expression": "2 * (3 + 4)"}'),
        stream({"content": "Done."}),
    ]  # fmt: skip
    page = open_page(routes={CHAT: lambda route: answers.pop(0)(route)})
    ask(page, "go")
    expect(page.locator(".prose")).to_have_text("Done.")
    results = page.locator(".call dd:last-child").all_text_contents()
    assert [sorted(json.loads(result)) for result in results[:3]] == [["error"]] * 3
    assert "constructor" in results[0] and results[3] == "14"


def test_a_call_that_was_cut_does_not_run(open_page, expect):
    function = {"name": "roll_dice", "arguments": "{"}
    delta = {"index": 0, "id": "call", "type": "function", "function": function}
    page = open_page(routes={CHAT: stream({"tool_calls": [delta]}, finish="length")})
    sent = bodies(page)
    ask(page, "go")
    expect(page.locator(".notice").first).to_contain_text("Max tokens")
    expect(page.locator(".call")).not_to_contain_text("result")
    ask(page, "again")
    expect(page.locator(".turn")).to_have_count(2)
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "user"]


def test_escape_stops_the_stream_and_the_server_too(open_page, expect, server):
    def without_end(route):
        body = route.request.post_data_json | {"ignore_eos": True, "max_tokens": 8000}
        route.continue_(post_data=json.dumps(body))

    page = open_page(routes={CHAT: without_end})
    ask(page, "Hello")
    text = page.locator(".answer > div").first
    expect(text).to_contain_text(re.compile(".{40}", re.DOTALL))
    shown = text.text_content()
    expect(page.locator(".figures")).to_contain_text("tokens/s")
    expect(text).not_to_have_text(shown)
    assert server.gauge("num_requests_running") == 1
    page.keyboard.press("Escape")
    expect(page.locator(".notice")).to_have_text("Stopped.")
    assert shown[:40] in text.text_content()
    assert server.idle()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_keys_alone_are_enough(open_page, expect):
    page = open_page()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    expect(page.get_by_label("Message", exact=True)).to_have_value("first\nsecond")
    names = []
    for _ in range(16):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate(
                "() => { const at = document.activeElement, label = at.labels?.[0]?.firstChild;"
                " return (at.ariaLabel || label?.textContent || at.textContent).trim() }"
            )
        )
    wanted = [
        "Send",
        "Reset",
        "System prompt",
        "Temperature",
        "Top p",
        "Top k",
        "Seed",
        "Max tokens",
    ]
    wanted += ["Thinking", "Thinking budget", "Tools", "JSON schema of the answer"]
    assert names[: len(wanted)] == wanted
    outline = "() => getComputedStyle(document.activeElement).outlineStyle"
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Tab")
    assert page.evaluate(outline) == "solid"
    page.get_by_label("Message", exact=True).fill("What is 17 + 25?")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".prose")).to_have_text("42")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_a_message_is_edited_retried_and_left_behind(open_page, expect):
    page = open_page(routes={CHAT: stream({"content": "ok"})})
    sent = bodies(page)
    for text in ("one", "two"):
        ask(page, text)
        expect(page.locator(".prose").last).to_have_text("ok")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Retry").last.click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit").first).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Edit the message").fill("three")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator(".prose")).to_have_text("ok")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "four")
    expect(page.locator(".prose")).to_have_text("ok")
    asked = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in sent]
    assert asked == [["one"], ["one", "two"], ["one", "two"], ["three"], ["four"]]


DIED = 'event: error\ndata: {"error": {"message": "the engine has died"}}\n\n'
BREAKS = {
    "cut": ("", "in the middle of the answer"),
    "died": (DIED, "the engine has died. What came before is kept"),
    "garbled": ("data: {\n\n", "not JSON"),
}


@pytest.mark.parametrize(("end", "told"), BREAKS.values(), ids=BREAKS)
def test_of_a_stream_that_breaks_what_came_is_kept(open_page, expect, end, told):
    page = open_page(routes={CHAT: stream({"content": "So far"}, finish=None, end=end)})
    ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text(told)
    expect(page.locator(".prose")).to_have_text("So far")


REFUSALS = {
    "unreachable": (lambda route: route.abort(), "cannot be reached"),
    "bad": (refusal(400, "n must be 1", "n"), "n must be 1 (n). Change the setting"),
    "full": (refusal(503, "too many"), "too many. The server is loading or full: retry"),
    "proxy": (lambda route: route.fulfill(status=502, body="<h1>Bad</h1>"), "502"),
}


@pytest.mark.parametrize(("route", "told"), REFUSALS.values(), ids=REFUSALS)
def test_an_error_says_what_to_do_and_retry_asks_again(open_page, expect, route, told):
    page = open_page(routes={CHAT: route})
    ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text(told)
    page.unroute(CHAT)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".prose")).to_contain_text("flint-nano")
    expect(page.get_by_role("alert")).to_have_count(0)
