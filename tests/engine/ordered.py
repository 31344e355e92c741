"""An engine in process that takes orders, and a trainer that sends it weights."""

import itertools
import threading

import pytest
from tiny import Answer, prompts, request

from limelight.config import EngineConfig
from limelight.engine.startup import start_engine
from limelight.orders import Asked, FinishUpdate, InitTransfer, StartUpdate, UpdateWeights
from limelight.progress import Progress
from limelight.rl.gloo import GlooGroup, host_store

PROMPTS = prompts(40, 18, 5, seed=3)
OVERLAP = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlapped"]
)


class Ordered:
    """An engine that takes orders, and what its requests have got so far."""

    def __init__(self, folder, **config):
        settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8} | config
        transfer = {"backend": "gloo", "timeout": 5}
        config = EngineConfig(model=str(folder), weight_transfer_config=transfer, **settings)
        self.ranks = config.tensor_parallel_size
        started = start_engine(config, Progress(quiet=True))
        self.engine, self.control = started.engine, started.control
        self.answers: dict[str, Answer] = {}
        self._ids = itertools.count()

    def add(self, *token_ids, **options):
        added = []
        for ids in token_ids:
            one = request(ids, **({"max_tokens": 20} | options))
            added.append(self.answers.setdefault(one.id, Answer()))
            self._take(self.control.add(one))
        return added

    def _take(self, outputs):
        for output in outputs:
            self.answers[output.request_id].take(output)

    def order(self, order):
        """The reply, or None if it is still to come."""
        self._take(self.control.take(Asked(next(self._ids), order)))
        self.engine.scheduler.check()
        return next(iter(self.control.replies()), None)

    def steps(self, count=None):
        """So many steps, or all that there are; replies that came meanwhile."""
        replies = []
        while self.engine.has_work and count != 0:
            self._take(self.engine.step())
            self.engine.scheduler.check()
            replies += self.control.replies()
            count = None if count is None else count - 1
        return replies

    def ask(self, *token_ids, **options):
        answers = self.add(*token_ids, **options)
        self.steps()
        return [answer.token_ids for answer in answers]


class Trainer:
    """Sends the tensors of a model to one engine in process."""

    def __init__(self, one):
        self.one = one
        self.world_size = 1 + one.ranks
        self.store = host_store("127.0.0.1", 0, world_size=self.world_size, seconds=10)
        meeting = threading.Thread(target=self._meet)
        meeting.start()
        info = {"master_address": "127.0.0.1", "master_port": self.store.port, "rank_offset": 1}
        assert one.order(InitTransfer(info | {"world_size": self.world_size})).failed is None
        meeting.join()

    def _meet(self):
        self.group = GlooGroup(self.store, rank=0, world_size=self.world_size, seconds=10)

    def update(self, tensors, *, shapes=None):
        info = {
            "names": list(tensors),
            "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
            "shapes": shapes or [list(x.shape) for x in tensors.values()],
        }
        if shapes is not None:
            return self.one.order(UpdateWeights(info))
        sending = threading.Thread(
            target=lambda: [self.group.broadcast(x.detach().contiguous()) for x in tensors.values()]
        )
        sending.start()
        reply = self.one.order(UpdateWeights(info))
        sending.join()
        return reply

    def send(self, tensors, version=None):
        assert self.one.order(StartUpdate()).refused is None
        assert self.update(tensors).refused is None
        return self.one.order(FinishUpdate(version))
