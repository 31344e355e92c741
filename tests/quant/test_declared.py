"""What configs and users say of quantized weights, and what is refused of it."""

import copy

import pytest

from limelight.quant.declared import PLAIN, Declared, asked_for, declared_by

GROUP = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    "scale_dtype": "uint8",
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": GROUP | {"dynamic": False},
            "input_activations": GROUP | {"dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.gate_proj"],
}


LAYER = "model.layers.3"
MODULES = [
    "self_attn.q_proj", "self_attn.gate_proj", "mlp.gate_proj", "mlp.gate",
    "mlp.shared_expert.up_proj", "mlp.experts.down_proj",
]  # fmt: skip


def ignored(*patterns):
    """The modules of a layer that these patterns keep as they are."""
    declared = Declared("MXFP8", patterns)
    return [one for one in MODULES if declared.packing(f"{LAYER}.{one}.weight") is None]


def test_a_name_is_that_of_a_module_or_of_what_holds_it():
    assert ignored(f"{LAYER}.mlp.gate") == ["mlp.gate"]
    assert ignored(f"{LAYER}.self_attn") == ["self_attn.q_proj", "self_attn.gate_proj"]
    assert ignored("mlp.gate", "gate_proj") == []
    assert ignored("*.mlp.experts") == ["mlp.experts.down_proj"]
    assert ignored(f"{LAYER}.mlp.experts.0.down_proj") == ["mlp.experts.down_proj"]


def test_an_expression_matches_whole_names():
    assert ignored("re:.*mlp.gate") == ["mlp.gate"]
    assert ignored("re:.*gate_proj") == ["self_attn.gate_proj", "mlp.gate_proj"]
    assert ignored(r"re:model\.layers\.\d+\.self_attn\.gate_proj") == ["self_attn.gate_proj"]
    assert ignored(r"re:.*shared_expert") == ["mlp.shared_expert.up_proj"]


def test_the_head_is_never_mxfp8():
    assert Declared("MXFP8").packing("lm_head.weight") is None
    assert Declared("NVFP4").packing("lm_head.weight") == "NVFP4"


@pytest.mark.parametrize(
    "found",
    [
        COMPRESSED,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32},
        {"quantization": {"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}},
    ],
    ids=["compressed-tensors", "modelopt", "modelopt's own file"],
)
def test_mxfp8_is_known_in_each_spelling(found):
    assert declared_by(found, "config.json").format == "MXFP8"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: g["weights"].update(group_size=128), "weights have group_size 128"),
        (lambda g: g["weights"].update(scale_dtype=None), "weights have scale_dtype None"),
        (lambda g: g["input_activations"].update(dynamic=False), "have dynamic False"),
        (lambda g: g.pop("input_activations"), "input_activations have num_bits None"),
    ],
    ids=["groups", "scales", "static", "weights alone"],
)
def test_other_floats_of_eight_bits_are_refused(change, words):
    other = copy.deepcopy(COMPRESSED)
    change(other["config_groups"]["group_0"])
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        declared_by(other, "config.json")


def test_what_a_user_asks_for():
    assert asked_for(None, None, None) is None
    assert asked_for("mxfp8", None, None) == Declared("MXFP8")
    assert asked_for("mxfp8", {"ignore": ["re:.*o_proj"]}, None).ignored == ("re:.*o_proj",)
    assert asked_for(None, None, {"quantization_config": COMPRESSED}).format == "MXFP8"
    assert asked_for(None, None, {"quantization_config": {"quant_method": "modelopt"}}) == PLAIN


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((None, {"ignore": []}, None), "needs --quantization mxfp8"),
        (("mxfp8", {"linear": "mxfp8"}, None), "no key 'linear'"),
        (("mxfp8", {"ignore": "lm_head"}, None), "must hold names"),
        (("mxfp8", {"ignore": ["re:("]}, None), "re:"),
        ((None, None, {"rope_theta": 1}), "no key 'rope_theta'"),
        ((None, None, {"quantization_config": {"quant_method": "fp8"}}), "quantized as 'fp8'"),
        (("mxfp8", {"ignore": []}, {"quantization_config": COMPRESSED}), "leave --quantization"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        asked_for(*asked)
