"""TFRecord files and ``tf.train.Example`` messages, read without TensorFlow.

A record is: its length (uint64, little-endian), the masked CRC-32C of these 8 bytes,
the payload, the masked CRC-32C of the payload. An Example is a protocol buffer:
``features`` (1) holds a map (1) of entries with a key (1) and a value (2), which is a
list of bytes (1), floats (2) or int64s (3), each of them field 1.
"""

import functools
import mmap
import os
from collections.abc import Container, Iterator
from typing import Any, BinaryIO

import numpy as np

from grain_sparsecore.errors import InputError

_HEADER = 12
_FOOTER = 4
_GZIP = b"\x1f\x8b"

# Castagnoli's polynomial, bits reversed; and the mask that TFRecord adds to a CRC.
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_ALL_ONES = 0xFFFFFFFF

# Bytes that one row of the vectorised CRC covers: 1 MiB is then 1,024 rows, which
# numpy works on at once, and as many steps to join them.
_CRC_BLOCK = 1024

# Wire types of protocol buffers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@functools.cache
def _crc_table() -> np.ndarray:
    """CRC of every 16-bit word, uint32 [65536]."""
    crc = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        crc = (crc >> 1) ^ np.where(crc & 1, _POLYNOMIAL, 0).astype(np.uint32)
    return crc


