"""Whatever is asked of the bundled models, answers keep to it, however wild the sampling."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from random_requests import drawn, faults

AT_ONCE = 6
# What a server refuses that has no time for one more grammar.
TOO_SLOW = ("takes more than", "take long")


def answer(server: httpx.Client, body: dict) -> dict:
    """Calls, content and finish reason, or what went wrong."""
    response = server.post("/chat/completions", json=body)
    if response.status_code == 400 and any(words in response.text for words in TOO_SLOW):
        return {"refused": response.text}
    if response.status_code != 200:
        return {"error": f"{response.status_code}: {response.text}"}
    if body["stream"]:
        return streamed(response.text)
    [choice] = response.json()["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or []]
    calls = [(one["name"], one["arguments"]) for one in functions]
    content = choice["message"]["content"] or ""
    return {"calls": calls, "content": content, "reason": choice["finish_reason"]}


def streamed(text: str) -> dict:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if lines[-1:] != ["[DONE]"]:
        return {"error": f"the stream has no end: {text[-200:]}"}
    calls: dict[int, tuple[str, str]] = {}
    content, reason = "", None
    for chunk in map(json.loads, lines[:-1]):
        if "error" in chunk:
            return {"error": str(chunk)}
        [choice] = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or []:
            name, arguments = calls.get(call["index"], ("", ""))
            name += call["function"].get("name") or ""
            calls[call["index"]] = name, arguments + (call["function"].get("arguments") or "")
        reason = choice["finish_reason"] or reason
    made = list(calls.values())
    if reason == "length" and made and not is_json(made[-1][1]):
        # What was sent of a call cannot be taken back.
        made.pop()
    return {"calls": made, "content": content, "reason": reason}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("number", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_answers_keep_to_random_requests(client, number):
    bodies = drawn(number)
    any_order = client.models.list().data[0].id == "flint-nano"
    server = httpx.Client(base_url=str(client.base_url), timeout=300)
    begun = time.monotonic()
    with server, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda body: answer(server, body), bodies))
    taken = time.monotonic() - begun
    errors = [
        (one["error"], body) for body, one in zip(bodies, answers, strict=True) if "error" in one
    ]
    told = [one for one in answers if "calls" in one]
    wrong = [
        (found, body)
        for body, one in zip(bodies, answers, strict=True)
        if "calls" in one and (found := faults(body, one, any_order=any_order))
    ]
    num_calls = sum(len(one["calls"]) for one in told)
    num_cut = sum(one["reason"] == "length" for one in told)
    print(
        f"{len(bodies)} requests, {num_calls} calls, {len(wrong)} wrong, "
        f"{len(errors)} errors, {num_cut} cut by length, "
        f"{sum('refused' in one for one in answers)} refused as too slow to prepare, {taken:.1f} s"
    )
    assert not errors + wrong, json.dumps((errors + wrong)[:5], indent=1)
    assert len(told) - num_cut > len(bodies) / 2
