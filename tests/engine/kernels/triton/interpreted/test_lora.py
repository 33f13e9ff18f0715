"""Adapters' contributions by Triton: each row compared with products in float64, whatever adapters other rows have.

Values that must not be read are NaN: slots without an adapter, ranks beyond an adapter's, rows without one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from stoker_engine.kernels.bundle import GroupedLora
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.kernels.triton.lora.tiles import SPLIT, tile_rows

pytestmark = pytest.mark.usefixtures("batch_invariant_matmul")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Relative error of the terms of float32 sums.
SUMS = 2e-6
LORA: GroupedLora = TRITON.lora  # type: ignore[assignment]


@dataclass(frozen=True)
class Case:
    """An operation, the adapters in slots, and a step's rows.

    Attributes:
        widths: outputs of each part.
        ranks: of each slot, for each part; 0 if it is unchanged.
        slots: of each row.
        heads: of x and y; matrices A and B, per head or for all heads.
    """

    inner: int
    widths: tuple[int, ...]
    max_rank: int
    ranks: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    heads: int = 1
    own_a: bool = False
    own_b: bool = False


class Operands:
    """A case's tensors, seeded.

    Attributes:
        y: [rows, heads, outputs], a part of a wider tensor.
    """

    def __init__(self, case: Case, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        rows, slots, parts, outputs = len(case.slots), len(case.ranks), len(case.widths), sum(case.widths)
        heads_a, heads_b = case.heads if case.own_a else 1, case.heads if case.own_b else 1
        self.case, self.slots = case, torch.tensor(case.slots, dtype=torch.int64)
        self.wide = drawn(rows, case.heads, outputs + 5)
        self.y = self.wide[..., 2 : 2 + outputs]
        self.x = drawn(rows, case.heads, case.inner + 3)[..., 1 : 1 + case.inner]
        self.x[self.slots < 0] = torch.nan
        self.a = torch.full((slots, parts, heads_a, case.max_rank, case.inner), torch.nan, dtype=dtype)
        self.b = torch.full((slots, heads_b, outputs, case.max_rank), torch.nan, dtype=dtype)
        for slot, ranks in enumerate(case.ranks):
            first = 0
            for part, (rank, width) in enumerate(zip(ranks, case.widths, strict=True)):
                self.a[slot, part, :, :rank] = drawn(heads_a, rank, case.inner)
                self.b[slot, :, first : first + width, :rank] = drawn(heads_b, width, rank)
                first += width
        self.ranks = torch.tensor(case.ranks, dtype=torch.int32).view(slots, parts)
        size, first, tiles = LORA.output_tile(dtype), 0, list[tuple[int, int, int, int]]()
        for part, width in enumerate(case.widths):
            tiles += [(at, min(at + size, first + width), part, 0) for at in range(first, first + width, size)]
            first += width
        self.output_tiles = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)

    def added(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y of these rows only, computed in one batch, and the tensor that contains it."""
        wide = self.wide[chosen]
        y = wide[..., 2 : 2 + self.y.shape[2]]
        tiles = LORA.group(self.slots[chosen], len(self.ranks), self.a.dtype)
        LORA.expand(
            y, LORA.shrink(self.x[chosen], self.a, self.ranks, *tiles), self.b, self.ranks, self.output_tiles, *tiles
        )
        return y, wide

    def check(self, rng: random.Random) -> None:
        """Check that rows have their adapters' results, and the bits that they have in other batches."""
        all_rows = list(range(len(self.slots)))
        together, wide = self.added(all_rows)
        for outside in (slice(0, 2), slice(2 + self.y.shape[2], None)):
            assert torch.equal(wide[..., outside], self.wide[..., outside])
        for row, slot in enumerate(self.case.slots):
            if slot < 0:
                assert torch.equal(together[row], self.y[row])
                continue
            for head in range(self.case.heads):
                self._check_row(together[row, head], row, slot, head)
        for _ in range(3 if all_rows else 0):
            some = sorted(rng.sample(all_rows, rng.randint(1, len(all_rows))), key=lambda _: rng.random())
            assert torch.equal(self.added(some)[0], together[some])

    def _check_row(self, found: torch.Tensor, row: int, slot: int, head: int) -> None:
        x, first = self.x[row, head].double(), 0
        for part, (rank, width) in enumerate(zip(self.case.ranks[slot], self.case.widths, strict=True)):
            columns = slice(first, first + width)
            first += width
            before = self.y[row, head, columns].double()
            if not rank:
                assert torch.equal(found[columns].double(), before)
                continue
            a = self.a[slot, part, head if self.case.own_a else 0, :rank].double()
            b = self.b[slot, head if self.case.own_b else 0, columns, :rank].double()
            expected = before + (x @ a.T) @ b.T
            terms = (x.abs() @ a.abs().T) @ b.abs().T + before.abs()
            # The product with A is rounded, and the result too.
            rounding = torch.finfo(self.a.dtype).eps / 2 * 1.01
            near = rounding * ((x @ a.T).abs() @ b.abs().T + expected.abs()) + SUMS * terms + 1e-6
            assert ((found[columns].double() - expected).abs() <= near).all()


