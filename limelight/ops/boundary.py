"""The sum over ranks, with the residual add and norm behind it, in one kernel.

    x = x_0 + ... + x_(N-1), one summand a rank;  then `add_rmsnorm` or `sandwich` of h and x

Rounding points: each rank's summand is rounded to the type of the activations, as its product
leaves it; they are added in FP32 in the order of the ranks, and the sum is rounded once; then as
in `norm.py`. Every rank adds all in the same order, so all have the same bits. With two ranks these
are also the bits of a collective that rounds after each addition.

Every rank can read and write every other's memory (`Peers`). Two ways, by size:

once    A rank writes its row to all others, in words of 64 bits: 32 of data, and the number of the
        round. Whoever reads a word with this round's number has its data, so nothing needs an
        order. There are two places for a row, used in turn: who sends round n + 2 has the others'
        rows of n + 1, which they sent after they had read those of n.
twice   Row t is added up by rank t mod N, to which all others send it, and which sends the sum
        back. A flag follows each: released behind the row and acquired before it is read, at the
        scope of the system. No place is written again before its last reader has sent something
        later.

Rounds are counted in memory, for each row by itself: replays of a graph count on, and nothing is
ever reset. All ranks must launch the same kernels with as many rows in the same order. A kernel
waits for the other ranks until they come, or until `Peers.abandon` tells it that they never will.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, norm, op, pdl
from limelight.ops.combine import Unsummed, weighted_sum
from limelight.ops.norm import (
    add_rmsnorm_reference,
    added,
    check_rows,
    check_weights,
    depth_factors,
    sandwich_reference,
    sandwiched,
    whole_row,
)

# The most bytes of all rows of a rank, by the number of ranks: sent once, and sent twice. Above
# them a collective and a norm are as good. Measured for two ranks, assumed for more.
MOST_BYTES = {2: (2**20, 2**23), 4: (2**18, 2**22), 8: (2**17, 2**22)}
WORD, FLAG = 8, 4  # bytes


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory of N ranks for rows of D numbers of one type, as this rank sees it.

    Each rank's has `nbytes` bytes, of zeros at first; `addresses_N` has where each begins, int64.
    `rounds` counts this rank's rounds, int32, of zeros at first; kernels stop waiting when `stop`,
    int32 [1], is not 0, for which `beside` has a stream and a 1 of the host. `owner` keeps the
    memory.
    """

    rank: int
    size: int
    dtype: torch.dtype
    addresses_N: torch.Tensor
    rounds: torch.Tensor
    stop: torch.Tensor
    beside: "tuple[torch.cuda.Stream, torch.Tensor] | None" = None
    owner: object = None

    @property
    def ranks(self) -> int:
        return len(self.addresses_N)

    @property
    def once(self) -> int:
        """The most rows that are sent once."""
        return _most(self.ranks, 0) // (self.size * self.dtype.itemsize)

    @property
    def rows(self) -> int:
        """The most rows that are sent at all."""
        return max(self.once, _most(self.ranks, 1) // (self.size * self.dtype.itemsize))

    def fits(self, rows: int) -> bool:
        return rows <= self.rows

    @classmethod
    def of(
        cls,
        rank: int,
        size: int,
        dtype: torch.dtype,
        addresses_N: torch.Tensor,
        owner: object = None,
    ) -> "Peers":
        """Before any round."""
        none = addresses_N.new_empty(0, dtype=torch.int32)
        beside = None
        if none.is_cuda:
            one = torch.ones(1, dtype=torch.int32).pin_memory()
            beside = torch.cuda.Stream(none.device), one
        made = cls(rank, size, dtype, addresses_N, none, none.new_zeros(1), beside, owner)
        return replace(made, rounds=none.new_zeros(made.once + made.rows))

    def abandon(self) -> None:
        """Let kernels that wait for a lost rank end, from any thread; what they make is nothing."""
        if self.beside is None:
            self.stop.fill_(1)
            return
        # The stream of the steps waits: this copy needs neither it nor anything new.
        stream, one = self.beside
        with torch.cuda.stream(stream):
            self.stop.copy_(one, non_blocking=True)

    @staticmethod
    def can_hold(size: int, dtype: torch.dtype) -> bool:
        """Whether rows are whole words, and fit a program."""
        return size * dtype.itemsize % 4 == 0 and size <= 8192 and dtype.itemsize in (2, 4)

    @property
    def places(self) -> tuple[int, int, int, int]:
        """Where begin, in bytes: rows sent twice, their sums, the flags of both; and the end."""
        row = self.size * self.dtype.itemsize
        each = cdiv(self.rows, self.ranks)
        parts = 2 * self.ranks * self.once * (row // 4) * WORD
        sums = parts + self.ranks * each * row
        flags = sums + self.rows * row
        return parts, sums, flags, flags + FLAG * (self.ranks * each + self.rows)

    @property
    def nbytes(self) -> int:
        return self.places[-1]


def _most(ranks: int, way: int) -> int:
    return next((most[way] for count, most in MOST_BYTES.items() if ranks <= count), 0)


def bytes_of(ranks: int, size: int, dtype: torch.dtype) -> int:
    """Bytes that each of so many ranks needs; 0 where there is no way for them."""
    if not Peers.can_hold(size, dtype):
        return 0
    nowhere = torch.empty(ranks, dtype=torch.int64, device="meta")
    return Peers.of(0, size, dtype, nowhere).nbytes if _most(ranks, 1) else 0


@dataclass(frozen=True, slots=True)
class Partial:
    """This rank's summand [T, D] of what is added to the stream, for the norm that follows.

    `plainly` adds up the summands of all ranks by a collective.
    """

    part: torch.Tensor | Unsummed
    peers: Peers
    plainly: Callable[[torch.Tensor], torch.Tensor]

    def total(self) -> torch.Tensor:
        """The sum, without this file's kernels."""
        return self.plainly(self.part.combined() if isinstance(self.part, Unsummed) else self.part)


# What may be added to a stream.
Summand = torch.Tensor | Partial


def whole(x_TD: Summand) -> torch.Tensor:
    return x_TD.total() if isinstance(x_TD, Partial) else x_TD


def sum_add_rmsnorm_reference(
    h_TD: torch.Tensor, x_TD: Partial, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + the sum of all x, and its norm."""
    return add_rmsnorm_reference(h_TD, x_TD.total(), weight_D, eps=eps)


def sum_sandwich_reference(
    h_TD: torch.Tensor,
    x_TD: Partial,
    post_D: torch.Tensor,
    pre_D: torch.Tensor,
    *,
    n: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The n-th add of the norm of the sum of all x to h, and the norm of that."""
    return sandwich_reference(h_TD, x_TD.total(), post_D, pre_D, n=n, eps=eps)


@triton.jit
def _own_row(
    x, shared, weights, t, d, stride_x, factor,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """This rank's summand, rounded; with weights, of the outputs of COUNT experts."""
    if weights is None:
        x_D = tl.load(x + t * stride_x + d, mask=d < SIZE, other=0.0)
    else:
        x_D = weighted_sum(x, None, shared, weights, t, d, factor, SIZE, COUNT, SCALED, dtype)
    return x_D


@triton.jit
def _finish(
    h, x_D, post_D, pre_D, out_h, out_y, t, d, stride_h, keep, add, eps,
    SIZE: tl.constexpr, SANDWICH: tl.constexpr,
):  # fmt: skip
    """Add the sum to the stream's row, and store that and its norm."""
    inside = d < SIZE
    dtype: tl.constexpr = out_h.dtype.element_ty
    h_D = tl.load(h + t * stride_h + d, mask=inside, other=0.0).to(tl.float32)
    if SANDWICH:
        sum_D, y_D = sandwiched(h_D, x_D, post_D, pre_D, keep, add, SIZE, eps, dtype)
    else:
        sum_D, y_D = added(h_D, x_D, pre_D, SIZE, eps, dtype)
    tl.store(out_h + t * SIZE + d, sum_D, mask=inside)
    tl.store(out_y + t * SIZE + d, y_D.to(dtype), mask=inside)


@triton.jit
def _weights(post, pre, d, SIZE: tl.constexpr):
    """Those of the norm of the sum, if there is one, and of the norm of the stream."""
    pre_D = tl.load(pre + d, mask=d < SIZE, other=0.0).to(tl.float32)
    post_D = pre_D
    if post is not None:
        post_D = tl.load(post + d, mask=d < SIZE, other=0.0).to(tl.float32)
    return post_D, pre_D


@triton.jit
def _memory(addresses, rank, place, dtype: tl.constexpr):
    """A rank's memory from a place in bytes on."""
    at = (tl.load(addresses + rank) + place).to(tl.pointer_type(dtype))
    return tl.multiple_of(at, 16)


@triton.jit
def _worded(x_D, number):
    """A row as words with the number of the round above the data."""
    BLOCK_D: tl.constexpr = x_D.shape[0]
    if x_D.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x_D.to(tl.uint16, bitcast=True), [BLOCK_D // 2, 2]))
        data_W = low.to(tl.uint64) | (high.to(tl.uint64) << 16)
    else:
        data_W = x_D.to(tl.uint32, bitcast=True).to(tl.uint64)
    return data_W | (number.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)


@triton.jit
def _row_of(words_W, dtype: tl.constexpr):
    """The row that words hold, FP32."""
    if dtype.primitive_bitwidth == 16:
        low = (words_W & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = ((words_W >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        x_D = tl.reshape(tl.join(low, high), [2 * words_W.shape[0]])
    else:
        x_D = (words_W & 0xFFFFFFFF).to(tl.uint32).to(dtype, bitcast=True)
    return x_D.to(tl.float32)


@triton.jit
def _late(words_W, inside_W, number):
    """How many words are not of this round."""
    numbers_W = (words_W >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.max((inside_W & (numbers_W != number)).to(tl.int32), axis=0)


# No variants by these two: the number of rows may be any while serving.
@triton.jit(do_not_specialize=["rank", "rows"])
def _once_kernel(
    h, x, shared, weights, post, pre, out_h, out_y, addresses, rounds, stop, rank, rows,
    stride_h, stride_x, factor, keep, add, eps,
    RANKS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row a program at a time; registers hold HELD ranks' rows at once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = out_h.dtype.element_ty
    EACH: tl.constexpr = 32 // dtype.primitive_bitwidth
    WORDS: tl.constexpr = SIZE // EACH
    d, w = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // EACH)
    inside_W = w < WORDS
    post_D, pre_D = _weights(post, pre, d, SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    while t < rows:
        number = tl.load(rounds + t) + 1
        x_D = _own_row(x, shared, weights, t, d, stride_x, factor, SIZE, COUNT, SCALED, dtype)
        words_W = _worded(x_D, number)
        # The place of this round, of rank 0's row.
        place = ((number & 1) * (RANKS * ROWS) + t) * WORDS
        for first in range(0, RANKS, HELD):
            for i in tl.static_range(HELD):
                # Each to its right neighbour first.
                into = _memory(addresses, (rank + 1 + first + i) % RANKS, 0, tl.uint64)
                tl.store(into + place + rank * (ROWS * WORDS) + w, words_W, mask=inside_W)
        own = _memory(addresses, rank, 0, tl.uint64) + place + w
        total_D = tl.zeros((BLOCK_D,), tl.float32)
        for first in range(0, RANKS, HELD):
            held = ()
            for i in tl.static_range(HELD):
                at = own + (first + i) * (ROWS * WORDS)
                words_W = tl.load(at, mask=inside_W, other=0, volatile=True)
                held = held + (words_W,)  # type: ignore[assignment]
            for i in tl.static_range(HELD):
                at, words_W = own + (first + i) * (ROWS * WORDS), held[i]
                while (_late(words_W, inside_W, number) > 0) & (tl.load(stop, volatile=True) == 0):
                    words_W = tl.load(at, mask=inside_W, other=0, volatile=True)
                part_D = _row_of(words_W, dtype)
                # What is added to nothing keeps its sign, where it is 0.
                total_D = tl.where(first + i == 0, part_D, total_D + part_D)
        total_D = total_D.to(dtype)
        if post is not None:
            # By way of memory a thread gets what it has in `norm.py`: squares add up to the same.
            tl.store(out_y + t * SIZE + d, total_D, mask=d < SIZE)
            tl.debug_barrier()
            total_D = tl.load(out_y + t * SIZE + d, mask=d < SIZE, other=0.0)
        _finish(
            h, total_D.to(tl.float32), post_D, pre_D, out_h, out_y, t, d, stride_h, keep, add, eps,
            SIZE, post is not None,
        )  # fmt: skip
        tl.store(rounds + t, number)
        t += tl.num_programs(0)


@triton.jit
def _await(flag, number, stop):
    """Until the flag has the number; what was written before it was set can then be read."""
    waits = tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number
    while waits & (tl.load(stop, volatile=True) == 0):
        waits = tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number


@triton.jit(do_not_specialize=["rank", "rows"])
def _twice_kernel(
    h, x, shared, weights, post, pre, out_h, out_y, addresses, rounds, stop, rank, rows,
    stride_h, stride_x, factor, keep, add, eps, parts_at, sums_at, flags_at,
    RANKS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row a program at a time; ROWS are those that a rank adds up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = out_h.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    inside = d < SIZE
    post_D, pre_D = _weights(post, pre, d, SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    while t < rows:
        number = tl.load(rounds + t) + 1
        x_D = _own_row(x, shared, weights, t, d, stride_x, factor, SIZE, COUNT, SCALED, dtype)
        adds, at = t % RANKS, t // RANKS
        parts = _memory(addresses, adds, parts_at, dtype) + at * SIZE + d
        flags = _memory(addresses, adds, flags_at, tl.int32) + at
        if adds == rank:
            for r in tl.static_range(RANKS):
                part_D = x_D.to(tl.float32)
                if r != rank:
                    _await(flags + r * ROWS, number, stop)
                    # From L2, for a line of L1 may be older.
                    part_D = tl.load(
                        parts + r * (ROWS * SIZE), mask=inside, other=0.0, cache_modifier=".cg"
                    ).to(tl.float32)
                total_D = part_D if r == 0 else total_D + part_D  # type: ignore[has-type]  # noqa: F821
            total_D = total_D.to(dtype)
            for i in tl.static_range(RANKS - 1):
                other = (rank + 1 + i) % RANKS
                sums = _memory(addresses, other, sums_at, dtype) + t * SIZE
                tl.store(sums + d, total_D, mask=inside)
            tl.debug_barrier()
            for i in tl.static_range(RANKS - 1):
                other = (rank + 1 + i) % RANKS
                flag = _memory(addresses, other, flags_at, tl.int32) + RANKS * ROWS + t
                tl.atomic_xchg(flag, number, sem="release", scope="sys")
        else:
            tl.store(parts + rank * (ROWS * SIZE), x_D, mask=inside)
            tl.debug_barrier()
            tl.atomic_xchg(flags + rank * ROWS, number, sem="release", scope="sys")
            flag = _memory(addresses, rank, flags_at, tl.int32) + RANKS * ROWS + t
            _await(flag, number, stop)
            sums = _memory(addresses, rank, sums_at, dtype) + t * SIZE
            total_D = tl.load(sums + d, mask=inside, other=0.0, cache_modifier=".cg")
        _finish(
            h, total_D.to(tl.float32), post_D, pre_D, out_h, out_y, t, d, stride_h, keep, add, eps,
            SIZE, post is not None,
        )  # fmt: skip
        tl.store(rounds + t, number)
        t += tl.num_programs(0)


# Of all programs: about as many as are there at once. They begin in the order of rows, so that on
# every rank the first rows that are not done are among them, and wait for none that is not.
THREADS = 100 * 1024


def _launch(
    h_TD: torch.Tensor,
    partial: Partial,
    post_D: torch.Tensor | None,
    pre_D: torch.Tensor,
    *,
    factors: tuple[float, float],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, size), peers = h_TD.shape, partial.peers
    assert size == peers.size and h_TD.dtype == peers.dtype and rows <= peers.rows
    check_weights(size, *(w for w in (post_D, pre_D) if w is not None))
    out_TD, y_TD = (torch.empty_like(h_TD, memory_format=torch.contiguous_format) for _ in "hy")
    if not rows:
        return out_TD, y_TD
    part = partial.part
    summands: tuple[torch.Tensor | None, ...]
    if isinstance(part, Unsummed):
        summands = (part.out_PD, part.added_TD, part.weights_TN)
        stride, factor, count = 0, part.scale, part.weights_TN.shape[1]
    else:
        check_rows(h_TD, part)
        summands, stride, factor, count = (part, None, None), part.stride(0), 1.0, 0
    tile = whole_row(size)
    programs = min(rows, THREADS // (32 * tile["num_warps"]))
    once = rows <= peers.once
    rounds = peers.rounds[: peers.once] if once else peers.rounds[peers.once :]
    if once:
        tile["HELD"] = peers.ranks if peers.ranks <= 4 else 2 - peers.ranks % 2
    (_once_kernel if once else _twice_kernel)[(programs,)](
        h_TD, *summands, post_D, pre_D, out_TD, y_TD, peers.addresses_N, rounds, peers.stop,
        peers.rank, rows, h_TD.stride(0), stride, factor, *factors, eps,
        *(() if once else peers.places[:3]),
        RANKS=peers.ranks, SIZE=size, COUNT=count, SCALED=factor != 1.0,
        ROWS=peers.once if once else cdiv(peers.rows, peers.ranks), **tile, **pdl(h_TD),
    )  # fmt: skip
    return out_TD, y_TD


def _launch_sum_add_rmsnorm(
    h_TD: torch.Tensor, x_TD: Partial, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(h_TD, x_TD, None, weight_D, factors=(1.0, 1.0), eps=eps)


def _launch_sum_sandwich(
    h_TD: torch.Tensor,
    x_TD: Partial,
    post_D: torch.Tensor,
    pre_D: torch.Tensor,
    *,
    n: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(h_TD, x_TD, post_D, pre_D, factors=depth_factors(n), eps=eps)


sum_add_rmsnorm = op(reference=sum_add_rmsnorm_reference, kernel=_launch_sum_add_rmsnorm)
sum_sandwich = op(reference=sum_sandwich_reference, kernel=_launch_sum_sandwich)


def add_rmsnorm(
    h_TD: torch.Tensor, x_TD: Summand, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x, whether or not x is still to be summed over ranks, and its norm."""
    if isinstance(x_TD, Partial):
        return sum_add_rmsnorm(h_TD, x_TD, weight_D, eps=eps)
    return norm.add_rmsnorm(h_TD, x_TD, weight_D, eps=eps)


def sandwich(
    h_TD: torch.Tensor,
    x_TD: Summand,
    post_D: torch.Tensor,
    pre_D: torch.Tensor,
    *,
    n: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The n-th add of the norm of x to h, whether or not x is still to be summed, and the norm."""
    if isinstance(x_TD, Partial):
        return sum_sandwich(h_TD, x_TD, post_D, pre_D, n=n, eps=eps)
    return norm.sandwich(h_TD, x_TD, post_D, pre_D, n=n, eps=eps)
