"""A drafter learns its target's text, and its training sees blocks as serving does."""

import dataclasses

import pytest
import torch
from drafters import CPU, Cache, config_json, randomize
from tiny import prompts, write_checkpoint

from limelight.models.batch import Batch
from limelight.models.dflash2 import DFlash2, Ends
from limelight.models.dflash2_config import DFlash2Config
from limelight.models.loader import load_model
from limelight.models.taps import Taps
from limelight.progress import Progress
from limelight.training.acceptance import total, walk
from limelight.training.answers import Document
from limelight.training.lessons import Extent, Lessons, Library, lesson_of, read
from limelight.training.loss import LessonBlocks, Rows, Teacher, block_loss
from limelight.training.settings import DraftSettings
from limelight.training.trainer import Trainer, initialize

PROMPT, LAYERS, VOCAB = 6, 3, 24
TAPS = [0, 1, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    changes = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "mlp_only_layers": [0]}
    write_checkpoint(folder, "flint", seed=4, **changes)
    model = load_model(folder, dataclasses.replace(CPU, targets={}), progress=Progress(quiet=True))
    # Random logits are all alike; a trained model is surer of what it says.
    model.head.weight.mul_(8.0)
    return model


@torch.inference_mode()
def greedy_texts(target, count, tokens, *, seed):
    """Prompts and what the target says to them."""
    texts = [[token % VOCAB for token in ids] for ids in prompts(*[PROMPT] * count, seed=seed)]
    for _ in range(tokens):
        lengths = [len(text) for text in texts]
        batch = Batch.packed(lengths)
        hidden_TD = target(torch.tensor(sum(texts, [])), batch)
        last_B = torch.tensor(lengths).cumsum(0) - 1
        for text, token in zip(texts, target.logits(hidden_TD[last_B]).argmax(-1), strict=True):
            text.append(int(token))
    return texts


def documents_of(texts):
    return [Document(text, PROMPT, "", False) for text in texts]


def read_texts(target, texts):
    library = Library.of(documents_of(texts))
    return library, read(target, library, TAPS)


def lesson_at(target, drafter, texts, anchors):
    """An excerpt of each text, with these anchors."""
    library, features = read_texts(target, texts)
    longest = int(library.lengths_D.max())
    extent = Extent.reaching(drafter.config.windows, longest, rows=7)
    return lesson_of(library, features, torch.arange(len(texts)), torch.tensor(anchors), extent)


def make_drafter(target, **changes):
    drafting = {"target_layer_ids": TAPS, "output_multiplier": None, "input_embedding_scale": None}
    drafting |= {
        "final_logit_softcapping": None,
        "conv_kernel_size": 2,
        "selector_rank": 16,
        "mask_token_id": 23,
    }
    shape = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    json_ = config_json(
        drafting=drafting, num_target_layers=LAYERS, vocab_size=VOCAB, **(shape | changes)
    )
    place = dataclasses.replace(CPU, targets={})
    return DFlash2(DFlash2Config.from_dict(json_), place, Ends(target.embed, target.head))


