"""Character vectors out of R's lazy-load data files (.rdb), as far as packages of plain text need it.

The file is a row of records: a big-endian uint32 with the length of what follows once unpacked, then a zlib stream.
Each unpacks to one object in R's XDR serialization: an X, a line break, a version, and then for a character vector the
type 16, its length, and for each string flags, its length in bytes (-1 = missing) and the bytes.
Source: "R Internals", section 1.8 (serialization formats).
"""

import struct
import zlib

_HEADER = b"X\n"
_CHARACTER_VECTOR = 16
_STRING = 9
_TYPE_MASK = 0xFF
_LATIN1_FLAG = 1 << 14


def string_vectors(data: bytes) -> list[list[str]]:
    """The character vectors that a file holds, in its order; a missing string becomes an empty one.

    Raises:
        ValueError: the file is cut off, or holds something else.
    """
    vectors = []
    while data:
        stream = zlib.decompressobj()
        try:
            (length,) = struct.unpack_from(">I", data)
            record = stream.decompress(data[4:])
        except (struct.error, zlib.error) as error:
            raise ValueError(f"no R data file: {error}") from error
        if len(record) != length or not stream.eof:
            raise ValueError(f"an R data file that is cut off: a record has {len(record)} of {length} bytes")
        vectors.append(_strings(record))
        data = stream.unused_data
    return vectors


def _strings(record: bytes) -> list[str]:
    try:
        (version,) = struct.unpack_from(">i", record, len(_HEADER))
        offset = len(_HEADER) + 12  # the version of the format, of the R that wrote, of the oldest R that reads
        if version == 3:
            (encoding_length,) = struct.unpack_from(">i", record, offset)
            offset += 4 + encoding_length
        kind, count = struct.unpack_from(">ii", record, offset)
        if not record.startswith(_HEADER) or kind & _TYPE_MASK != _CHARACTER_VECTOR:
            raise ValueError("an R object that is no character vector")
        offset += 8
        strings = []
        for _ in range(count):
            flags, length = struct.unpack_from(">ii", record, offset)
            if flags & _TYPE_MASK != _STRING:
                raise ValueError("an R character vector with something else in it")
            offset += 8
            text = record[offset : offset + max(length, 0)]
            strings.append(text.decode("latin-1" if flags & _LATIN1_FLAG else "utf-8"))
            offset += len(text)
    except struct.error as error:
        raise ValueError(f"an R object that is cut off: {error}") from error
    return strings
