"""A real browser before a real server, which is one for all tests of the page."""

import os
import shutil
from importlib.util import find_spec

import pytest
from served import serve

NAMES = ("chromium", "chromium-browser", "google-chrome")


def lacking(what: str):
    """Skip for want of `what`, or fail where the browser tests must run."""
    if os.environ.get("LIMELIGHT_NEEDS_BROWSER") == "1":
        pytest.fail(f"LIMELIGHT_NEEDS_BROWSER is set, and there is no {what}")
    pytest.skip(f"no {what}")


@pytest.fixture(scope="session")
def browser_path():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        lacking(f"browser: none of {', '.join(NAMES)} is on the path")
    if find_spec("playwright") is None:
        lacking("playwright: pip install playwright")
    return found


@pytest.fixture(scope="module")
def browser(browser_path):
    """Of a module, since no other test can run an event loop as long as playwright runs its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container's root has no sandbox for it, and its /dev/shm is small.
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=browser_path, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def expect(browser_path):
    """Playwright's, which waits for what it expects."""
    from playwright.sync_api import expect

    expect.set_options(timeout=15_000)
    return expect


@pytest.fixture(scope="session")
def server(browser_path, tmp_path_factory):
    with serve(tmp_path_factory.mktemp("served"), "flint-nano", "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture
def open_page(browser, server):
    """Opens the page in a fresh profile; a fault in its script or its policy fails the test."""
    contexts, faults = [], []

    def note(message):
        # The browser itself notes answers with an error status, which some tests ask for.
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def make(*, routes=None, **options):
        context = browser.new_context(viewport={"width": 1200, "height": 800}, **options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", note)
        for pattern, answer in (routes or {}).items():
            page.route(pattern, answer)
        page.goto(server.url)
        return page

    make.faults = faults
    yield make
    for context in contexts:
        context.close()
    assert faults == []
