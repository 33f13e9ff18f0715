"""Makes a shared library hollow: it can be found, mapped and linked against as before, but contains no code.

`libtorch_cuda.so` is linked against a dozen of NVIDIA's libraries, so the dynamic loader needs them even without a GPU,
when none of their functions is ever called. It only reads their symbol tables, not the 2 GB of code for GPUs. Therefore
each segment is kept up to the last of the loader's tables. The rest becomes zeros that take no space in the file.

Source: the System V ABI, "Section Header", "Program Header" and "Dynamic Section"; glibc's elf/dl-map-segments.h for
segments that are larger than their part of the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_ENTRY = struct.Struct("<qQ")
_PAGE = 4096

_LOAD, _DYNAMIC = 1, 2
#: Types of sections that the loader reads: string tables, hashes, the dynamic section, symbols, versions. (String
#: tables that the loader does not read are in no segment, and have no address.)
_TABLES = {3, 5, 6, 11, 0x6FFFFFF6, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF}
#: Tags of code and relocations: DT_INIT and DT_FINI are replaced by an unknown tag, which loaders ignore; sizes are
#: set to 0.
_FUNCTIONS, _UNKNOWN = {12, 13}, 0x6000000E
_SIZES = {2, 8, 18, 27, 28, 33, 35, 0x6FFFFFF9, 0x6FFFFFFA}


@dataclass(frozen=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_size: int
    size: int
    align: int

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.file_size


def hollow(library: Path) -> None:
    """Replace a library by a hollow one, as a new file: other hard links keep the original.

    Raises:
        ValueError: the file is not a 64-bit little-endian ELF library, or has no sections.
    """
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is not a 64-bit little-endian ELF file")
    header = list(_HEADER.unpack_from(data))
    at, sections_at, count, sections = header[5], header[6], header[10], header[12]
    segments = [_Segment(*_SEGMENT.unpack_from(data, at + number * _SEGMENT.size)) for number in range(count)]
    tables = [
        (address, address + size)
        for number in range(sections)
        for _, kind, _, address, _, size, *_ in [_SECTION.unpack_from(data, sections_at + number * _SECTION.size)]
        if kind in _TABLES and address
    ]
    dynamic = next((each for each in segments if each.kind == _DYNAMIC), None)
    if dynamic is None or not tables:
        raise ValueError(f"{library} is not a shared library with sections")

    out = bytearray(at + count * _SEGMENT.size)
    moved: list[_Segment] = []
    for each in segments:
        if each.kind != _LOAD:
            moved.append(each)
            continue
        kept = max((end - each.address for begin, end in tables if each.holds(begin)), default=0)
        if kept and each.offset == 0:  # the segment starts with the headers, which are written last
            out[:kept] = data[: max(kept, len(out))]
            moved.append(replace(each, file_size=len(out), align=_PAGE))
            continue
        out.extend(bytes((each.address - len(out)) % _PAGE))
        moved.append(replace(each, offset=len(out), file_size=kept, align=_PAGE))
        out.extend(data[each.offset : each.offset + kept])

    def offset_of(address: int) -> int:
        return next(
            each.offset + address - each.address for each in moved if each.kind == _LOAD and each.holds(address)
        )

    moved = [replace(each, offset=offset_of(each.address)) if each.kind == _DYNAMIC else each for each in moved]
    for number in range(dynamic.file_size // _ENTRY.size):
        tag, value = _ENTRY.unpack_from(data, dynamic.offset + number * _ENTRY.size)
        new = (_UNKNOWN, value) if tag in _FUNCTIONS else (tag, 0) if tag in _SIZES else (tag, value)
        _ENTRY.pack_into(out, offset_of(dynamic.address) + number * _ENTRY.size, *new)
    for number, each in enumerate(moved):
        _SEGMENT.pack_into(out, at + number * _SEGMENT.size, *vars(each).values())
    header[6], header[12], header[13] = 0, 0, 0  # no sections: the loader does not need them
    _HEADER.pack_into(out, 0, *header)

    whole = library.with_name(f".{library.name}.hollow")
    whole.write_bytes(out)
    whole.chmod(library.stat().st_mode & 0o777)
    whole.replace(library)
