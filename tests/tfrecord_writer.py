"""Writes TFRecord files of ``tf.train.Example`` messages without TensorFlow."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grain_sparsecore.tfrecord import masked_crc32c


def write_records(path: Path, payloads: Iterable[bytes]) -> Path:
    with open(path, "wb") as file:
        for payload in payloads:
            header = struct.pack("<Q", len(payload))
            file.write(header + struct.pack("<I", masked_crc32c(header)))
            file.write(payload + struct.pack("<I", masked_crc32c(payload)))
    return path


def encode_example(features: Mapping[str, Any]) -> bytes:
    """Integer arrays, float arrays and (lists of) bytes become the three kinds."""
    return _message(
        1,
        b"".join(
            _message(1, _message(1, name.encode()) + _message(2, _feature(value)))
            for name, value in features.items()
        ),
    )


def _feature(value: Any) -> bytes:
    if isinstance(value, bytes):
        value = [value]
    if isinstance(value, list):
        return _message(1, b"".join(_message(1, item) for item in value))
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return _message(2, _message(1, array.astype("<f4").tobytes()))
    # Two's complement in 64 bits, as protocol buffers have negative numbers.
    numbers = b"".join(_varint(int(x) & (1 << 64) - 1) for x in array.flat)
    return _message(3, _message(1, numbers))


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
