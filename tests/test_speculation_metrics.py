"""What became of drafts is told under the names that dashboards read, where anything is drafted."""

import re

from limelight.metrics import Metrics
from limelight.stats import EngineStats, SpeculationStats


def told(stats: EngineStats) -> dict[str, float]:
    text = Metrics("m", stats=lambda: [stats], info=lambda: None).render().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:spec_decode")]
    values = {}
    for line in lines:
        name, labels, value = re.fullmatch(r"vllm:spec_decode_(\w+)\{(.*)\} (\S+)", line).groups()
        place = re.search(r'position="(\d+)"', labels)
        values[name + (place[1] if place else "")] = float(value)
    return values


def test_drafts_are_counted_by_place():
    values = told(
        EngineStats(
            speculation=SpeculationStats(
                steps=9, drafted=70, offered=60, verified=41, accepted=33, verified_at=[9, 8],
                accepted_at=[7, 5], predicted=30.5, budget=4, rows=12, drafting=False, slope=0.75,
                intercepts=[-0.25, 0.5],
            )
        )
    )  # fmt: skip
    assert values == {
        "num_drafts_total": 9, "num_made_tokens_total": 70, "num_offered_tokens_total": 60,
        "num_draft_tokens_total": 41, "num_accepted_tokens_total": 33,
        "num_draft_tokens_per_pos_total0": 9, "num_draft_tokens_per_pos_total1": 8,
        "num_accepted_tokens_per_pos_total0": 7, "num_accepted_tokens_per_pos_total1": 5,
        "predicted_accepted_tokens_total": 30.5, "budget": 4, "other_rows": 12, "drafting": 0,
        "synthetic": 0, "slope": 0.75, "intercept0": -0.25, "intercept1": 0.5,
    }  # fmt: skip


def test_nothing_is_told_where_nothing_is_drafted():
    assert told(EngineStats()) == {}
