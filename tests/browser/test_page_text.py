"""What a model writes, on the page: text that is drawn, and never runs."""

import pytest
from browsing import CHAT, ask, stream


def test_hostile_text_stays_text(open_page, expect):
    attack = "<img src=x onerror=alert(1)> <script>alert(2)</script> [x](javascript:alert(3))\n"
    attack += "\n```html\n<iframe srcdoc='<script>alert(4)</script>'></iframe>\n```\n"
    call = {"index": 0, "id": "a", "function": {"name": "<b>x</b>", "arguments": attack}}
    page = open_page(
        routes={CHAT: stream({"reasoning": attack}, {"content": attack}, {"tool_calls": [call]})}
    )
    dialogs = []
    page.on("dialog", lambda dialog: dialogs.append(dialog) or dialog.dismiss())
    ask(page, attack)
    answer = page.locator(".answer").first
    for shown in ("<img src=x onerror=alert(1)>", "<script>alert(2)", "(javascript:alert(3))"):
        expect(answer.locator(".prose").first).to_contain_text(shown)
    expect(answer.locator(".prose pre").first).to_contain_text("<iframe srcdoc=")
    expect(page.locator("#log :is(img, script, iframe, a, .call summary b b)")).to_have_count(0)
    assert dialogs == [] and open_page.faults == []
    # Even a hole in the page could not make markup of a text.
    refused = "() => { try { document.body.innerHTML = '<p>' } catch { return 'refused' } }"
    assert page.evaluate(refused) == "refused"
    assert "TrustedHTML" in open_page.faults.pop()


TEXT = """# Head
Some **bold `code`** and *slant* of a_b_c, 2 * 3 * 4.

- one
- two
  - below

3. three
4. four
```py
x = '<b>'

# y
```
> quoted

| a | b |
|---|---|
| 1 | `2` |

---
https://example.org/x and [site](https://example.com/?q=1)
**open
````"""
DRAWN = """([text, size]) => {
    const prose = new Prose();
    for (let end = 0; end < text.length; end += size) prose.set(text.slice(0, end + size));
    return prose.element.outerHTML;
}"""


def test_markdown_that_grows_is_drawn_as_if_it_were_whole(open_page):
    page = open_page()
    whole = page.evaluate(DRAWN, [TEXT, len(TEXT)])
    for size in (1, 2, 3, 7):
        assert page.evaluate(DRAWN, [TEXT, size]) == whole
    for part in (
        "<h3>Head</h3>", "<strong>bold <code>code</code></strong>", "<em>slant</em>", "a_b_c",
        "2 * 3 * 4", '<li data-depth="1">below</li>', '<li data-depth="0" value="3">three</li>',
        "x = '&lt;b&gt;'\n\n# y", "<blockquote>quoted</blockquote>", "<td><code>2</code></td>",
        "<hr>", 'site <a href="https://example.com/?q=1"', "**open",
    ):  # fmt: skip
        assert part in whole, whole


@pytest.mark.parametrize(
    "mark", ["*", "`", "[", "**", "- ", "|", "# ", "> ", "[a](https://", "    "]
)
def test_a_long_answer_of_marks_is_drawn_at_once(open_page, mark):
    page = open_page()
    milliseconds = page.evaluate(
        """(text) => {
            const began = performance.now();
            new Prose().set(text);
            return performance.now() - began;
        }""",
        mark * (100_000 // len(mark)) + "x",
    )
    assert milliseconds < 2000


def test_arithmetic_is_worked_out_without_running_code(open_page):
    page = open_page()
    cases = {
        "2 + 3 * 4": 14, "2 ^ 3 ^ 2": 512, "-2 ** 2": -4, "(1 + 2) * -3": -9, "7 % 4 / 2": 1.5,
        "0.1 + 0.2": 0.3, "1e3 - .5": 999.5, "6 × 7 ÷ 2 − 1": 20, "9007199254740991 - 0": 2**53 - 1,
    }  # fmt: skip
    for text, value in cases.items():
        assert page.evaluate("calculate", text) == value, text
    for text in ("", "1 +", "(1", "1 2", "alert(1)", "1 / 0", "1.2.3", "9" * 201, "(" * 150, "."):
        fault = page.evaluate(
            "(text) => { try { return calculate(text) } catch (error) { return error.message } }",
            text,
        )
        assert isinstance(fault, str), text
