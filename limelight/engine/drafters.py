"""From a drafting config to a drafter that runs: find, check, load, and decide about its drafts."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

from limelight.checkpoint import locate
from limelight.config import EngineConfig
from limelight.engine.drafting import AllDrafts, Drafting
from limelight.engine.memory import MemoryPlan, WeightKind, format_of
from limelight.engine.speculation import Speculation
from limelight.engine.timing import Timing
from limelight.models.dflash2 import DFlash2, Ends
from limelight.models.dflash2_config import DFlash2Config
from limelight.models.dflash2_loader import load_drafter, read_drafter_config
from limelight.models.layers import Placement
from limelight.models.loader import Model
from limelight.ops.synthetic import SPREAD, SyntheticOdds
from limelight.progress import Progress
from limelight.runner.drafted import MOST_ROWS_OF_A_GRAPH
from limelight.runner.runner import ModelRunner
from limelight.speculative import SpeculativeConfig

logger = logging.getLogger(__name__)
# Rows of logits at once, in bytes; drafts beyond are not verified.
LOGITS_AT_ONCE = 2**30


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A drafter's files and shape, and how it is to work."""

    folder: Path
    shape: DFlash2Config
    config: SpeculativeConfig
    num_drafts: int

    @property
    def ahead(self) -> int:
        """Positions behind a sequence's next one that a step may need: of drafts that are not
        settled yet, of drafts it verifies, and of the block that it drafts."""
        return 3 * self.num_drafts + 1

    def logit_rows(self, config: EngineConfig) -> int:
        """Rows of logits that a step and a pass hold at once: of all verified rows, twice where
        rules change them and once more in a graph, and of all drafts."""
        seqs = config.max_num_seqs
        step = min(seqs * (1 + self.num_drafts), config.max_num_batched_tokens)
        return 2 * step + min(step, MOST_ROWS_OF_A_GRAPH) + seqs * self.num_drafts


def find_drafter(config: SpeculativeConfig, *, kv_cache_dtype: str) -> FoundDrafter:
    """`ValueError` for what cannot be had."""
    assert config.model is not None
    weights = config.load_format != "dummy"
    folder = locate(config.model, revision=config.revision, weights=weights)
    shape = read_drafter_config(folder)
    most = shape.block_size - 1
    count = most if config.num_speculative_tokens is None else config.num_speculative_tokens
    if count > most:
        logger.warning("%s was trained for %d drafts, not %d", folder, most, count)
    rates = config.synthetic_acceptance_rates
    if rates is not None and len(rates) != count:
        raise ValueError(f"{len(rates)} synthetic_acceptance_rates for {count} drafts")
    if config.kv_cache_dtype not in ("auto", kv_cache_dtype):
        raise ValueError(
            f"--speculative-config: the drafter's keys share the model's cache, whose "
            f"kv_cache_dtype is {kv_cache_dtype}, not {config.kv_cache_dtype}"
        )
    if config.attention_backend is not None:
        logger.info("attention_backend %s: drafts have one way here", config.attention_backend)
    return FoundDrafter(folder, shape, config, count)


def outline_drafter(found: FoundDrafter, target: Model, place: Placement) -> DFlash2:
    """Shapes and types alone; `ValueError` if it is no drafter of this target."""
    found.shape.check_target(target.config)
    place = replace(place, mesh=place.mesh.without_peers(), targets={}, outline=True)
    return DFlash2(found.shape, place, Ends(target.embed, target.head))


def drafter_kind(found: FoundDrafter, target: Model, place: Placement) -> WeightKind:
    """What its weights take, from shapes alone."""
    model = outline_drafter(found, target, place)
    weights = [one.into for one in model.targets.values()]
    return WeightKind(
        "drafter",
        sum(math.prod(weight.shape) for weight in weights),
        sum(weight.nbytes for weight in weights),
        format=", ".join(sorted({format_of(weight) for weight in weights})),
    )


def load_found_drafter(
    found: FoundDrafter,
    place: Placement,
    target: Model,
    dummy_seed: int | None,
    progress: Progress,
) -> DFlash2:
    """The same with its weights, or random ones where there is a seed."""
    # Behind its sublayers come convolutions, not norms.
    place = replace(place, mesh=place.mesh.without_peers())
    return load_drafter(found.folder, place, target, dummy_seed=dummy_seed, progress=progress)


def install_drafter(runner: ModelRunner, found: FoundDrafter, model: DFlash2) -> None:
    """Let the runner draft by it."""
    runner.draft_by(
        model,
        num_drafts=found.num_drafts,
        draws=found.config.draft_sample_method == "probabilistic",
        synthetic=_synthetic_odds(found, runner),
    )


def _synthetic_odds(found: FoundDrafter, runner: ModelRunner) -> SyntheticOdds | None:
    rates, spread = found.config.synthetic_acceptance_rates, found.config.synthetic_spread
    if rates is None:
        return None
    logger.warning(
        "drafts are accepted at the rates %s whatever the model says: texts mean nothing", rates
    )
    return SyntheticOdds(rates, spread=SPREAD if spread is None else spread, device=runner.device)


def start_drafting(
    runner: ModelRunner, found: FoundDrafter, plan: MemoryPlan, progress: Progress
) -> Drafting:
    """What decides about drafts, with the times of steps where it needs them."""
    synthetic = found.config.synthetic_acceptance_rates is not None
    if not found.config.enable_adaptive_verification:
        return Drafting(AllDrafts(found.num_drafts), synthetic=synthetic)
    costs = Timing(runner, found.num_drafts, plan).costs(progress)
    logger.info("%s", costs)
    return Drafting(
        Speculation(
            num_drafts=found.num_drafts,
            max_seqs=plan.max_num_seqs,
            costs=costs,
            max_rows=max(plan.max_num_seqs, LOGITS_AT_ONCE // (4 * runner.model.head.outputs)),
        ),
        synthetic=synthetic,
    )
