"""A drafter's config.json is read in every spelling, and refused by the key that is at fault."""

import json

import pytest
import torch
from drafters import CONFIG, DRAFTING, config_json, write_drafter
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from limelight.models.dflash2_config import DFlash2Config
from limelight.models.dflash2_loader import load_drafter
from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress

CPU = Placement(Mesh.single(), torch.float32, torch.device("cpu"))
QUIET = Progress(quiet=True)
MODEL = "model.safetensors"


def read(**changes: object) -> DFlash2Config:
    return DFlash2Config.from_dict(config_json(**changes))


def speculators_json(**changes: object) -> dict:
    """The same drafter in the speculators format."""
    network = {k: CONFIG[k] for k in CONFIG if k not in ("architectures", "dflash_config")}
    del network["is_causal"], network["num_target_layers"]
    drafting = {k: v for k, v in DRAFTING.items() if k != "target_layer_ids"}
    return drafting | {
        "architectures": ["DFlash2Speculator"],
        "speculators_model_type": "dflash2",
        "num_target_layers": 7,
        "aux_hidden_state_layer_ids": [1, 4, 7],
        "draft_vocab_size": 97,
        "transformer_layer_config": network,
    } | changes  # fmt: skip


SAME = {
    "block size at the top": {"drafting": {"block_size": None}, "block_size": 8},
    "block size twice": {"block_size": 8},
    "mask at the top": {"drafting": {"mask_token_id": None}, "mask_token_id": 95},
    "mask by an older name": {"drafting": {"mask_token_id": None}, "pard_token": 95},
    "causality by its older key": {"is_causal": None, "drafting": {"causal": False}},
    "the newer key first": {"drafting": {"causal": True}},
    "window by its older keys": {
        "layer_types": None,
        "sliding_window": None,
        "drafting": {"use_swa": True, "swa_window_size": 32},
    },
    "kinds not listed": {"layer_types": None},
    "theta at the top": {"rope_parameters": None, "rope_theta": 5000.0},
    "sizes that are the default": {"target_hidden_size": 48, "draft_vocab_size": 97},
    "variants that are off": {
        "drafting": {"sample_from_anchor": False, "attention_sink_bias": False}
    },
    "for Beam": {"architectures": ["DFlash2BeamDraftModel"]},
}


@pytest.mark.parametrize("spelling", SAME)
def test_every_spelling_means_the_same(spelling):
    assert read(**SAME[spelling]) == read()


def test_the_speculators_format_means_the_same():
    assert DFlash2Config.from_dict(speculators_json()) == read()
    causal = DFlash2Config.from_dict(speculators_json(sliding_window_non_causal=False))
    assert causal.causal == [True] * 3


def test_a_drafter_of_an_unstated_kind_follows_the_oldest_rules():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read(is_causal=None, layer_types=kinds, rope_parameters=None)
    assert config.causal == [True, False, True] and config.windows == [32, None, 32]
    assert config.rope_theta == 1e6
    bare = read(drafting={"final_logit_softcapping": 0, "output_multiplier": None})
    assert bare.logit_softcap is None and bare.logit_scale == 1.0
    assert read(layer_types=None, sliding_window=None).windows == [None] * 3


