"""Storage formats of quantized matrices.

A row (the elements along a matrix's inner dimension) is a sequence of blocks. Each block has shared parameters, such as
a scale, and a code for each element. Blocks never cross a row's end, so rows can be reordered and split across ranks
without decoding them.

    a row of GGUF's Q8_0     │ d q q … q │ d q q … q │ …      blocks as in the file
    a row in groups          │ s z c c … c │ s z c c … c │ …  w = (c - z) × s: common form of GPTQ, AWQ, FP8 …
                                                              (order of the bytes: `kernels.group_blocks`)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Literal


@dataclass(frozen=True)
class GGUFFormat:
    """One of ggml's types.

    Attributes:
        name: ggml's name of the type.
        numbers: elements per block.
        bytes: bytes per block.
    """

    name: str
    numbers: int
    bytes: int

    @property
    def column_multiple(self) -> int:
        """Number of columns at multiples of which rows can be split."""
        return self.numbers

    def row_bytes(self, inner: int) -> int:
        """Return the bytes of a row of `inner` elements, which fill whole blocks."""
        return inner // self.numbers * self.bytes

    def order_bytes(self, inner: int) -> int:
        """See `GroupFormat`."""
        return 0

    def matrix_bytes(self, rows: int, inner: int) -> int:
        """Return the bytes of a matrix of `rows` rows of `inner` elements."""
        return rows * self.row_bytes(inner)


#: A float16 scale and 32 8-bit integers.
Q8_0: Final = GGUFFormat("Q8_0", 32, 34)

#: Formats with GEMM kernels, by name; tensors of other types are dequantized on load.
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

#: Encoding of an element. Unsigned integers are relative to a zero point: the group's own, or half of their range.
#: ``int8`` is signed. ``fp8_e4m3``, ``fp8_e5m2`` and ``fp4`` (the e2m1 of MXFP4 and NVFP4) are OCP's; ``nf4`` is
#: bitsandbytes'.
Code = Literal["uint2", "uint3", "uint4", "uint8", "int8", "fp8_e4m3", "fp8_e5m2", "fp4", "nf4"]

#: Dtype of a group's scale; ``e8m0`` is a power of two in one byte.
Scale = Literal["float32", "float16", "bfloat16", "e8m0", "fp8_e4m3"]

_CODE_BITS: Final[dict[Code, int]] = {
    "uint2": 2, "uint3": 3, "uint4": 4, "uint8": 8, "int8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp4": 4, "nf4": 4,
}  # fmt: skip
_SCALE_BYTES: Final[dict[Scale, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "e8m0": 1, "fp8_e4m3": 1}

#: Codes are stored in units of this many elements; the last unit of a row is padded.
UNIT: Final = 32

#: Maximum group size in elements: more than any row has, and within the range of the kernels' integers.
LARGEST_GROUP: Final = 1_000_000


@dataclass(frozen=True)
class GroupFormat:
    """Elements in groups that share a scale.

    Attributes:
        code: encoding of each element.
        group: elements per scale, a multiple of 16, at most `LARGEST_GROUP`; 0: the whole row.
        scale: dtype of the scales.
        zero: whether each group has its own zero point, one byte.
        row_scale: whether each row starts with a float32 factor of all its scales (NVFP4).
        in_order_of: "groups": the matrix's columns are stored in the order of the groups, whose columns need not be
            adjacent in the matrix (GPTQ's ``desc_act``); an additional weight holds the column order.
        quantized_activations: whether kernels may also round activations to the type of the codes, with a scale for
            each token or group. Only with the codes ``fp8_e4m3`` and ``int8``.
    """

    code: Code
    group: int
    scale: Scale
    zero: bool = False
    row_scale: bool = False
    in_order_of: Literal["columns", "groups"] = "columns"
    quantized_activations: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.group <= LARGEST_GROUP or self.group % 16:
            raise ValueError(f"no format has groups of {self.group}")

    @property
    def name(self) -> str:
        """Name for messages."""
        group = f"groups of {self.group}" if self.group else "rows"
        return f"{self.code} in {group}"

    @property
    def bits(self) -> int:
        """Bits per element's code."""
        return _CODE_BITS[self.code]

    @property
    def header_bytes(self) -> int:
        """Bytes of a group's scale and zero point."""
        return _SCALE_BYTES[self.scale] + self.zero

    @property
    def column_multiple(self) -> int:
        """Number of columns at multiples of which rows can be split."""
        return self.group or 1

    def for_rows(self, inner: int) -> GroupFormat:
        """Return the format for rows of `inner` elements: if a group covers the whole row, the group size is 0, and
        16-bit scales become float32 where torch's FP8 GEMM, which requires that, may be used."""
        if 0 < self.group < inner:
            return self
        is_fp8 = self.quantized_activations and self.code == "fp8_e4m3"
        is_widened = is_fp8 and self.scale in ("float16", "bfloat16")
        return replace(self, group=0, in_order_of="columns", scale="float32" if is_widened else self.scale)

    def groups(self, inner: int) -> int:
        """Return the number of groups in a row of `inner` elements; the last may be smaller."""
        return -(-inner // self.group) if self.group else 1

    def row_bytes(self, inner: int) -> int:
        """Return the bytes of a row of `inner` elements, padded to whole units of codes."""
        codes = -(-inner // UNIT) * UNIT * self.bits // 8
        return 4 * self.row_scale + self.groups(inner) * self.header_bytes + codes

    def order_bytes(self, inner: int) -> int:
        """Return the bytes of the column order, int32; 0 if the columns are in the matrix's order."""
        return 4 * inner if self.in_order_of == "groups" else 0

    def matrix_bytes(self, rows: int, inner: int) -> int:
        """Return the bytes of a matrix of `rows` rows of `inner` elements, including its column order."""
        return rows * self.row_bytes(inner) + self.order_bytes(inner)


@dataclass(frozen=True)
class FileFormat(GroupFormat):
    """A format as in files and in other engines, used to compute sizes. Rows may share scales, and `row_scale` is a
    single factor for the whole matrix.

    Attributes:
        rows: rows per scale; 0: all.
    """

    rows: int = 1

    @property
    def block(self) -> tuple[int, int]:
        """Numbers of rows and of columns that share a scale and cannot be split; 1 where all rows or columns share one,
        since they can be split anywhere."""
        return self.rows or 1, self.group or 1

    @property
    def column_multiple(self) -> int:
        """1, because other engines split rows evenly, or reject a split that `block` does not allow."""
        return 1

    def matrix_bytes(self, rows: int, inner: int) -> int:
        """See `GroupFormat`; scales that rows share are counted once."""
        scales = self.groups(inner) * self.header_bytes * (-(-rows // self.rows) if self.rows else 1)
        return 4 * self.row_scale + scales + rows * -(-inner * self.bits // 8) + self.order_bytes(inner)

    @classmethod
    def of(cls, stored: GroupFormat, rows: int) -> FileFormat:
        """Return the file format of a matrix that Stoker's engine stores as `stored`."""
        return cls(**{each.name: getattr(stored, each.name) for each in fields(stored)}, rows=rows)


StoredFormat = GGUFFormat | GroupFormat