def test_the_target_reads_documents_of_other_lengths_as_it_reads_each_alone(target):
    whole = greedy_texts(target, 4, 50, seed=5)
    texts = [text[:length] for text, length in zip(whole, (9, 56, 17, 31), strict=True)]
    library, features = read_texts(target, texts)
    for first, text in zip(library.firsts_D.tolist(), texts, strict=True):
        taps = Taps(TAPS)
        hidden_TD = target(torch.tensor(text), Batch.packed([len(text)]), taps)
        rows = slice(first, first + len(text))
        torch.testing.assert_close(features.hidden_XD[rows], hidden_TD, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(features.taps_XF[rows], taps.joined(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [16, None])
def test_a_block_in_training_is_the_block_in_serving(target, window):
    texts = greedy_texts(target, 3, 50, seed=5)
    changes = {"sliding_window": window} if window else {"layer_types": ["full_attention"] * 2}
    drafter = make_drafter(target, **changes)
    randomize(drafter)
    places = [[10, 12, -1], [31, 40, 47], [45, -1, -1]]
    lesson = lesson_at(target, drafter, texts, places)
    trained_BQD = drafter(lesson.anchor_tokens_B, LessonBlocks.of(drafter, lesson, 8))
    trained_EAQD = trained_BQD.unflatten(0, (3, 3))
    library, features = read_texts(target, texts)
    for text, first, anchors, trained_AQD in zip(
        texts, library.firsts_D.tolist(), places, trained_EAQD, strict=True
    ):
        for at, trained_QD in zip(anchors, trained_AQD, strict=True):
            if at < 0:
                continue
            cache = Cache(drafter, 1)
            cache.fill(0, features.taps_XF[first : first + at])
            served_BQD = drafter(torch.tensor([text[at]]), cache.blocks([at], 8))
            torch.testing.assert_close(trained_QD, served_BQD[0], rtol=1e-4, atol=1e-4)


def test_anchors_are_tokens_of_answers_that_another_follows(target):
    documents = [Document([1] * (PROMPT + n), PROMPT, "", False) for n in (1, 2, 20, 300)]
    lessons = Lessons(target, documents, TAPS, windows=[16], rows=7, tokens=4096, anchors=400)
    seen = set()
    for seed in range(60):
        drawn = torch.Generator().manual_seed(seed)
        documents_E = torch.randint(3, (lessons.excerpts,), generator=drawn)
        anchors_EA = lessons._anchors(documents_E, drawn)
        assert (anchors_EA[:, 0] >= PROMPT).all()
        for document, row in zip(documents_E.tolist(), anchors_EA.tolist(), strict=True):
            real = [at for at in row if at >= 0]
            assert real == sorted(set(real)) and row[len(real) :] == [-1] * (len(row) - len(real))
            seen |= {(document, at) for at in real}
    lengths = (2, 20, 300)
    assert seen == {
        (i, PROMPT + at) for i, length in enumerate(lengths) for at in range(length - 1)
    }


def test_a_lesson_is_the_same_whether_features_are_kept_or_computed(target):
    documents = documents_of(greedy_texts(target, 6, 30, seed=2))
    kept, computed = (
        Lessons(target, documents, TAPS, windows=[16], rows=7, tokens=400, anchors=24)
        for _ in range(2)
    )
    kept.keep(lambda count: None)
    lessons = [one.draw(torch.Generator().manual_seed(3)) for one in (kept, computed)]
    inside_EL = lessons[0].positions_EL < lessons[0].lengths_E[:, None]
    for mine, theirs in zip(*(one.tensors for one in lessons), strict=True):
        if mine.shape[:2] == inside_EL.shape:
            mine, theirs = mine[inside_EL], theirs[inside_EL]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_rows_behind_the_document_do_not_count(target):
    texts = greedy_texts(target, 2, 20, seed=5)
    drafter, other = make_drafter(target), [5] * 26
    randomize(drafter)
    drafter.requires_grad_(True)
    losses = []
    for behind in (texts[1], other):
        lesson = lesson_at(target, drafter, [texts[0], behind], [[22, -1], [23, -1]])
        lesson = next(lesson.split(1))
        rows = Rows.behind(lesson, 7)
        assert rows.counts_BN.sum(1).tolist() == [3, 0]
        teacher, count = Teacher.of(target, lesson, rows), rows.counts_BN.sum()
        losses.append(block_loss(drafter, lesson, rows, teacher, gamma=4.0, count=count))
    assert torch.equal(losses[0].total, losses[1].total)
    losses[0].total.backward()
    assert all(weight.grad.isfinite().all() for weight in drafter.parameters())


def test_a_new_drafter_starts_as_its_convolutions_were_not_there(target):
    drafter = make_drafter(target)
    initialize(drafter, torch.Generator().manual_seed(0))
    conv = drafter.layers[0].attention_conv
    x_TD = torch.randn(16, 48)
    assert torch.equal(conv.before(x_TD, conv.changes(x_TD), 8), x_TD)
    norm = drafter.layers[0].feed_forward_in
    h_TD, y_TD = conv.after(x_TD, x_TD, conv.changes(x_TD), 8, norm)
    assert torch.equal(h_TD, 2 * x_TD) and torch.equal(y_TD, norm(h_TD))


def accepted_length(drafter, library, features):
    return total(dict(enumerate(walk(drafter, library, features, drafts=7)))).length


def test_a_drafter_learns_what_its_target_says(target):
    documents = documents_of(greedy_texts(target, 48, 34, seed=0))
    library, features = read_texts(target, greedy_texts(target, 12, 34, seed=99))
    drafter = make_drafter(target)
    initialize(drafter, torch.Generator().manual_seed(0))
    before = accepted_length(drafter, library, features)
    windows = drafter.config.windows
    lessons = Lessons(target, documents, TAPS, windows=windows, rows=7, tokens=3000, anchors=48)
    lessons.keep(lambda count: None)
    settings = DraftSettings(steps=160, anchors=48, rate=5e-3, tokens=3000)
    trainer = Trainer(drafter, target, lessons, settings)
    losses = [float(trainer.advance().total) for _ in range(160)]
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    learned = accepted_length(drafter, library, features)
    # Of taps one layer off it makes less: what it has learned is to read them.
    shifted_XF = features.taps_XF.unflatten(1, (LAYERS, -1)).roll(1, dims=1).flatten(1)
    shifted = dataclasses.replace(features, taps_XF=shifted_XF)
    blind = accepted_length(drafter, library, shifted)
    assert before < 1.2 and learned > 1.6 and blind < 0.95 * learned