@functools.cache
def _crc_shift_tables() -> list[list[int]]:
    """What a block of zeros after it makes of each byte of a CRC."""
    table = _crc_table()
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(_CRC_BLOCK // 2):
        bits = table[bits & 0xFFFF] ^ (bits >> 16)
    tables = []
    for byte in range(4):
        values = np.zeros(256, np.uint32)
        for bit in range(8):
            values ^= np.where(np.arange(256) >> bit & 1, bits[8 * byte + bit], 0)
        tables.append(values.tolist())
    return tables


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of ``data``."""
    table = _crc_table()
    whole = len(data) // _CRC_BLOCK * _CRC_BLOCK
    crc = _ALL_ONES
    if whole:
        words = np.frombuffer(data[:whole], "<u2").reshape(-1, _CRC_BLOCK // 2)
        blocks = np.zeros(len(words), np.uint32)
        for column in np.ascontiguousarray(words.T):
            blocks = table[(blocks ^ column) & 0xFFFF] ^ (blocks >> 16)
        one, two, three, four = _crc_shift_tables()
        for block in blocks.tolist():
            # The CRC is linear: shift what came before over the block, and add.
            crc = (
                one[crc & 255]
                ^ two[crc >> 8 & 255]
                ^ three[crc >> 16 & 255]
                ^ four[crc >> 24]
                ^ block
            )
    byte_table = _byte_table()
    for byte in bytes(data[whole:]):
        crc = byte_table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ _ALL_ONES


@functools.cache
def _byte_table() -> list[int]:
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = (crc >> 1) ^ np.where(crc & 1, _POLYNOMIAL, 0).astype(np.uint32)
    return crc.tolist()


def masked_crc32c(data: bytes | memoryview) -> int:
    """The CRC as TFRecord stores it: rotated, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL_ONES


def index_records(path: str | os.PathLike[str]) -> np.ndarray:
    """Where the records of a file are, from their lengths alone.

    Returns:
        int64 [records, 2]: first byte and length of each payload.

    Raises:
        InputError: The file is no TFRecord file, is compressed, or ends too early.
    """
    size = os.path.getsize(path)
    places: list[tuple[int, int]] = []
    with open(path, "rb") as file:
        start = 0
        while start < size:
            file.seek(start)
            header = file.read(_HEADER)
            if start == 0 and header.startswith(_GZIP):
                raise InputError(
                    f"{path} is gzip-compressed, which rules out random access; "
                    "decompress it first."
                )
            length = int.from_bytes(header[:8], "little")
            if len(header) < _HEADER or int.from_bytes(
                header[8:], "little"
            ) != masked_crc32c(header[:8]):
                raise InputError(
                    f"{path}: record {len(places)} at byte {start} has no valid "
                    "header; this is no TFRecord file, or it is damaged."
                )
            places.append((start + _HEADER, length))
            start += _HEADER + length + _FOOTER
        if start > size:
            raise InputError(
                f"{path}: record {len(places) - 1} needs {start - size} more bytes "
                "than the file has; it was cut off."
            )
    return np.array(places, np.int64).reshape(-1, 2)


class TFRecordFile:
    """Random access to the payloads of one file; threads may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._places = index_records(path)
        self._map: mmap.mmap | None = None

    def __len__(self) -> int:
        return len(self._places)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "places": self._places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._places = state["path"], state["places"]
        self._map = None

    def __getitem__(self, index: int) -> bytes:
        """The payload of record ``index``, checked against its CRC.

        Raises:
            InputError: The payload is damaged.
        """
        start, length = (int(x) for x in self._places[index])
        if self._map is None:
            with open(self._path, "rb") as file:
                self._map = _memory_map(file)
        data = self._map[start : start + length]
        footer = self._map[start + length : start + length + _FOOTER]
        if int.from_bytes(footer, "little") != masked_crc32c(data):
            raise InputError(
                f"{self._path}: record {index} at byte {start} does not match its "
                "checksum; the file is damaged."
            )
        return data


def _memory_map(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def parse_example(
    payload: bytes, wanted: Container[str] | None = None
) -> dict[str, np.ndarray | list[bytes]]:
    """The features of a ``tf.train.Example``.

    Args:
        payload: The serialized message.
        wanted: Names of the features to decode; None decodes all.

    Returns:
        By name: int64 [n], float32 [n] or a list of n bytes. A feature without a
        value is an empty list.

    Raises:
        InputError: The message is damaged.
    """
    result: dict[str, np.ndarray | list[bytes]] = {}
    view = memoryview(payload)
    try:
        for features in _messages(view, 1):
            for entry in _messages(features, 1):
                key = b"".join(_messages(entry, 1)).decode()
                if wanted is None or key in wanted:
                    result[key] = _parse_feature(entry)
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise InputError(f"a record is no valid tf.train.Example: {error}") from error
    return result


def _parse_feature(entry: memoryview) -> np.ndarray | list[bytes]:
    values: np.ndarray | list[bytes] = []
    for feature in _messages(entry, 2):
        for kind, _, body in _fields(feature):
            if kind == 1:
                values = [bytes(item) for item in _messages(body, 1)]
            elif kind == 2:
                # Packed floats are one run of bytes, others a field each.
                values = np.frombuffer(b"".join(_raw(body)), "<f4")
            elif kind == 3:
                values = _varints(b"".join(_raw(body)))
    return values


def _messages(view: memoryview, number: int) -> Iterator[memoryview]:
    for field, wire, body in _fields(view):
        if field == number and wire == _BYTES:
            yield body


def _raw(view: memoryview) -> Iterator[memoryview]:
    for field, _, body in _fields(view):
        if field == 1:
            yield body


def _fields(view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Number, wire type and bytes of each field of a message."""
    at = 0
    while at < len(view):
        tag, at = _varint(view, at)
        wire = tag & 7
        if wire == _BYTES:
            length, at = _varint(view, at)
            end = at + length
        elif wire == _VARINT:
            end = _varint(view, at)[1]
        elif wire in (_FIXED64, _FIXED32):
            end = at + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"unknown wire type {wire}")
        if end > len(view):
            raise ValueError("a field is longer than its message")
        yield tag >> 3, wire, view[at:end]
        at = end


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _varints(data: bytes) -> np.ndarray:
    """All varints of ``data`` at once, as int64."""
    raw = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(raw < 128)
    if not len(last):
        if len(raw):
            raise ValueError("a number has no end")
        return np.zeros(0, np.int64)
    if last[-1] != len(raw) - 1:
        raise ValueError("a number has no end")
    first = np.zeros(len(last), np.int64)
    first[1:] = last[:-1] + 1
    place = np.arange(len(raw)) - np.repeat(first, last - first + 1)
    if place.max() > 9:
        raise ValueError("a number is longer than 64 bits")
    parts = (raw & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, first).view(np.int64)
