"""How the numbers of a matrix may be stored, other than as numbers of the model's dtype.

A row (the numbers along a matrix's inner dimension) is a sequence of blocks, each with what its numbers share and a
code for each number. No block reaches into the next row, so rows can be moved about and shared out as they are.

    a row of GGUF's Q8_0     │ d q q … q │ d q q … q │ …      blocks as the file holds them
    a row in groups          │ s z c c … c │ s z c c … c │ …  w = (c - z) × s: what GPTQ, AWQ, FP8 … come down to
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal


@dataclass(frozen=True)
class GGUFFormat:
    """One of ggml's types.

    Attributes:
        name: ggml's name of it.
        numbers: so many make a block.
        bytes: that it takes.
    """

    name: str
    numbers: int
    bytes: int

    @property
    def column_multiple(self) -> int:
        """Rows can be cut at multiples of it."""
        return self.numbers

    def row_bytes(self, inner: int) -> int:
        """What a row of `inner` numbers, whole blocks, takes."""
        return inner // self.numbers * self.bytes

    def order_bytes(self, inner: int) -> int:
        """See `GroupFormat`."""
        return 0

    def matrix_bytes(self, rows: int, inner: int) -> int:
        """What a matrix of `rows` rows of `inner` numbers takes."""
        return rows * self.row_bytes(inner)


#: A float16 scale and 32 integers of 8 bits.
Q8_0: Final = GGUFFormat("Q8_0", 32, 34)

#: Those that are computed with as they are, by name; files' other types are dequantized when they are loaded.
GGUF_FORMATS: Final = {
    each.name: each
    for each in (
        GGUFFormat("Q4_0", 32, 18),
        GGUFFormat("Q4_1", 32, 20),
        GGUFFormat("Q5_0", 32, 22),
        GGUFFormat("Q5_1", 32, 24),
        Q8_0,
        GGUFFormat("Q2_K", 256, 84),
        GGUFFormat("Q3_K", 256, 110),
        GGUFFormat("Q4_K", 256, 144),
        GGUFFormat("Q5_K", 256, 176),
        GGUFFormat("Q6_K", 256, 210),
        GGUFFormat("IQ4_NL", 32, 18),
        GGUFFormat("IQ4_XS", 256, 136),
        GGUFFormat("MXFP4", 32, 17),
        GGUFFormat("F16", 1, 2),
        GGUFFormat("BF16", 1, 2),
    )
}

#: What a number is stored as. Unsigned integers mean their distance from a zero point: the group's own, or half of
#: their range. ``int8`` is signed. ``fp8_e4m3`` and ``fp8_e5m2`` are OCP's, as is ``fp4``, the e2m1 of MXFP4 and NVFP4;
#: ``nf4`` is bitsandbytes'.
Code = Literal["uint2", "uint3", "uint4", "uint8", "int8", "fp8_e4m3", "fp8_e5m2", "fp4", "nf4"]

#: What a group's scale is stored as; ``e8m0`` is a power of two in a byte.
Scale = Literal["float32", "float16", "bfloat16", "e8m0", "fp8_e4m3"]

_CODE_BITS: Final[dict[Code, int]] = {
    "uint2": 2, "uint3": 3, "uint4": 4, "uint8": 8, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp4": 4, "nf4": 4,
}  # fmt: skip
_SCALE_BYTES: Final[dict[Scale, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "e8m0": 1, "fp8_e4m3": 1}

#: Codes come in units of so many numbers; the last one of a row is filled up.
UNIT: Final = 32

#: More numbers than rows of matrices have. Kernels count with as many.
LARGEST_GROUP: Final = 1_000_000


@dataclass(frozen=True)
class GroupFormat:
    """Numbers in groups that share a scale. Its bytes are drawn in `kernels.group_blocks`.

    Attributes:
        code: what each number is stored as.
        group: numbers that share a scale, a multiple of 16, at most `LARGEST_GROUP`; 0: those of a row.
        scale: what the scale is stored as.
        zero: whether each group has a zero point of its own, a byte.
        row_scale: whether each row begins with a float32 by which all its scales are multiplied (NVFP4).
        in_order_of: "groups": numbers of a group need not follow each other in the matrix; its columns are stored in
            another order (GPTQ's ``desc_act``), and a further weight says which.
    """

    code: Code
    group: int
    scale: Scale
    zero: bool = False
    row_scale: bool = False
    in_order_of: Literal["columns", "groups"] = "columns"

    def __post_init__(self) -> None:
        if not 0 <= self.group <= LARGEST_GROUP or self.group % 16:
            raise ValueError(f"no format has groups of {self.group}")

    @property
    def name(self) -> str:
        """For people."""
        group = f"groups of {self.group}" if self.group else "rows"
        return f"{self.code} in {group}"

    @property
    def bits(self) -> int:
        """Of a number's code."""
        return _CODE_BITS[self.code]

    @property
    def header_bytes(self) -> int:
        """Of a group's scale and zero point."""
        return _SCALE_BYTES[self.scale] + self.zero

    @property
    def column_multiple(self) -> int:
        """Rows can be cut at multiples of it."""
        return self.group or 1

    def for_rows(self, inner: int) -> GroupFormat:
        """The same, of rows of `inner` numbers: a group that would reach to a row's end or beyond is the row."""
        return self if 0 < self.group < inner else replace(self, group=0, in_order_of="columns")

    def groups(self, inner: int) -> int:
        """Groups in a row of `inner` numbers; the last may be smaller."""
        return -(-inner // self.group) if self.group else 1

    def row_bytes(self, inner: int) -> int:
        """What a row of `inner` numbers takes. Whole units of codes: what is stored is padded to them."""
        codes = -(-inner // UNIT) * UNIT * self.bits // 8
        return 4 * self.row_scale + self.groups(inner) * self.header_bytes + codes

    def order_bytes(self, inner: int) -> int:
        """What a matrix needs beside its rows: the order of its columns, where that is another, as int32."""
        return 4 * inner if self.in_order_of == "groups" else 0

    def matrix_bytes(self, rows: int, inner: int) -> int:
        """What a matrix of `rows` rows of `inner` numbers takes."""
        return rows * self.row_bytes(inner) + self.order_bytes(inner)


@dataclass(frozen=True)
class FileFormat(GroupFormat):
    """The same as files and other engines hold it, for sums of sizes: rows may share scales, and what `row_scale` is
    for each row in our engine is one of the whole matrix.

    Attributes:
        rows: that share each scale; 0: all.
    """

    rows: int = 1

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, and so cannot be parted."""
        return self.rows or 1, self.group or 1

    @property
    def column_multiple(self) -> int:
        """Other engines part rows evenly, or refuse to (`block`)."""
        return 1

    def matrix_bytes(self, rows: int, inner: int) -> int:
        """See `GroupFormat`; what rows share is counted once."""
        scales = self.groups(inner) * self.header_bytes * (-(-rows // self.rows) if self.rows else 1)
        return 4 * self.row_scale + scales + rows * -(-inner * self.bits // 8) + self.order_bytes(inner)

    @classmethod
    def of(cls, stored: GroupFormat, rows: int) -> FileFormat:
        """Of a matrix that our engine stores as `stored`."""
        return cls(stored.code, stored.group, stored.scale, stored.zero, stored.row_scale, stored.in_order_of, rows)


StoredFormat = GGUFFormat | GroupFormat
