"""MXFP8, online and from checkpoints, answers as transformers' model that rounds alike."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import prompts, request, run, start, write_checkpoint

from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.ops.mxfp8 import MXFP8
from limelight.ops.weight import Stack
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.quant.declared import Declared
from limelight.rl.mxfp8 import coded, fake_quantized

MODEL = "model.safetensors"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
SHARED = {"flint": {"shared_expert_intermediate_size": 128}, "beam": {}}
ONLINE = {"quantization": "mxfp8"}
GATES = "re:.*self_attn.gate_proj"


@pytest.fixture(scope="module", params=["flint", "beam"])
def plain(request, tmp_path_factory):
    """A folder, and transformers' model of it with experts that can be followed."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = write_checkpoint(folder, request.param, **SIZES, **SHARED[request.param])
    oracle.set_experts_implementation("grouped_mm")
    return folder, oracle


def packed(folder, into, ignore=(), fused=False):
    """The checkpoint in MXFP8, with experts one by one, or all of a layer in one tensor."""
    shutil.copytree(folder, into)
    tensors = load_file(folder / MODEL)
    if fused:
        for layer in range(7):
            experts = f"model.layers.{layer}.mlp.experts"
            for name, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                each = [
                    torch.cat([tensors.pop(f"{experts}.{e}.{k}_proj.weight") for k in kinds])
                    for e in range(8)
                    if f"{experts}.{e}.{kinds[0]}_proj.weight" in tensors
                ]
                if each:
                    tensors[f"{experts}.{name}"] = torch.stack(each)
    tensors = dict(coded(tensors.items(), ignore=ignore))
    save_file({name: x.contiguous() for name, x in tensors.items()}, into / MODEL)
    return into


def rewrite(folder, change):
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file(tensors, folder / MODEL)


