"""What is quantized and what is not can be read by name."""

import logging

import torch

from limelight.engine.formats import told_formats
from limelight.models.dummy import UNIT
from limelight.models.targets import Target
from limelight.ops.mxfp8 import quantize


def target(weight):
    return Target(weight, (), (), UNIT)


def test_every_module_is_told_once_by_its_format(caplog):
    plain, packed = torch.zeros(32, 32), quantize(torch.zeros(32, 32))
    targets = {
        "model.embed_tokens.weight": target(plain),
        "model.layers.0.self_attn.q_proj.weight": target(packed),
        "model.layers.0.self_attn.softmax_offset": target(plain),
        "model.layers.1.self_attn.q_proj.weight": target(packed),
        "model.layers.1.mlp.experts.up_proj.weight": target(packed),
    }
    with caplog.at_level(logging.INFO, logger="limelight"):
        told = told_formats(targets)
    assert told == {
        "float32": ["model.embed_tokens", "model.layers.0.self_attn.softmax_offset"],
        "mxfp8": [
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.self_attn.q_proj",
            "model.layers.1.mlp.experts.up_proj",
        ],
    }
    assert (
        "held as mxfp8: model.layers.*.self_attn.q_proj (2), model.layers.*.mlp.experts.up_proj (1)"
    ) in caplog.text


def test_a_model_without_quantized_weights_has_nothing_to_tell():
    assert told_formats({"model.norm.weight": target(torch.zeros(4))}) is None
