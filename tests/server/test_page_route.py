"""The route of the web page: open to all, cheap to ask again, and closed to foreign scripts."""

import re
from base64 import b64encode
from hashlib import sha256


def test_the_page_needs_no_key_and_what_it_asks_does(make_api):
    api = make_api(api_key=["alpha"])
    answer = api.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "alpha" not in answer.text
    assert api.get("/v1/models").status_code == 401


def test_its_policy_lets_only_its_own_script_and_style_run(api):
    answer = api.get("/")
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    for tag in ("script", "style"):
        [body] = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = b64encode(sha256(body.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    assert policy["require-trusted-types-for"] == "'script'"


def test_it_needs_nothing_from_elsewhere(api):
    html = api.get("/").text
    addresses = set(re.findall(r"https?://[\w./]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, never fetched
    assert not re.search(r"<(link|script|img)[^>]+(src|href)=[\"'](?!data:)", html)
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in html


def test_a_browser_that_has_it_gets_it_again_only_when_it_has_changed(api):
    first = api.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = api.get("/", headers={"if-none-match": f"W/{first.headers['etag']}"})
    assert (again.status_code, again.content) == (304, b"")
    assert api.get("/", headers={"if-none-match": '"other"'}).status_code == 200
    assert api.post("/", json={}).status_code == 405
