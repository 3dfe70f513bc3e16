"""Lists the files in a tar archive, with the place of their bytes.

Python's ``tarfile`` takes about 70 microseconds per member, because it makes a complete description
of each. A shard is listed for the names, the places and the sizes only.

Source: POSIX.1-2017, ``pax``, sections "ustar Interchange Format" and "pax Extended Header"; and
the GNU tar manual, "Basic Tar Format", for long names (type ``L``) and large sizes.
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_BLOCK = 512

# Types of members: a regular file (also with a zero byte in old archives), a header that describes
# the next member (pax), and the name of the next member (GNU).
_FILE, _OLD_FILE, _PAX, _LONG_NAME = b"0", b"\0", b"x", b"L"
# The target of the next link (GNU), and a header for all members (pax).
_SKIPPED = (b"K", b"g")
# Links, devices and folders have no bytes, whatever their header says.
_EMPTY = tuple(b"%d" % kind for kind in range(1, 7))

# A header or a label that is longer is damaged.
_LARGEST_TEXT = 1 << 20


class TarError(ValueError):
    """The bytes are not those of a tar archive."""


class Member(NamedTuple):
    """A regular file in an archive: its path, the position of its first byte, and its size."""

    name: str
    start: int
    size: int

    def content(self, archive: BinaryIO) -> bytes:
        """Return its bytes, which must be few."""
        return _text_at(archive, self.start, self.size)


def members(archive: BinaryIO) -> Iterator[Member]:
    """Yield the regular files of a tar archive that is not compressed, in their order."""
    end = archive.seek(0, 2)
    position = 0
    name: str | None = None
    size: int | None = None
    while position < end:
        archive.seek(position)
        header = archive.read(_BLOCK)
        if not header.strip(b"\0"):
            return  # Two blocks of zeros end an archive.
        if len(header) < _BLOCK:
            raise TarError(f"it ends within the header at byte {position}")
        if not _is_valid(header):
            raise TarError(f"no header of a member at byte {position}")
        kind, start = header[156:157], position + _BLOCK
        length = _number(header[124:136])
        if min(length, size or 0) < 0:  # The next member would be before this one, for ever.
            raise TarError(f"a negative size in the header at byte {position}")
        if kind == _PAX:
            described = _pax(_text_at(archive, start, length))
            name = described.get("path", name)
            size = int(described["size"]) if "size" in described else size
        elif kind == _LONG_NAME:
            name = _text_at(archive, start, length).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind not in _SKIPPED:
            length = length if size is None else size
            length = 0 if kind in _EMPTY else length
            if start + length > end:
                raise TarError(f"it ends within the member at byte {position}")
            if kind in (_FILE, _OLD_FILE):
                yield Member(_name(header) if name is None else name, start, length)
            name = size = None
        position = start + -(-length // _BLOCK) * _BLOCK


def _is_valid(header: bytes) -> bool:
    """Return whether the checksum is right: the sum of the bytes, with blanks in its own place."""
    try:
        expected = int(header[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        return False
    return expected == sum(header) - sum(header[148:156]) + 8 * ord(" ")


def _number(field: bytes) -> int:
    """Return a number: octal digits, or binary if the first bit is set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError as error:
        raise TarError(f"expected a number in a header, got {field!r}") from error


def _name(header: bytes) -> str:
    name = header[:100].rstrip(b"\0")
    prefix = header[345:500].rstrip(b"\0") if header[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _pax(text: bytes) -> dict[str, str]:
    """Return the records of an extended header, each of them ``length key=value`` and a newline."""
    records = {}
    while text:
        digits, blank, _ = text.partition(b" ")
        if not blank or not digits.isdigit() or not len(digits) < int(digits) <= len(text):
            raise TarError("an extended header is damaged")
        key, _, value = text[len(digits) + 1 : int(digits) - 1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        text = text[int(digits) :]
    return records


def _text_at(archive: BinaryIO, start: int, length: int) -> bytes:
    if length > _LARGEST_TEXT:
        raise TarError(f"expected at most {_LARGEST_TEXT} bytes of text at byte {start}")
    archive.seek(start)
    return archive.read(length)