def mixes(slots: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Return slots of a step's rows: none; all of the base model; one adapter; all different; tiles that are exactly
    full or almost full; random ones.
    """
    full = tile_rows(torch.bfloat16)
    return [
        (),
        (-1,) * 3,
        (slots - 1,),
        tuple(range(slots)),
        (0,) * full + (-1,) * 2 + (slots - 1,) * (full + 1),
        tuple(rng.randrange(-1, slots) for _ in range(rng.randint(40, 90))),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_mixed_batches_equal_float64(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.choice([1, 3, 9])
    ranks = tuple((rng.choice([0, 1, 3, 8, 16]), rng.choice([1, 5, 16])) for _ in range(slots))
    for mix in mixes(slots, rng):
        Operands(Case(48, (40, 17), 16, ranks, mix), dtype, seed).check(rng)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inner", "widths", "max_rank"),
    [
        (1, (1,), 1),
        (7, (3, 130, 1), 7),
        (129, (64, 65), 33),
        (2 * SPLIT + 1, (5,), 8),
        pytest.param(SPLIT, (128,), 64, marks=pytest.mark.slow),
        pytest.param(SPLIT + 1, (129, 5), 100, marks=pytest.mark.slow),
        pytest.param(3 * SPLIT - 1, (257,), 64, marks=pytest.mark.slow),
    ],
)
def test_sizes_around_tiles_equal_float64(
    inner: int, widths: tuple[int, ...], max_rank: int, dtype: torch.dtype
) -> None:
    rng = random.Random(inner)
    ranks = [tuple(rng.randint(1, max_rank) for _ in widths) for _ in range(2)]
    ranks.append((max_rank,) * len(widths))
    Operands(Case(inner, widths, max_rank, tuple(ranks), (2, 0, -1, 1, 2)), dtype).check(rng)


def test_outputs_between_parts_are_unchanged() -> None:
    """Outputs between parts have no rows in B, even if outputs before them have."""
    operands = Operands(Case(48, (150, 40), 8, ((8, 3),), (0, -1, 0)), torch.float32)
    expected, _ = operands.added([0, 1, 2])
    tiles, y = operands.output_tiles, operands.y.new_zeros(3, 1, 7 + 150 + 9 + 40)
    changed = torch.tensor([*range(7, 157), *range(166, 206)])
    y[..., changed] = operands.y
    moved = torch.where(tiles[:, 2:3] == 0, 7, 16)
    operands.output_tiles = torch.cat([tiles[:, :2] + moved, tiles[:, 2:3], -moved], dim=1).int()
    operands.wide, operands.y = torch.nn.functional.pad(y, (2, 3)), y
    found, _ = operands.added([0, 1, 2])
    assert torch.equal(found[..., changed], expected)
    found[..., changed] = 0
    assert not found.any()


@pytest.mark.parametrize("own_a", [False, True])
@pytest.mark.parametrize("own_b", [False, True])
def test_matrices_may_be_per_head_or_shared(own_a: bool, own_b: bool) -> None:
    """As in latent attention: one matrix for all heads, and one per head."""
    case = Case(33, (20,), 5, ((3,), (5,)), (1, -1, 0, 1), heads=3, own_a=own_a, own_b=own_b)
    for dtype in DTYPES:
        Operands(case, dtype).check(random.Random(0))


def test_float32_outputs_keep_their_precision() -> None:
    """A router's outputs are float32."""
    case = Case(48, (9,), 8, ((8,),), (0, -1, 0))
    operands, exact = Operands(case, torch.bfloat16), Operands(case, torch.bfloat16)
    for each in (operands, exact):
        each.wide = each.wide.float() + 2**-12
        each.y = each.wide[..., 2 : 2 + 9]
    operands.check(random.Random(0))
    assert torch.equal(operands.added([0, 1, 2])[0][1], exact.y[1])


def test_overflow_of_an_adapter_affects_no_other_row() -> None:
    case = Case(48, (9,), 8, ((8,), (8,)), (0, 1, -1, 1))
    operands, plain = Operands(case, torch.float16), Operands(case, torch.float16)
    operands.a[0] = 6e4
    operands.x[0] = 6e4
    found, expected = (each.added([0, 1, 2, 3])[0] for each in (operands, plain))
    assert not found[0].isfinite().all()
    assert torch.equal(found[1:], expected[1:])
