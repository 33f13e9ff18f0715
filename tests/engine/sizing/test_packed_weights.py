"""Memory of multiplications with packed matrices: slabs cover a matrix, and only packed matrices need one."""

from __future__ import annotations

import random

from stoker_engine.architectures.quantization.on_load import ON_LOAD
from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.sizing.packed_weights import SLAB_BYTES, formats_on_gpus, is_packed, slab_rows, workspace_bytes
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
        GGUF_FORMATS["Q8_0"], GGUF_FORMATS["Q4_K"], GroupFormat("uint4", 128, "bfloat16", in_order_of="groups"),
        GroupFormat("fp4", 32, "e8m0"), GroupFormat("fp4", 16, "fp8_e4m3", row_scale=True),
    ]  # fmt: skip
    others: list[StoredFormat] = [
        ON_LOAD["fp8"], GGUF_FORMATS["Q3_K"], GroupFormat("uint4", 32, "e8m0"), GroupFormat("nf4", 64, "float32"),
        GroupFormat("uint4", 16, "float16", row_scale=True), GroupFormat("uint3", 64, "float16"), GGUF_FORMATS["BF16"],
    ]  # fmt: skip
    assert workspace_bytes(ALL_NUMBERS) == 0
    for stored in (*packed, *others):
        assert is_packed(stored) == (stored in packed)
        for name in ("layers.1.q.weight", "layers.1.experts.0.up.weight", "lm_head.weight"):
            counted = workspace_bytes(WeightFormats.of({name: stored}))
            assert counted == (SLAB_BYTES if stored in packed else 0)


def test_gpus_keep_the_types_of_gguf_that_they_pack() -> None:
    kept, other = GGUF_FORMATS["Q4_K"], GGUF_FORMATS["Q3_K"]
    found = formats_on_gpus(
        WeightFormats.of(
            {
                "embed.weight": GGUF_FORMATS["Q6_K"],
                "lm_head.weight": GGUF_FORMATS["IQ4_XS"],
                "layers.0.q.weight": kept,
                "layers.0.v_b.weight": kept,
                "layers.0.k.weight": other,
                **{f"layers.0.experts.{e}.{part}.weight": kept for e in range(3) for part in ("gate", "up", "down")},
                **{f"layers.1.experts.0.{part}.weight": kept for part in ("gate", "up")},
                "layers.1.experts.0.down.weight": other,
                "layers.2.experts.0.gate.weight": GGUF_FORMATS["Q6_K"],
                **{f"layers.2.experts.0.{part}.weight": kept for part in ("up", "down")},
                "layers.2.shared.up.weight": kept,
            }
        )
    )
    assert found.ends == {("embed", GGUF_FORMATS["Q6_K"])}
    assert found.layers == (
        {("q", kept), ("experts.gate", kept), ("experts.up", kept), ("experts.down", kept)},
        set(),
        {("shared.up", kept)},
    )
