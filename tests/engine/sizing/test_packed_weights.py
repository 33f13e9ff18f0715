"""Memory of multiplications with packed matrices: slabs cover a matrix, and only packed matrices need one."""

from __future__ import annotations

import random

from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.sizing.packed_weights import SLAB_BYTES, group_format, slab_rows, workspace_bytes
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats


def test_slabs_cover_a_matrix_in_equal_parts() -> None:
    draw = random.Random(1)
    for _ in range(300):
        outputs, inner, size = 64 * draw.randint(1, 3000), 128 * draw.randint(1, 400), draw.choice((2, 4))
        rows = slab_rows(outputs, inner, size, 64)
        slabs = -(-outputs // rows)
        assert rows % 64 == 0 and 0 < rows <= outputs
        assert rows * inner * size <= max(SLAB_BYTES, 64 * inner * size)
        assert (slabs - 1) * rows < outputs and slabs * rows - outputs < 64 * slabs  # the last one is about as large
    assert slab_rows(64, 1 << 20, 4, 64) == 64  # a tile is larger than the limit


def test_a_slab_is_counted_for_packed_formats() -> None:
    packed: list[StoredFormat] = [
        ON_LOAD["int4"], ON_LOAD["int8"], GroupFormat("uint8", 0, "float32", zero=True), GGUF_FORMATS["Q4_0"],
        GGUF_FORMATS["Q8_0"], GroupFormat("uint4", 128, "bfloat16", in_order_of="groups"),
    ]  # fmt: skip
    others: list[StoredFormat] = [
        ON_LOAD["fp8"], GGUF_FORMATS["Q4_K"], GroupFormat("uint4", 32, "e8m0"), GroupFormat("nf4", 64, "float32"),
        GroupFormat("uint4", 16, "float16", row_scale=True), GroupFormat("uint3", 64, "float16"),
    ]  # fmt: skip
    assert all(group_format(each) is not None for each in packed)
    assert all(group_format(each) is None for each in others)
    assert workspace_bytes(ALL_NUMBERS) == 0
    for stored in packed:
        assert workspace_bytes(WeightFormats.of({"layers.1.q.weight": stored})) == SLAB_BYTES
        assert workspace_bytes(WeightFormats.of({"layers.1.experts.0.up.weight": stored})) == 0
    for stored in others:
        assert workspace_bytes(WeightFormats.of({"layers.1.q.weight": stored})) == 0