def assert_agrees(oracle, engine, *, ignore=()):
    asked = [request(p, max_tokens=1, prompt_logprobs=0) for p in prompts(2, 40)]
    for one, answer in zip(asked, run(engine, asked), strict=True):
        with torch.no_grad(), fake_quantized(oracle, ignore=ignore):
            logits = oracle(torch.tensor([one.prompt_token_ids])).logits[0]
        expected = logits.float().log_softmax(-1)
        pairs = zip(expected, one.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=False)
        apart = [abs(row[token].item() - told.logprob) for row, token, told in pairs]
        # A number that lies between two codes may fall to either; then a few are farther apart.
        assert sorted(apart)[len(apart) // 2] < 1e-4 and max(apart) < 0.05


def test_plain_weights_are_quantized_as_they_are_loaded(plain):
    folder, oracle = plain
    assert_agrees(oracle, start(folder, **ONLINE))
    with pytest.raises(AssertionError):
        assert_agrees(oracle, start(folder))


def loaded(folder, mesh=None, **how):
    place = Placement(mesh or Mesh.single(), torch.float32, torch.device("cpu"))
    return load_model(folder, place, progress=Progress(quiet=True), **how).targets


def assert_same(found, expected):
    """Bit for bit."""
    if isinstance(expected, MXFP8):
        pairs = zip(found.tensors, expected.tensors, strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    else:
        assert torch.equal(found, expected)


def part_of(weight, take):
    """What a rank holds of a whole weight."""
    if isinstance(weight, torch.Tensor):
        return weight[take]
    *rows, columns = take
    blocks = slice(columns.start // 32, columns.stop // 32)
    return MXFP8(weight.codes[take], weight.scales[(*rows, blocks)])


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
def test_a_checkpoint_holds_what_its_plain_one_becomes_on_any_rank(plain, tmp_path, fused):
    folder, _ = plain
    both = packed(folder, tmp_path / "packed", fused=fused)
    whole = loaded(folder, declared=Declared("MXFP8"))
    for mesh in (Mesh.single(), Mesh(1, 2)):
        for name, target in loaded(both, mesh).items():
            assert_same(target.into, part_of(whole[name].into, target.take))


def test_what_is_ignored_stays_as_it_is(plain, tmp_path):
    folder, oracle = plain
    ignore = ["model.layers.1", "re:.*down_proj", GATES, "re:.*mlp.gate"]
    config = {"quantization_config": {"ignore": ignore}}
    assert_agrees(oracle, start(folder, **ONLINE, **config), ignore=ignore)
    both = packed(folder, tmp_path / "packed", ignore)
    # In MXFP8 already, and no more of it than is there.
    assert_agrees(oracle, start(both, **ONLINE), ignore=ignore)


def test_beams_output_gate_may_be_left_out_of_the_matrix_that_it_shares(tmp_path):
    write_checkpoint(tmp_path, "beam", **SIZES, num_hidden_layers=4)
    place = Placement(Mesh.single(), torch.float32, torch.device("cpu"))
    declared = Declared("MXFP8", (GATES,))
    model = load_model(tmp_path, place, declared=declared, progress=Progress(quiet=True))
    held = model.layers[0].attention.qkvg.weight
    assert isinstance(held, Stack) and isinstance(held.parts[0], MXFP8)
    assert isinstance(held.parts[1], torch.Tensor)


def test_trainers_say_by_an_override_what_is_quantized(flint):
    folder, _ = flint
    ignored = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", GATES]}
    config = {"hf_overrides": {"quantization_config": ignored}}
    dummy = start(folder, load_format="dummy", **config).runner.model.targets
    formats = {name: type(target.into) is MXFP8 for name, target in dummy.items()}
    assert formats["model.layers.3.mlp.experts.up_proj.weight"]
    assert not formats.get("model.layers.3.self_attn.gate_proj.weight", False)
    assert not formats["lm_head.weight"] and not formats["model.layers.3.mlp.gate.weight"]


EXPERT = "model.layers.4.mlp.experts.3.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"


def spoilt(name, bits):
    def spoil(tensors):
        tensors[name].view(torch.uint8)[1, 1] = bits

    return spoil


FAULTS = {
    "no scales": (lambda t: t.pop(f"{EXPERT}.weight_scale"), f"{EXPERT}.weight_scale is missing"),
    "no codes": (
        lambda t: t.update({f"{EXPERT}.weight": torch.ones(64, 64)}),
        "experts must be of one kind",
    ),
    "scales of another shape": (
        lambda t: t.update({f"{QUERY}.weight_scale": t[f"{QUERY}.weight_scale"][:, :1].clone()}),
        f"{QUERY}.weight_scale: shape [64, 1]; expected [64, 2]",
    ),
    "scales of another type": (
        lambda t: t.update({f"{QUERY}.weight_scale": torch.ones(64, 1)}),
        "type F32; the scales of MXFP8",
    ),
    "codes of another type": (
        lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"].view(torch.float8_e5m2)}),
        f"{QUERY}.weight: type F8_E5M2",
    ),
    "a scale that is no number": (
        spoilt(f"{EXPERT}.weight_scale", 0xFF), f"{EXPERT}.weight_scale holds what is no number",
    ),
    "a code that is no number": (
        spoilt(f"{QUERY}.weight", 0xFF), f"{QUERY}.weight holds what is no number",
    ),
    "a head": (
        lambda t: t.update({
            "lm_head.weight": torch.zeros(97, 64, dtype=torch.float8_e4m3fn),
            "lm_head.weight_scale": torch.zeros(97, 2, dtype=torch.uint8),
        }),
        "lm_head.weight: the LM head cannot be MXFP8",
    ),
    "an embedding": (
        lambda t: t.update({
            "model.embed_tokens.weight": torch.zeros(97, 64, dtype=torch.float8_e4m3fn)
        }),
        "model.embed_tokens.weight is not held as MXFP8",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def flint(tmp_path_factory):
    """A folder with a plain checkpoint, and one in MXFP8."""
    folder = tmp_path_factory.mktemp("flint")
    write_checkpoint(folder / "plain", "flint", **SIZES, **SHARED["flint"])
    return folder / "plain", packed(folder / "plain", folder / "packed")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_refused_by_file_and_name(flint, tmp_path, fault):
    change, expected = FAULTS[fault]
    shutil.copytree(flint[1], tmp_path / "faulty")
    rewrite(tmp_path / "faulty", change)
    with pytest.raises(ValueError) as caught:
        loaded(tmp_path / "faulty")
    assert expected in str(caught.value)


def test_weights_that_are_not_finite_cannot_be_quantized(flint, tmp_path):
    shutil.copytree(flint[0], tmp_path / "spoilt")
    rewrite(tmp_path / "spoilt", lambda t: t[f"{QUERY}.weight"][3, 4].fill_(float("nan")))
    with pytest.raises(ValueError, match=f"{QUERY}.weight holds numbers that are not finite"):
        loaded(tmp_path / "spoilt", declared=Declared("MXFP8"))


def test_rows_that_are_no_whole_blocks_cannot_be_quantized(tmp_path):
    write_checkpoint(tmp_path, "flint")
    with pytest.raises(ValueError, match="48 columns a rank are not whole blocks of 32"):
        start(tmp_path, **ONLINE)


def test_a_plain_checkpoint_is_not_what_it_is_said_to_be(flint):
    with pytest.raises(ValueError, match="does not declare itself as MXFP8"):
        start(flint[0], quantization="modelopt_mxfp8")


def test_flint_in_a_loop_cannot_be_followed(tmp_path):
    oracle = write_checkpoint(tmp_path, "flint", **SIZES, **SHARED["flint"])
    oracle.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="grouped_mm"), fake_quantized(oracle):
        pass


def test_a_followed_model_learns_and_is_left_as_it_was(plain):
    _, oracle = plain
    tokens = torch.tensor(prompts(20))
    with torch.no_grad():
        before = oracle(tokens).logits
    with fake_quantized(oracle):
        inside = oracle(tokens).logits
        inside.logsumexp(-1).sum().backward()
    grown = {name for name, x in oracle.named_parameters() if x.grad is not None and x.grad.any()}
    assert {f"{QUERY}.weight", "model.layers.3.mlp.experts.down_proj"} <= grown
    oracle.zero_grad()
    with torch.no_grad():
        assert torch.equal(oracle(tokens).logits, before)
    assert not torch.allclose(inside, before, atol=1e-3)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in oracle.modules())


@pytest.mark.parametrize("model", ["flint-nano-nvfp4", "beam-nano-nvfp4"])
def test_four_bits_do_not_become_eight(model):
    with pytest.raises(ValueError, match="NVFP4 and GGUF cannot become MXFP8"):
        start(model, **ONLINE)
