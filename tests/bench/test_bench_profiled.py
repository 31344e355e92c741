import pytest

from limelight.bench.floor import added_us
from limelight.bench.profiled import attention, visible


@pytest.mark.parametrize("length", [1, 5, 64, 97])
@pytest.mark.parametrize("window", [None, 1, 5, 96, 200])
def test_visible_pairs_are_those_of_the_mask(length, window):
    reach = length if window is None else window
    seen = sum(i - reach < j <= i for i in range(length) for j in range(length))
    assert visible(length, window) == seen


def test_attention_is_told_apart_by_layer_over_all_pieces_of_the_prompts():
    figures = attention(
        [3000.0, 1000.0, 2000.0] * 2, [None, 2, None], channels=2**20, lengths=[100]
    )
    full = 2 * 4 * 2**20 * (100 * 101 // 2)
    assert figures["full_ms"] == 10.0 and figures["window_ms"] == 2.0
    assert figures["full_tflops"] == round(full / 10e-3 / 1e12, 1)
    assert set(attention([5.0], [7], channels=64, lengths=[9])) == {"window_ms", "window_tflops"}


def test_launches_that_are_no_whole_steps_are_refused():
    with pytest.raises(ValueError, match="5 launches"):
        attention([1.0] * 5, [None, 2], channels=64, lengths=[9])
    with pytest.raises(ValueError, match="0 launches"):
        attention([], [None, 2], channels=64, lengths=[9])


def test_what_kernels_add_is_the_time_in_which_any_ran():
    spans = [("a", 0.0, 4.0), ("b", 1.0, 6.0), ("a", 6.5, 7.0), ("c", 2.0, 6.25)]
    assert added_us(spans) == {"a": 4.5, "b": 2.0, "c": 0.25}
    assert sum(added_us(spans).values()) == 6.75
