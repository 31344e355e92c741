"""The object of --speculative-config: what it takes, and what it says of what it does not take."""

import pytest

from limelight.speculative import SpeculativeConfig

SYNTHETIC = {"model": "d", "rejection_sample_method": "synthetic"}


def test_synthetic_rates_come_with_their_method_and_a_spread_with_them():
    chosen = SpeculativeConfig.of(
        SYNTHETIC | {"synthetic_acceptance_rates": [0.8, 0.5], "synthetic_spread": 1}
    )
    assert (chosen.synthetic_acceptance_rates, chosen.synthetic_spread) == ([0.8, 0.5], 1)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, "none may be above the one before"),
        ({"synthetic_acceptance_rates": [1.5]}, "from 0 to 1"),
        ({}, "need each other"),
        ({"rejection_sample_method": "standard", "synthetic_acceptance_rates": [1.0]}, "each oth"),
        ({"rejection_sample_method": "standard", "synthetic_spread": 1.0}, "needs"),
        ({"synthetic_acceptance_rates": [0.5], "synthetic_spread": -1}, "from 0 to 10"),
        ({"synthetic_acceptance_rates": [0.5], "synthetic_spread": "1"}, "must be float"),
        ({"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2}, "for 2 drafts"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rates_that_cannot_be_are_refused_with_what_is_wrong(keys, says):
    with pytest.raises(ValueError, match=says):
        SpeculativeConfig.of(SYNTHETIC | keys)
