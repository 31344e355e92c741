"""Blocks of the KV cache: who holds each, which can be found again by hash, which goes next.

Integers and hashes only; `cache/storage.py` has the tensors, `cache/groups.py` the block tables.
"""

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice

NULL_BLOCK = 0  # pads block tables; never handed out
Key = tuple[int, bytes]  # (layer group, chained hash)


class ChainHash:
    """Keyed hashes of full blocks, each over its parent's hash and its own token ids.

    `root` names what the keys and values depend on beside the tokens, and `version` counts the
    weights. Without `seed` the key is random, so no one can aim at another's blocks.
    """

    def __init__(self, *, block_size: int, root: bytes, seed: str | None):
        secret = os.urandom(32) if seed is None else blake2b(seed.encode(), digest_size=32).digest()
        self._keyed = blake2b(digest_size=16, key=secret)
        self._root, self.version = root, 0
        self._tokens = struct.Struct(f"<{block_size}i")

    def first_parent(self, salt: str, adapter: tuple[int, int] = (0, 0)) -> bytes:
        """The parent of a sequence's first block; sequences of different salts share nothing, nor
        do those of different adapters (id, version)."""
        # JSON may carry lone surrogates, and a salt must not be able to raise here.
        own = struct.pack("<2q", *adapter) + salt.encode(errors="surrogatepass")
        root = blake2b(self._root + b" %d" % self.version).digest()
        return self._digest(root + own)

    def next(self, parent: bytes, token_ids: list[int]) -> bytes:
        """The hash of the block that holds `token_ids` and follows `parent`."""
        return self._digest(parent + self._tokens.pack(*token_ids))

    def _digest(self, data: bytes) -> bytes:
        state = self._keyed.copy()
        state.update(data)
        return state.digest()


class BlockPool:
    """Blocks 1..num_blocks with reference counts; a freed block keeps its key until it is reused.

    Blocks are reused in this order: without a key, released as cold, the others; among equals the
    one released first. Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int, *, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * (num_blocks + 1)
        self._keys: list[Key | None] = [None] * (num_blocks + 1)
        self._block_of: dict[Key, int] = {}
        self._cold = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._warm: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that no one refers to, those with a key included."""
        return len(self._cold) + len(self._warm)

    def references(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._refs[block]

    def key(self, block: int) -> Key | None:
        """What `block` can be found by."""
        return self._keys[block]

    def find(self, key: Key) -> int | None:
        """The block with this key, in use or not."""
        return self._block_of.get(key)

    def allocate(self, count: int) -> list[int]:
        """Give `count` free blocks away, each with one reference and without its former key."""
        assert count <= self.num_free, "the caller looks at num_free first"
        blocks: list[int] = []
        for free in (self._cold, self._warm):
            taken = list(islice(free, count - len(blocks)))
            for block in taken:
                del free[block]
                if (key := self._keys[block]) is not None:
                    del self._block_of[key]
                    self._keys[block] = None
                self._refs[block] = 1
            blocks += taken
        return blocks

    def share(self, block: int):
        """Add a reference to a block with a key; a free one is free no longer."""
        assert self._keys[block] is not None, "only a full block with a key is shared"
        if self._refs[block] == 0:
            del (self._cold if block in self._cold else self._warm)[block]
        self._refs[block] += 1

    def publish(self, block: int, key: Key):
        """Let a full block in use be found by `key`, unless another one in use already is."""
        assert self._refs[block] > 0 and self._keys[block] is None
        if (twin := self._block_of.get(key)) is not None:
            if self._refs[twin] > 0:
                return
            # The key is as recent as its latest use, so the free twin loses it.
            self.forget(key)
        self._block_of[key] = block
        self._keys[block] = key

    def forget(self, key: Key):
        """Let no block be found by `key`; a free one is the next to be reused."""
        if (block := self._block_of.pop(key, None)) is None:
            return
        self._keys[block] = None
        if self._refs[block] == 0:
            self._warm.pop(block, None)
            self._put_first(block)

    def forget_all(self):
        """Let no block be found by any key."""
        for key in list(self._block_of):
            self.forget(key)

    def release(self, blocks: Iterable[int], *, cold: bool = False):
        """Drop one reference to each; the first of them is the first to be reused."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            assert self._refs[block] == 0, f"block {block} was released twice"
            if self._keys[block] is None:
                self._put_first(block)
            else:
                (self._cold if cold else self._warm)[block] = None

    def _put_first(self, block: int):
        self._cold[block] = None
        self._cold.move_to_end(block, last=False)

    def check(self):
        """Assert what always holds: free means unreferenced, and keys and blocks are one to one."""
        free = [*self._cold, *self._warm]
        assert len(free) == len(set(free)) == self.num_free
        unused = {block for block, count in enumerate(self._refs) if count == 0}
        assert set(free) == unused - {NULL_BLOCK}
        assert self._refs[NULL_BLOCK] == 0 and min(self._refs) == 0
        assert {key: block for block, key in enumerate(self._keys) if key} == self._block_of
        assert all(self._keys[block] is not None for block in self._warm)
