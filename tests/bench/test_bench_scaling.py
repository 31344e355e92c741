import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import roofline
import scaling
from fleet import Fleet, erlang_c
from roofline import GPUS, Load, Message, Op, Setup, decode, forward, head, prefill_parts, shape

from limelight.models.beam import BeamConfig
from limelight.models.flint import FlintConfig

H200 = GPUS["H200"]
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
RESULTS = Path(scaling.__file__).parent / "results"


def read(parts):
    return sum(part.bytes + part.four for part in parts if isinstance(part, Op))


@pytest.mark.parametrize("name", ["flint", "flint-nvfp4", "beam", "beam-nvfp4"])
def test_shapes_are_those_that_the_models_read(name):
    source = json.loads((roofline.CONFIGS / name / "config.json").read_text())
    config = (BeamConfig if name.startswith("beam") else FlintConfig).from_dict(source)
    said = shape(name)
    assert said.windows == tuple(config.windows)
    assert said.sparse == tuple(config.sparse)
    assert (said.hidden, said.vocab) == (config.hidden_size, config.vocab_size)
    assert (said.experts, said.chosen) == (config.num_experts, config.experts_per_token)
    assert (said.heads, said.kv_heads) == (config.num_heads, config.num_kv_heads)


def test_weights_are_as_large_as_the_file_that_was_loaded():
    (kept,) = RESULTS.glob("load-flint-h200-nvfp4-*.json")
    file_gb = json.loads(kept.read_text())["rows"][0]["file_gb"]
    held = scaling.weight_bytes(scaling.setup("flint-nvfp4", "H200", "1"))
    assert held / 1e9 == pytest.approx(file_gb, rel=0.001)


@pytest.mark.parametrize("name", ["flint", "flint-nvfp4", "beam", "beam-nvfp4"])
@pytest.mark.parametrize("batch", [1, 7, 128])
@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_more_ranks_never_make_the_bytes_of_a_step_larger(name, batch, kind):
    setups = [Setup(H200, shape(name), **{kind: ranks}) for ranks in (1, 2, 4, 8, 16)]
    if batch >= 16 or kind == "tensor":
        steps = [read(decode(at, batch, 5000)) for at in setups]
        assert steps == sorted(steps, reverse=True)
    held = [scaling.weight_bytes(at) for at in setups]
    assert held == sorted(held, reverse=True)


def test_an_all_to_all_counts_only_rows_that_were_chosen():
    assert roofline.sent_rows(63, chosen=1, ranks=4) == pytest.approx(63 * 3 / 4)
    assert roofline.sent_rows(63, chosen=8, ranks=1) == 0
    for ranks in (2, 4, 16, 256):
        assert roofline.sent_rows(63, chosen=8, ranks=ranks) < min(8, ranks) * 63
    at = Setup(H200, shape("beam"), expert=4)
    sent = [part for part in forward(at, Load(7, 1, 100, 7)) if isinstance(part, Message)]
    assert {part.kind for part in sent} == {"all-to-all"}
    assert len(sent) == 2 * 49
    wider = replace(at, shape=replace(shape("beam"), experts=512))
    again = [part for part in forward(wider, Load(7, 1, 100, 7)) if isinstance(part, Message)]
    assert [part.bytes for part in again] == [part.bytes for part in sent]
    assert sent[0].bytes == pytest.approx(2 * 5120 * 7 * 4 * (1 - 0.75**8) * 3 / 4)


def test_the_time_of_an_lm_head_is_its_bytes_and_one_kernel():
    product, _ = head(Setup(H200, shape("flint")), 1)
    moved = 2 * 150_144 * 2048 + 2 * 2048 + 4 * 150_144
    assert product.bytes == moved == 615_594_496
    assert product.seconds(H200) == pytest.approx(1.6e-6 + moved / 4.41e12)


def test_a_product_of_many_rows_takes_the_time_of_its_flops():
    (qkv,) = [part for part in forward(Setup(H200, shape("flint")), Load(8, 2048, 0, 8))
              if part.name == "qkv"][:1]  # fmt: skip
    flops = 2 * 16384 * 2048 * (32 + 2 * 4) * 128
    assert qkv.flops == flops
    assert qkv.seconds(H200) == pytest.approx(2 * 1.6e-6 + flops / 772e12)


def test_work_on_four_bits_is_slowed_and_other_reading_is_not():
    gpu = replace(H200, gathered=0.5)
    assert Op("x", 0, bytes=4.41e9).seconds(gpu) == pytest.approx(1e-3)
    assert Op("x", 0, four=4.41e9).seconds(gpu) == pytest.approx(2e-3)
    assert Op("x", 0, flops=772e9, gathered=True).seconds(gpu) == pytest.approx(2e-3)


def test_native_experts_are_read_as_they_are_held_and_never_unpacked():
    held = scaling.setup("beam-nvfp4", "GB300", "TP4", native=True)
    usual = scaling.setup("beam-nvfp4", "GB300", "TP4")
    for at, unpacks in ((held, False), (usual, True)):
        parts = forward(at, Load(8, 2048, 0, 8))
        assert any(part.name == "unpack" for part in parts) == unpacks
    (native, _), (decoded, _) = (
        [part for part in forward(at, Load(1, 1, 100, 1)) if part.name == "experts"][:2]
        for at in (held, usual)
    )
    assert (native.four, decoded.bytes + decoded.four) == (0, pytest.approx(native.bytes))


