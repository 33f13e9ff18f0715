"""Weights in groups that share a scale: codes, scales and zero points of a row in one run of bytes.

    a row     │ r │ s z c c … c │ s z c c … c │ …        w = r × s × (value of c - z)
                  └── a group ──┘

    r    the row's own scale, a float32, where the format has one
    s    the group's scale
    z    its zero point, a byte, where the format has one; else codes of unsigned integers mean c - 2^(bits - 1)
    c    codes in units of 32 numbers, n0 … n31; where groups have 16, two groups' headers come before their unit:
         │ s z s z c … c │. The last unit of a row is filled up with codes of 0.

         8 bits   a byte each
         4 bits   16 bytes, byte i holds n(i) in its low half and n(i+16) in its high half
         3 bits   12 bytes, little-endian: bits 3i … 3i + 2 are n(i)
         2 bits   8 bytes, byte i holds n(i), n(i+8), n(i+16), n(i+24) from its low bits up

The value of a code: of integers themselves; OCP's FP8 (Micikevicius et al., 2022) and FP4 (e2m1: 0 .5 1 1.5 2 3 4 6,
the high bit the sign); of nf4 the 16 quantiles of QLoRA (Dettmers et al., 2023).
"""
