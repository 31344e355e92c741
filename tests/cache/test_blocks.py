"""The pool of blocks: against a naive model, then each promise by itself."""

import random

import pytest

from limelight.cache.blocks import NULL_BLOCK, BlockPool, ChainHash


class NaivePool:
    """What `BlockPool` promises, by lists and searching."""

    def __init__(self, num_blocks: int):
        self.refs = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.keys: dict[int, object] = {}
        self.order = list(self.refs)  # the next one to be reused comes first
        self.cold: set[int] = set()

    def next(self) -> int:
        for kind in (
            lambda block: block not in self.keys,
            lambda block: block in self.cold,
            lambda block: True,
        ):
            for block in self.order:
                if kind(block):
                    return block
        raise AssertionError("empty")

    def allocate(self) -> int:
        block = self.next()
        self.order.remove(block)
        self.keys.pop(block, None)
        self.refs[block] = 1
        return block

    def share(self, block: int):
        if self.refs[block] == 0:
            self.order.remove(block)
        self.refs[block] += 1

    def publish(self, block: int, key: object):
        twins = [other for other, its in self.keys.items() if its == key]
        if twins and self.refs[twins[0]] > 0:
            return
        for twin in twins:
            self.forget(twin)
        self.keys[block] = key

    def forget(self, block: int):
        del self.keys[block]
        if self.refs[block] == 0:
            self.order.remove(block)
            self.order.insert(0, block)

    def release(self, block: int, cold: bool):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.order.insert(0 if block not in self.keys else len(self.order), block)
            (self.cold.add if cold else self.cold.discard)(block)


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_agree_with_a_naive_pool(seed):
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 13)
    pool, naive = BlockPool(num_blocks, block_size=4), NaivePool(num_blocks)
    held: list[int] = []
    for _ in range(400):
        action = rng.randrange(9) // 2
        if action == 0 and (most := min(3, pool.num_free)):
            count = rng.randint(1, most)
            blocks = pool.allocate(count)
            assert blocks == [naive.allocate() for _ in range(count)]
            held += blocks
        elif action == 1 and held:
            block, cold = held.pop(rng.randrange(len(held))), rng.random() < 0.3
            pool.release([block], cold=cold)
            naive.release(block, cold)
        elif action == 2 and (fresh := [b for b in held if pool.key(b) is None]):
            block, key = rng.choice(fresh), (rng.randrange(2), bytes([rng.randrange(9)]))
            pool.publish(block, key)
            naive.publish(block, key)
        elif action == 4 and naive.keys:
            block, key = rng.choice(list(naive.keys.items()))
            pool.forget(key)
            naive.forget(block)
            assert pool.find(key) is None
        elif naive.keys:
            block, key = rng.choice(list(naive.keys.items()))
            assert pool.find(key) == block
            pool.share(block)
            naive.share(block)
            held.append(block)
        pool.check()
        assert pool.num_free == len(naive.order)
        assert {b: pool.references(b) for b in naive.refs} == naive.refs
        assert {b: pool.key(b) for b in naive.refs if pool.key(b)} == naive.keys
    pool.release(held)
    pool.check()
    assert pool.num_free == num_blocks


def test_every_block_but_the_null_block_is_handed_out_once():
    pool = BlockPool(7, block_size=16)
    blocks = pool.allocate(7)
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6, 7]
    assert NULL_BLOCK not in blocks and pool.num_free == 0


def test_a_block_given_away_is_not_found_by_its_former_hash():
    pool = BlockPool(1, block_size=16)
    [block] = pool.allocate(1)
    pool.publish(block, (0, b"old"))
    pool.release([block])
    assert pool.find((0, b"old")) == block
    assert pool.allocate(1) == [block]
    assert pool.find((0, b"old")) is None


def test_the_longest_unused_block_is_reused_first_and_a_hit_counts_as_use():
    pool = BlockPool(3, block_size=16)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.publish(block, (0, bytes([block])))
    pool.release([first, second, third])
    pool.share(first)
    pool.release([first])
    assert pool.allocate(3) == [second, third, first]


def test_blocks_without_a_hash_go_first_and_cold_ones_before_the_others():
    pool = BlockPool(3, block_size=16)
    warm, cold, plain = pool.allocate(3)
    pool.publish(warm, (0, b"warm"))
    pool.publish(cold, (0, b"cold"))
    pool.release([warm])
    pool.release([cold], cold=True)
    pool.release([plain])
    assert pool.allocate(3) == [plain, cold, warm]


def test_of_two_blocks_with_one_hash_the_one_in_use_is_found_and_else_the_latest():
    pool = BlockPool(2, block_size=16)
    first, second = pool.allocate(2)
    pool.publish(first, (0, b"same"))
    pool.publish(second, (0, b"same"))
    assert pool.find((0, b"same")) == first and pool.key(second) is None
    pool.release([first])
    pool.publish(second, (0, b"same"))
    assert pool.find((0, b"same")) == second and pool.key(first) is None
    pool.check()


@pytest.mark.parametrize("size", [(0, 16), (5, 0)], ids="{0[0]} blocks of {0[1]}".format)
def test_an_empty_pool_is_refused(size):
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(size[0], block_size=size[1])


def chain(chain_hash: ChainHash, *blocks: list[int], salt: str = "") -> bytes:
    digest = chain_hash.first_parent(salt)
    for block in blocks:
        digest = chain_hash.next(digest, block)
    return digest


def test_a_hash_depends_on_tokens_order_ancestors_salt_root_and_seed():
    def hash_of(*blocks, root=b"model", seed="s", salt=""):
        return chain(ChainHash(block_size=3, root=root, seed=seed), *blocks, salt=salt)

    digests = [
        hash_of([1, 2, 3]),
        hash_of([3, 2, 1]),
        hash_of([1, 2, 3], [1, 2, 3]),
        hash_of([4, 5, 6], [1, 2, 3]),
        hash_of([1, 2, 3], salt="a"),
        hash_of([1, 2, 3], salt="b"),
        hash_of([1, 2, 3], root=b"mode", salt="l"),
        hash_of([1, 2, 3], root=b"other"),
        hash_of([1, 2, 3], seed="t"),
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 16 for digest in digests)


def test_two_chains_differ_unless_they_have_one_seed():
    free = [ChainHash(block_size=2, root=b"", seed=None) for _ in range(2)]
    seeded = [ChainHash(block_size=2, root=b"", seed="fixed") for _ in range(2)]
    assert chain(free[0], [1, 2]) == chain(free[0], [1, 2]) != chain(free[1], [1, 2])
    assert chain(seeded[0], [1, 2]) == chain(seeded[1], [1, 2])


@pytest.mark.parametrize("salt", ["", "\x00", "\ud800", "x" * 2**20], ids=["", "0", "half", "1MB"])
def test_no_salt_can_raise(salt):
    assert len(ChainHash(block_size=2, root=b"", seed=None).first_parent(salt)) == 16
