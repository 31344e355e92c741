"""How the bundled models are made: nothing held out is trained on, and the fast paths are right."""

import random
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tiny import write_checkpoint
from transformers import AutoTokenizer

from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.ops.router import sigmoid_scores, top_experts
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from nano.attention import RowMasks, reference_batch
from nano.chat import FAMILIES
from nano.evaluate import questions
from nano.experts import replace_experts
from nano.export import save_weights
from nano.tasks import add, draw, is_held_out, sort
from nano.tools import call_tools

CPU = torch.device("cpu")


def tiny_model(folder, family):
    write_checkpoint(folder, family)
    place = Placement(Mesh.single(), torch.float32, CPU)
    return load_model(folder, place, progress=Progress(quiet=True))


def test_no_question_that_is_asked_has_been_trained_on():
    rng = random.Random(0)
    trained = {
        draw(partial(make, rng), held_out=False).key for make in (add, sort) for _ in range(999)
    }
    family = next(iter(FAMILIES.values()))
    asked = {question.item.key for question in questions(family, limit=40)}
    assert all(is_held_out(key) for key in asked)
    assert not any(is_held_out(key) for key in trained)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_read_back_as_it_was_written(name):
    family, rng = FAMILIES[name], random.Random(1)
    for _ in range(20):
        item = call_tools(rng, goes_on=False)
        prompt = family.prompt(item.messages[:-1], item.tools)
        text = "".join(segment.text for segment in family.segments(item, thinking=False))
        answer = family.parse(text[len(prompt) :])
        wanted = item.messages[-1]["tool_calls"]
        assert [call for call, _ in answer.calls] == [one["function"]["name"] for one in wanted]


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_renders_a_conversation_alike(name, thinking):
    family, rng = FAMILIES[name], random.Random(2)
    theirs = AutoTokenizer.from_pretrained(family.folder)
    for _ in range(10):
        item = call_tools(rng, goes_on=True)
        rendered = theirs.apply_chat_template(
            item.messages[:-1], tools=item.tools, add_generation_prompt=True, tokenize=False,
            enable_thinking=thinking,
        )  # fmt: skip
        assert rendered == family.prompt(item.messages[:-1], item.tools, thinking=thinking)


@pytest.mark.parametrize("family", ["flint", "beam"])
def test_rows_of_documents_train_as_each_document_alone_does(tmp_path, family):
    model = tiny_model(tmp_path, family)
    starts = torch.zeros(2, 128, dtype=torch.int64)
    starts[0, 50:], starts[1, 7:], starts[1, 100:] = 50, 7, 100
    tokens = torch.randint(97, (2 * 128,))
    masks = RowMasks(2, 128, set(model.config.windows), device=CPU)
    with torch.no_grad():
        found = model(tokens, masks.batch(starts))
        expected = model(tokens, reference_batch(starts))
    assert (found - expected).abs().max() < 1e-4


def test_experts_that_all_compute_give_what_the_chosen_ones_give(tmp_path):
    model = tiny_model(tmp_path, "flint")
    sparse = model.layers[3].feed_forward
    x = torch.randn(9, 48)
    weights, ids = top_experts(sigmoid_scores(x, sparse.router_ED), count=2)
    expected = sparse.experts(x, weights, ids)
    replace_experts(model)
    assert (sparse.experts(x, weights, ids) - expected).abs().max() < 1e-5
    assert sparse.experts.load_E.sum().item() == pytest.approx(1.0)


def test_an_export_holds_bf16_and_exact_routers(tmp_path):
    model = tiny_model(tmp_path, "flint")
    save_weights(model.targets, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.3.mlp.gate.weight"].dtype == torch.float32
    assert tensors["model.layers.3.self_attn.softmax_offset"].dtype == torch.float32
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    again = load_model(
        tmp_path, Placement(Mesh.single(), torch.bfloat16, CPU), progress=Progress(quiet=True)
    )
    assert torch.equal(again.embed.weight, tensors["model.embed_tokens.weight"])
