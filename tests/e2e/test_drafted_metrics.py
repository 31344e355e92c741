"""What becomes of drafts shows in /metrics of a running server, place by place."""

import json
import re

import pytest
from drafters import write_drafter
from served import serve
from tiny import write_checkpoint

TOLD = [1.0, 0.5, 0.0]
KEYS = {
    "num_speculative_tokens": 3, "enable_adaptive_verification": True,
    "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": TOLD,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    target, drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    write_checkpoint(target, "flint")
    write_drafter(drafter)
    flags = ["--device", "cpu", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    chosen = json.dumps({"model": str(drafter)} | KEYS)
    with serve(target, str(target), *flags, "--speculative-config", chosen) as running:
        yield running


def figures(server) -> dict[str, float]:
    """By name and, where there is one, place."""
    found = {}
    for line in server.http.get("/metrics").text.splitlines():
        if match := re.fullmatch(r"vllm:spec_decode_(\w+)\{(.*)\} (\S+)", line):
            place = re.search(r'position="(\d+)"', match[2])
            found[match[1] + (place[1] if place else "")] = float(match[3])
    return found


def complete(server, count: int) -> list[int]:
    body = {"prompt": [3, 1, 4, 1, 5], "max_tokens": count, "ignore_eos": True, "temperature": 0}
    answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_counters_move_with_what_is_served(server):
    before = figures(server)
    assert before["num_drafts_total"] == before["num_made_tokens_total"] == 0
    assert before["synthetic"] == before["drafting"] == 1
    assert len(complete(server, 40)) == 40
    after = figures(server)
    assert after["num_drafts_total"] > 10
    assert after["num_made_tokens_total"] >= after["num_offered_tokens_total"]
    assert after["num_offered_tokens_total"] >= after["num_draft_tokens_total"] > 0
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        by_place = [after[f"{name}_per_pos_total{place}"] for place in range(3)]
        assert sum(by_place) == after[f"{name}_total"]
        assert by_place == sorted(by_place, reverse=True)
    first, second, third = (after[f"num_accepted_tokens_per_pos_total{n}"] for n in range(3))
    assert first == after["num_draft_tokens_per_pos_total0"] == after["num_drafts_total"]
    assert 0 < second < first and third == 0
    # Forty tokens: one a step, and the drafts that stood; the last step's are not counted.
    steps = after["num_drafts_total"]
    assert 40 - 2 - 3 <= steps + after["num_accepted_tokens_total"] <= 40
    assert 0 < after["predicted_accepted_tokens_total"] <= after["num_draft_tokens_total"]
    assert after["other_rows"] == 1 and 0 <= after["budget"] <= 3
    assert after["slope"] >= 0 and {"intercept0", "intercept1", "intercept2"} < set(after)


def test_the_log_has_the_times_that_decide_and_says_that_acceptance_is_made_up(server):
    log = server.log.read_text()
    assert "texts mean nothing" in log
    for kind in ("plain", "drafted", "prompt"):
        assert re.search(rf"{kind} steps take \(ms\)\n  \d+ tokens before: \d+ [\d.]+, ", log)
    assert re.search(r"drafting takes \(ms\)\n  0 tokens before: 1 ", log)
