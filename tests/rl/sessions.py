"""Sessions with a trainer, whose tensors are simply there."""

import torch

from limelight.models.layers import Placement
from limelight.models.loader import load_model
from limelight.parallel.mesh import Mesh
from limelight.progress import Progress
from limelight.rl import weight_sync
from limelight.rl.announced import SKYRL_EXPERTS
from limelight.rl.checksum import checksums
from limelight.rl.weight_sync import WeightSync

CPU = torch.device("cpu")


class Handed:
    """Tensors that are simply there, by name."""

    def __init__(self, tensors):
        self.tensors, self.fault, self.closed, self.finished = tensors, None, False, 0

    def check(self, announced, info):
        pass

    def receive(self, announced, info):
        for i, one in enumerate(announced):
            if self.fault is not None and i == 2:
                raise self.fault
            yield one.name, self.tensors[one.name]

    def finish(self):
        self.finished += 1

    def close(self):
        self.closed = True


class World:
    """A model with the weights of one checkpoint, and those of another to send."""

    def __init__(self, folder, trained, mesh=None, declared=None):
        """`declared` is how both are quantized."""
        self.trained, self.mesh, self.declared = trained, mesh or Mesh.single(), declared
        self.place = Placement(self.mesh, torch.float32, CPU)
        self.model = self.load(folder / "old")
        self.fresh = self.load(folder / "new")
        self.transport = Handed(dict(self.trained.state_dict()))
        self.sync = self.session()

    def load(self, folder):
        return load_model(folder, self.place, declared=self.declared, progress=Progress(quiet=True))

    def session(self, model=None, backend="gloo"):
        model = model or self.model
        return WeightSync(
            model.targets, model.renames, kept_names=model.unsent, mesh=self.mesh, device=CPU,
            backend=backend, seconds=1,
        )  # fmt: skip

    def meet(self):
        self.sync.init({}, replica=0)

    def send(self, tensors, *, parts=1):
        # SkyRL's mark of stacked experts belongs to the announcement alone.
        self.transport.tensors = {
            name.removeprefix(SKYRL_EXPERTS): x for name, x in tensors.items()
        }
        self.sync.start()
        names = list(tensors)
        for i in range(parts):
            self.sync.update(announce({name: tensors[name] for name in names[i::parts]}))
        return self.sync.finish()


def announce(tensors):
    return {
        "names": list(tensors),
        "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
        "shapes": [list(x.shape) for x in tensors.values()],
    }


def assert_fresh(world):
    for name, target in world.model.targets.items():
        if isinstance(target.into, torch.Tensor):
            assert torch.equal(target.into, world.fresh.targets[name].into), name
    assert checksums(world.model.targets, Mesh.single()) == checksums(
        world.fresh.targets, Mesh.single()
    )


def by_expert(tensors):
    """Routed experts one by one, as checkpoints have them."""
    apart = {}
    for name, x in tensors.items():
        front, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, one in enumerate(x):
                gate, up = one.chunk(2)
                apart[f"{front}.{i}.gate_proj.weight"] = gate
                apart[f"{front}.{i}.up_proj.weight"] = up
        elif kind == "down_proj":
            apart |= {f"{front}.{i}.down_proj.weight": one for i, one in enumerate(x)}
        else:
            apart[name] = x
    return apart


def met(checkpoint, monkeypatch, **options):
    world = World(*checkpoint, **options)
    monkeypatch.setitem(weight_sync.BACKENDS, "gloo", lambda *where: world.transport)
    world.meet()
    return world