def test_an_all_reduce_within_a_node_and_across_two():
    within = Message("x", "all-reduce", 1e6, 8).seconds(H200)
    assert within == pytest.approx(5e-6 + 2 * 1e6 * 7 / 8 / 337.5e9)
    across = Message("x", "all-reduce", 1e6, 16).seconds(H200)
    assert across == pytest.approx(within + 25e-6 + 2 * 1e6 / 8 / 2 / 37.5e9)
    assert Message("x", "all-reduce", 1e6, 16).seconds(GPUS["GB200"]) < within


@pytest.mark.parametrize("window", [None, 1, 7, 63, 513])
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 600), (7, 3), (63, 40), (513, 512)])
def test_pairs_of_queries_and_keys_are_those_counted_one_by_one(rows, before, window):
    counted = sum(min(before + i + 1, window or before + rows) for i in range(rows))
    assert roofline.visible(rows, before, window) == counted


def test_bytes_and_kernels_are_near_those_of_measured_steps():
    for name in scaling.MEASURED[:6]:
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            at = Setup(H200, shape(row["model"]), tensor=row["slice"], messages=False)
            parts = decode(at, row["batch"], row["context"])
            assert read(parts) / 4.41e9 == pytest.approx(row["floor_ms"]["median"], rel=0.04)
            if launches := sum(kernel["launches"] for kernel in row.get("kernels", [])):
                assert sum(part.kernels for part in parts) == pytest.approx(launches, rel=0.25)


def test_one_card_is_predicted_within_a_quarter_and_the_constant_is_the_one_that_fits_best():
    rows = list(scaling.one_card())
    assert len(rows) == 22
    assert max(abs(row["error"]) for row in rows) <= 0.225
    assert scaling.fitted() == roofline.GATHERED


def test_two_cards_are_predicted_though_nothing_is_fitted_to_them():
    rows = list(scaling.two_cards())
    assert [row["ranks"] for row in rows] == 10 * ["tp2"] + ["dp2+ep2"]
    assert max(abs(row["error"]) for row in rows) <= 0.265


def test_every_published_row_that_is_missed_by_a_quarter_is_explained():
    explained = PAGE.read_text().split("## Misses")[1].split("\n## ")[0]
    for row in scaling.published():
        assert abs(row["error"]) <= 0.25 or f"| {row['published']} |" in explained


def test_the_page_shows_what_the_script_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--json", str(tmp_path / "x.json")])
    scaling.main()
    printed = capsys.readouterr().out.split("### ")[1:]
    kept = json.loads((tmp_path / "x.json").read_text())
    assert [part.split("\n")[0] for part in printed] == list(kept)
    for part in printed:
        name, shown = part.strip().split("\n\n")
        assert len(shown.split("\n")) == 2 + len(kept[name])
        assert shown in PAGE.read_text()


def test_one_configuration_is_shown_by_its_parts(capsys, monkeypatch):
    argv = "scaling.py --model beam-nvfp4 --gpu GB300 --ranks dp4+ep4 --batch 64 --kv fp8"
    monkeypatch.setattr(sys, "argv", argv.split())
    scaling.main()
    out = capsys.readouterr().out
    assert "tokens/s: experts" in out and "dispatch" in out
    monkeypatch.setattr(sys, "argv", "scaling.py --model beam --ranks tp4 --prefill".split())
    scaling.main()
    assert "it does not fit into memory" in capsys.readouterr().out


def test_prompts_longer_than_a_step_are_cut_and_drawn_from_once():
    at = Setup(H200, shape("flint"))
    whole = prefill_parts(at, 2, 33_000, 16_384)
    assert len([part for part in whole if part.name == "sampling"]) == 2
    cut = [part.flops for part in whole if part.name == "attention"]
    one = [part.flops for part in prefill_parts(at, 2, 33_000, 33_000) if part.name == "attention"]
    assert sum(cut) == pytest.approx(sum(one))


def test_erlang_c_at_loads_known_by_hand():
    assert erlang_c(1, 0.3) == pytest.approx(0.3)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(500, 1.0) == pytest.approx(0)


def test_a_fleet_waits_longer_and_runs_fuller_as_its_load_grows():
    fleet = Fleet(3, 7, 0.02, 63, lambda running: 0.004 + 0.001 * running)
    rows = [fleet.at(share * fleet.capacity()) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)]
    for key in ("utilization", "running", "wait_s", "first_token_s", "step_s"):
        found = [row[key] for row in rows]
        assert found == sorted(found) and found[0] < found[-1]
    assert fleet.at(1.0)["running"] == pytest.approx(fleet.holding_s(1.0, 1.0) / 3)


def test_one_place_without_prompts_waits_as_a_single_server_does():
    fleet = Fleet(1, 1, 0.0, 1, lambda running: 0.5)
    assert fleet.capacity() == 2
    assert fleet.at(1.0)["wait_s"] == pytest.approx(0.5)  # rho / (1 - rho) * service


def test_a_fleet_refuses_more_than_it_can_serve():
    fleet = Fleet(3, 7, 0.02, 63, lambda running: 0.004 + 0.001 * running)
    with pytest.raises(ValueError, match="more than the"):
        fleet.at(1.01 * fleet.capacity())
    assert fleet.running(0.9 * fleet.capacity()) < 7