REFUSED = {
    "architectures": {"architectures": ["Qwen3ForCausalLM"]},
    "dflash_config": {"dflash_config": None},
    "hidden_act": {"hidden_act": "gelu"},
    "attention_bias": {"attention_bias": True},
    "is_neox_style": {"is_neox_style": False},
    "rope_parameters": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "draft_vocab_size": {"draft_vocab_size": 50},
    "num_attention_heads": {"num_attention_heads": 5},
    "head_dim": {"head_dim": 15},
    "layer_types": {"layer_types": ["sliding_attention"]},
    "layer_types of Beam": {
        "architectures": ["DFlash2BeamDraftModel"],
        "layer_types": ["full_attention"] * 3,
    },
    "sliding_window": {"sliding_window": 7},
    "sliding_window missing": {"sliding_window": None},
    "is_causal": {"is_causal": "no"},
    "target_layer_ids": {"drafting": {"target_layer_ids": None}},
    "target_layer_ids negative": {"drafting": {"target_layer_ids": [-1, 3]}},
    "target_layer_ids out of order": {"drafting": {"target_layer_ids": [3, 0]}},
    "target_layer_ids twice": {"drafting": {"target_layer_ids": [3, 3]}},
    "mask_token_id": {"drafting": {"mask_token_id": None}},
    "mask_token_id too high": {"drafting": {"mask_token_id": 97}},
    "block_size": {"drafting": {"block_size": None}},
    "block_size of two minds": {"block_size": 16},
    "block_size too small": {"drafting": {"block_size": 1}},
    "selector_rank": {"drafting": {"selector_rank": None}},
    "selector_top_k": {"drafting": {"selector_top_k": None}},
    "selector_top_k too high": {"drafting": {"selector_top_k": 98}},
    "selector_top_k and rank": {"drafting": {"selector_rank": None, "selector_top_k": None}},
    "conv_kernel_size": {"drafting": {"conv_kernel_size": None}},
    "conv_kernel_size too high": {"drafting": {"conv_kernel_size": 9}},
    "conv_group_size": {"drafting": {"conv_group_size": None}},
    "conv_group_size uneven": {"drafting": {"conv_group_size": 7}},
    "final_logit_softcapping": {"drafting": {"final_logit_softcapping": -1}},
    "final_logit_softcapping of Beam": {
        "architectures": ["DFlash2BeamDraftModel"],
        "drafting": {"final_logit_softcapping": None},
    },
    "output_multiplier": {"drafting": {"output_multiplier": 0}},
    "sample_from_anchor": {"drafting": {"sample_from_anchor": True}},
    "sample_from_anchor at the top": {"sample_from_anchor": True},
    "attention_sink_bias": {"drafting": {"attention_sink_bias": True}},
    "attention_value_scale": {"drafting": {"attention_value_scale": 0.5}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_cannot_run_is_refused_by_key(what):
    changes = dict(REFUSED[what])
    json_ = config_json(drafting=changes.pop("drafting", None)) | changes
    json_ = {key: value for key, value in json_.items() if value is not None}
    with pytest.raises(ValueError, match="config.json") as caught:
        DFlash2Config.from_dict(json_)
    assert f" {what.split()[0]} " in str(caught.value)


@pytest.mark.parametrize(
    "change, key",
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
        ({"aux_hidden_state_layer_ids": [0, 4]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"draft_vocab_size": 50}, "draft_vocab_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_speculators_config_that_cannot_run_is_refused_by_key(change, key):
    with pytest.raises(ValueError, match=f" {key} "):
        DFlash2Config.from_dict(speculators_json(**change))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, "flint")
    return load_model(folder, CPU, progress=QUIET)


def load(folder, target, **options):
    return load_drafter(folder, CPU, target, progress=QUIET, **options)


def refusal(folder, target) -> str:
    with pytest.raises(ValueError) as caught:
        load(folder, target)
    return str(caught.value)


def test_every_tensor_finds_its_place(tmp_path, target):
    tensors = write_drafter(tmp_path)
    assert len(tensors) == 3 + 3 + 15 * 3
    model = load(tmp_path, target)
    for name, value in tensors.items():
        assert torch.equal(model.targets[name].into, value), name
    held = sum(weight.numel() for weight in model.parameters())
    assert held == sum(value.numel() for value in tensors.values())
    assert model.ends.embed is target.embed and model.ends.head is target.head


def test_a_prefix_and_copies_of_the_target_are_tolerated(tmp_path, target):
    tensors = write_drafter(tmp_path)
    more = {f"model.{name}": value.contiguous() for name, value in tensors.items()} | {
        "model.embed_tokens.weight": target.embed.weight.clone(),
        "lm_head.weight": torch.tensor(target.head.weight.tolist()),
        "verifier_lm_head.weight": torch.tensor(target.head.weight.tolist()),
        "verifier_norm.weight": target.norm.weight.clone(),
        "d2t": torch.zeros(97, dtype=torch.int64),
        "t2d": torch.ones(97, dtype=torch.bool),
    }
    save_file(more, tmp_path / MODEL)
    model = load(tmp_path, target)
    assert all(torch.equal(model.targets[name].into, tensors[name]) for name in tensors)


FAULTS = {
    "fc.weight": lambda t: t.pop("fc.weight"),
    "layers.2.mlp_conv.base_kernel": lambda t: t.update(
        {"layers.2.mlp_conv.base_kernel": torch.ones(2, 2, 48)}
    ),
    "layers.3.input_layernorm.weight": lambda t: t.update(
        {"layers.3.input_layernorm.weight": torch.ones(48)}
    ),
    "candidate_selector.predecessor_codebook": lambda t: t.pop(
        "candidate_selector.predecessor_codebook"
    ),
    "embed_tokens.weight": lambda t: t.update({"embed_tokens.weight": torch.zeros(97, 48)}),
    "lm_head.weight": lambda t: t.update({"lm_head.weight": torch.zeros(50, 48)}),
    "d2t": lambda t: t.update({"d2t": torch.arange(97)}),
    "t2d": lambda t: t.update({"t2d": torch.ones(50, dtype=torch.bool)}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_tensor_of_a_drafter_is_refused_by_name(tmp_path, target, name):
    write_drafter(tmp_path)
    tensors = load_file(tmp_path / MODEL)
    FAULTS[name](tensors)
    save_file(tensors, tmp_path / MODEL)
    assert name in refusal(tmp_path, target)


OTHER_TARGETS = {
    "num_target_layers": {"num_target_layers": 8},
    "target_layer_ids": {"num_target_layers": None, "drafting": {"target_layer_ids": [0, 7]}},
    "vocab_size": {"vocab_size": 98},
    "hidden_size": {"hidden_size": 96},
    "target_hidden_size": {"target_hidden_size": 96},
}


@pytest.mark.parametrize("key", OTHER_TARGETS)
def test_a_drafter_of_another_target_is_refused_by_key(tmp_path, target, key):
    write_drafter(tmp_path, config_json(**OTHER_TARGETS[key]))
    assert f" {key} " in refusal(tmp_path, target)


def test_a_drafter_in_float16_is_refused(tmp_path, target):
    write_drafter(tmp_path)
    half = Placement(Mesh.single(), torch.float16, torch.device("cpu"))
    with pytest.raises(ValueError, match="float16"):
        load_drafter(tmp_path, half, target, progress=QUIET)


def test_a_mask_embedding_replaces_the_row_of_the_mask(tmp_path, target):
    write_drafter(tmp_path)
    row_D = torch.randn(1, 48)
    torch.save({"embedding": row_D, "mask_token_id": 95}, tmp_path / "mask_embedding.pt")
    h_TD = load(tmp_path, target).embed(torch.tensor([5, 6]), 3).view(2, 3, 48)
    torch.testing.assert_close(h_TD[:, 1:], (1.3 * row_D).expand(2, 2, -1))
    torch.testing.assert_close(h_TD[:, 0], 1.3 * target.embed.weight[[5, 6]])


class Code:
    """What only a pickle that runs code could hold."""


@pytest.mark.parametrize(
    "content",
    [
        {"embedding": torch.ones(47), "mask_token_id": 95},
        {"embedding": torch.ones(48), "mask_token_id": 94},
        {"embedding": 3, "mask_token_id": 95},
        [1, 2],
        Code(),
    ],
    ids=["short", "another mask", "no tensor", "a list", "code"],
)
def test_a_faulty_mask_embedding_is_refused_by_file(tmp_path, target, content):
    write_drafter(tmp_path)
    torch.save(content, tmp_path / "mask_embedding.pt")
    assert "mask_embedding.pt" in refusal(tmp_path, target)


def test_random_weights_need_no_file(tmp_path, target):
    write_drafter(tmp_path)
    (tmp_path / MODEL).unlink()
    assert "no .safetensors file" in refusal(tmp_path, target)
    first, again = (load(tmp_path, target, dummy_seed=1) for _ in range(2))
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in pairs)


def test_a_config_that_is_no_object_is_refused(tmp_path, target):
    write_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert "config.json" in refusal(tmp_path, target)
