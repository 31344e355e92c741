"""The panel, the theme and the key; pictures of the page for docs/, if they are asked for."""

import json
import os
import re
import threading
from pathlib import Path

import httpx
from browsing import CHAT, ask, bodies, refusal, setting, stream

DOCS = Path(__file__).parents[2] / "docs"


def test_the_theme_follows_the_system_until_it_is_chosen(open_page, expect):
    page = open_page(color_scheme="dark")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(paper)
    assert (
        sum(map(int, re.findall(r"\d+", light)))
        > 600
        > 200
        > sum(map(int, re.findall(r"\d+", dark)))
    )
    button = page.get_by_role("button", name="Theme")
    expect(button).to_have_accessible_name("Theme: system")
    for theme, color in (("light", light), ("dark", dark)):
        button.click()
        expect(button).to_have_accessible_name(f"Theme: {theme}")
        assert page.evaluate(paper) == color
    page.reload()
    assert page.evaluate(paper) == dark


def test_a_server_with_a_key_is_asked_with_it(open_page, expect):
    refuse = refusal(401, "give a valid key")

    def guard(route):
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.continue_()
        else:
            refuse(route)

    page = open_page(routes={"**/v1/**": guard})
    dialog = page.get_by_role("dialog", name="This server wants a key")
    expect(dialog.locator("input")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The last one was not accepted.")
    page.keyboard.press("Escape")
    expect(page.locator("#state")).to_have_text("no key")
    ask(page, "What is 17 + 25?")
    expect(dialog.locator("input")).to_be_focused()
    page.keyboard.type("sesame")
    page.keyboard.press("Enter")
    expect(page.locator(".prose")).to_have_text("42")
    expect(page.locator("#state")).to_have_text("ready")
    page.reload()
    expect(page.locator("#model")).to_have_value("flint-nano")
    stored = page.evaluate("() => [JSON.stringify(localStorage), document.cookie].join()")
    assert "sesame" not in stored


def test_a_schema_gives_json_of_it(open_page, expect):
    page = open_page()
    sent = bodies(page)
    schema = setting(page, "schema")
    schema.fill("{")
    ask(page, "What is 17 + 25?")
    assert "not JSON" in schema.evaluate("(field) => field.validationMessage")
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Fill in an example schema").click()
    ask(page, "What is 17 + 25?")
    code = page.locator("figure code")
    expect(page.locator("#said")).to_have_text(re.compile(r"^Answer: \{"))
    answer = json.loads(code.text_content())
    assert set(answer) == {"answer", "sure"} and isinstance(answer["sure"], bool)
    assert len(answer["answer"]) <= 60
    asked = sent[0]["response_format"]
    assert asked["type"] == "json_schema" and asked["json_schema"]["strict"] is True


def test_settings_are_sent_and_kept_and_empty_ones_are_left_out(open_page, expect):
    page = open_page(routes={CHAT: stream({"content": "ok"})})
    sent = bodies(page)
    ask(page, "one")
    expect(page.locator(".prose")).to_have_text("ok")
    assert set(sent[0]) == {"model", "messages", "stream", "stream_options"}
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "max_tokens": 40}
    for name, value in numbers.items():
        setting(page, name).fill(str(value))
    setting(page, "system").fill("Be brief.")
    setting(page, "thinking").select_option("off")
    page.reload()
    ask(page, "two")
    expect(page.locator(".prose")).to_have_text("ok")
    assert sent[1].items() >= numbers.items()
    assert sent[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent[1]["chat_template_kwargs"] == {"enable_thinking": False}
    setting(page, "temperature").fill("3")
    ask(page, "three")
    expect(page.locator(".turn")).to_have_count(1)
    expect(setting(page, "temperature")).to_be_focused()


def test_the_load_is_read_from_the_metrics(open_page, expect):
    generated = [0]

    def metrics(route):
        generated[0] += 50
        label = '{engine="0",model_name="a"}'
        values = {
            "num_requests_running": 3, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.25,
            "generation_tokens_total": generated[0], "prefix_cache_queries_total": 200,
            "prefix_cache_hits_total": 50, "spec_decode_num_draft_tokens_total": 80,
            "spec_decode_num_accepted_tokens_total": 60,
        }  # fmt: skip
        body = "".join(f"vllm:{name}{label} {value}\n" for name, value in values.items())
        route.fulfill(content_type="text/plain", body=f"# HELP x\n{body}")

    page = open_page(routes={"**/metrics": metrics})
    loads = page.locator(".load b")
    expect(loads.nth(0)).to_have_text(re.compile(r"^[34]\d(\.\d)?$|^50$"))
    expect(loads.nth(1)).to_have_text("3")
    expect(loads.nth(2)).to_have_text("1")
    expect(loads.nth(3)).to_have_text("25 %")
    expect(page.get_by_role("img", name="Running: 3 now, at most 3")).to_be_visible()
    totals = page.locator("#totals")
    expect(totals).to_contain_text("Prompt tokens from the cache25 %")
    expect(totals).to_contain_text("Drafted tokens accepted75 %")


def test_a_narrow_screen_shows_one_thing_at_a_time(open_page, expect):
    page = open_page()
    page.set_viewport_size({"width": 360, "height": 640})
    wide = "() => document.documentElement.scrollWidth"
    panel, toggle = page.locator("#panel"), page.get_by_role("button", name="Settings and load")
    expect(panel).to_be_hidden()
    assert page.evaluate(wide) == 360
    toggle.click()
    expect(panel).to_be_visible()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    box = panel.bounding_box()
    assert (box["x"], box["width"]) == (0, 360) and page.evaluate(wide) == 360
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    ask(page, "What is 17 + 25?")
    expect(page.locator(".prose")).to_have_text("42")


def test_the_page_under_load_has_its_pictures_taken(open_page, expect, server, tmp_path):
    # With LIMELIGHT_SCREENSHOTS=1 for the docs, and then after long enough for the charts to fill.
    folder, milliseconds = tmp_path, 1_500
    if os.environ.get("LIMELIGHT_SCREENSHOTS") == "1":
        folder, milliseconds = DOCS, 45_000
    done = threading.Event()

    def load(index):
        body = {"prompt": "Once upon a time", "max_tokens": 20 + 9 * index, "ignore_eos": True}
        while not done.is_set():
            httpx.post(f"{server.url}/v1/completions", json=body | {"temperature": 1.0})
            done.wait(2 * index)

    threads = [threading.Thread(target=load, args=(index,)) for index in range(1, 5)]
    pages = {
        "light": open_page(color_scheme="light"),
        "dark": open_page(color_scheme="dark"),
        "narrow": open_page(color_scheme="light", device_scale_factor=1),
    }
    pages["narrow"].set_viewport_size({"width": 390, "height": 800})
    for thread in threads:
        thread.start()
    try:
        for page in pages.values():
            page.get_by_role("button", name="What is 17 + 25?").click()
            expect(page.locator(".prose")).to_have_text("42")
            page.locator("details.reasoning summary").click()
            setting(page, "tools").select_option("auto", force=True)
            ask(page, "What time is it in Oslo?")
            expect(page.locator(".prose")).to_have_count(2)
        pages["dark"].wait_for_timeout(milliseconds)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    for name, page in pages.items():
        path = folder / f"page-{name}.png"
        page.bring_to_front()
        page.screenshot(path=path)
        assert 10_000 < path.stat().st_size < 150_000
