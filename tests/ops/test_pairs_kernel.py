"""Sorted pairs of tokens and experts, in the interpreter and on a GPU."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.pairs import SORTED_AT_ONCE, sort_pairs, sort_pairs_reference

# Tokens, experts, chosen, rows of a block: of the models; of few experts; off every tile.
MODELS = [
    (tokens, 256, count, block_m)
    for count in (6, 8)
    for tokens in (2, 9, 16, 33, 42, 64, 100, 128)
    for block_m in (8, 16)
]
SIZES = [
    (1, 3, 2, 16),
    (7, 5, 3, 8),
    (50, 8, 2, 8),
    (90, 4, 3, 16),
    (170, 3, 1, 64),
    (530, 6, 2, 16),
]
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IDS = "T{0[0]}-E{0[1]}-N{0[2]}-M{0[3]}".format

pytestmark = pytest.mark.usefixtures("poisoned")


def compile_cases() -> list[Case]:
    ids = [(tokens, *of) for tokens in (9, 32, 128) for of in ((6, 16), (6, 8), (8, 8))]
    return [
        Case(
            f"pairs T{tokens} N{count} M{block_m} {absent}",
            lambda t=tokens, n=count, m=block_m, a=absent: sort_pairs(
                meta(*((t * n, 1) if a else (t, n)), dtype=torch.int64), 256 // (1 + a), m, absent=a
            ),
            decode=tokens * count <= SORTED_AT_ONCE,
        )
        for tokens, count, block_m in [*ids, (1000, 1, 16), (5000, 6, 128)]
        for absent in (False, True)
    ]


def chosen(tokens, experts, count, device, *, skew=0.0):
    """Distinct experts of each token; with `skew` most go to the first ones."""
    draw = torch.Generator(device).manual_seed(tokens * experts + count)
    scores = torch.rand(tokens, experts, generator=draw, device=device)
    ahead = torch.arange(experts, device=device) * -skew
    return (scores + ahead).topk(count, dim=-1).indices


def taken(sorted_by):
    """The blocks that are taken, [(expert, pairs)], in order of their experts and pairs."""
    rows_BM, blocks_B = (held.cpu() for held in sorted_by)
    found = [
        (b // 256, *row[: b % 256])
        for b, row in zip(blocks_B.tolist(), rows_BM.tolist(), strict=True)
    ]
    return sorted(block for block in found if len(block) > 1)


def check(ids_TN, experts, block_m, **options):
    found = sort_pairs(ids_TN, experts, block_m, **options)
    assert taken(found) == taken(sort_pairs_reference(ids_TN, experts, block_m, **options))
    assert found[1].min() >= 0 and len(found[0]) == len(found[1])


@pytest.mark.parametrize("skew", [0.0, 0.01, 9.0])
@pytest.mark.parametrize("case", SIZES, ids=IDS)
def test_blocks_hold_the_pairs_of_their_expert_in_order(case, skew):
    tokens, experts, count, block_m = case
    check(chosen(tokens, experts, count, "cpu", skew=skew), experts, block_m)


@pytest.mark.parametrize("tokens", [9, 33, pytest.param(128, marks=pytest.mark.slow)])
def test_those_of_a_model_do(tokens):
    check(chosen(tokens, 256, 6, "cpu", skew=0.005), 256, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MODELS, ids=IDS)
def test_those_of_the_models_do(case):
    tokens, experts, count, block_m = case
    for skew in (0.0, 0.005, 9.0):
        check(chosen(tokens, experts, count, "cuda", skew=skew), experts, block_m)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pairs", [5, 60, SORTED_AT_ONCE, SORTED_AT_ONCE + 1])
def test_pairs_of_an_absent_expert_get_no_block(pairs, place):
    for experts, skew in ((3, 0.0), (12, 0.02), (40, -0.02)):
        ids_P1 = chosen(pairs, experts + 1, 1, place, skew=skew)
        check(ids_P1, experts, 8, absent=True)
        check(torch.full_like(ids_P1, experts), experts, 8, absent=True)


def test_the_reference_leaves_no_pair_out():
    rows_BM, blocks_B = sort_pairs_reference(torch.tensor([[2, 0], [2, 1], [0, 2]]), 3, 2)
    assert blocks_B.tolist() == [2, 257, 514, 513]
    assert rows_BM.tolist() == [[1, 4], [3, 0], [0, 2], [5, 0]]
