"""The text format of Criteo's click logs (the Kaggle challenge and the 1 TB logs).

A line holds 40 columns between tabs: a label 0 or 1, 13 integers, and 26 categories of
up to 8 hexadecimal digits. Any but the label may be blank.

- Integers become ``dense``: float32 log(1 + x), with 0 for blank and negative ones.
- Category i is read by features with ``ids = "Ci"``, as the number that its digits
  spell, and 2 ** 32 where it is blank, so that "missing" has a row of its own. It is
  mapped by ``hash_ids(number, vocabulary_size=..., seed=hash_seed)`` onto the table of
  the feature; or by the feature itself, if that says ``hash = true``.
"""

import bisect
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sparsecore.config import (
    CRITEO_CATEGORIES,
    DENSE_KEY,
    Config,
    CriteoOptions,
)
from grain_sparsecore.errors import InputError
from grain_sparsecore.hashing import hash_ids
from grain_sparsecore.sources.gzipped import decompressed
from grain_sparsecore.sources.opened import OpenedSource
from grain_sparsecore.sources.paths import expand_paths
from grain_sparsecore.sources.samples import put
from grain_sparsecore.sources.text_lines import TextLines

# The number of a blank category: one more than 8 hexadecimal digits can spell.
MISSING_CATEGORY = 2**32

_NUM_INTEGERS = 13
_NUM_COLUMNS = 1 + _NUM_INTEGERS + len(CRITEO_CATEGORIES)
_SUFFIXES = (".txt", ".tsv", ".gz")

# Up to 18 digits fit int64.
_LABEL, _INTEGER, _CATEGORY = rb"[01]", rb"(?:-?\d{1,18})?", rb"[0-9a-fA-F]{0,8}"
_PATTERNS = (
    _LABEL,
    *[_INTEGER] * _NUM_INTEGERS,
    *[_CATEGORY] * len(CRITEO_CATEGORIES),
)
_LINE = re.compile(rb"\t".join(_PATTERNS))


class CriteoSource:
    """Lines as samples, before logarithms and hashes: int64 values and the label."""

    def __init__(
        self, files: Sequence[TextLines], *, label: str, categories: Sequence[str]
    ) -> None:
        self._files = list(files)
        self._ends = list(itertools.accumulate(len(file) for file in files))
        self._label = label
        self._columns = [
            (name, 1 + _NUM_INTEGERS + CRITEO_CATEGORIES.index(name))
            for name in categories
        ]
        # A wrong format or a cut off file shows at once, not in the middle of a job.
        for end, file in zip(self._ends, self._files, strict=True):
            for index in {end - len(file), end - 1} if len(file) else ():
                self[index]

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"CriteoSource({self._files[0].path}{more})"

    def __getitem__(self, index: Any) -> dict[str, Any]:
        index = int(index)
        file_number = bisect.bisect_right(self._ends, index)
        file = self._files[file_number]
        line_number = index - (self._ends[file_number] - len(file))
        line = file[line_number]
        if _LINE.fullmatch(line) is None:
            raise InputError(_describe(file, line_number, line.split(b"\t")))
        values = line.split(b"\t")
        integers = [int(x) if x else 0 for x in values[1 : 1 + _NUM_INTEGERS]]
        sample: dict[str, Any] = {DENSE_KEY: np.array(integers, np.int64)}
        for name, i in self._columns:
            value = values[i]
            sample[name] = np.int64(int(value, 16) if value else MISSING_CATEGORY)
        put(sample, self._label, np.float32(values[0]))
        return sample


def _describe(file: TextLines, line: int, values: Sequence[bytes]) -> str:
    where = file.where(line)
    if len(values) != _NUM_COLUMNS:
        text = (
            f"{where}: {len(values)} columns instead of {_NUM_COLUMNS} (label, "
            f"{_NUM_INTEGERS} integers, {len(CRITEO_CATEGORIES)} categories, with tabs "
            "between them)."
        )
        if file.is_cut_off(line):
            return f"{text} The line has no end: the file seems to be cut off."
        if len(values) == _NUM_COLUMNS - 1:
            return f"{text} Lines without a label, as in a test set, cannot be used."
        return text
    names = ["label", *(f"I{i}" for i in range(1, 14)), *CRITEO_CATEGORIES]
    meaning = {
        _LABEL: "0 or 1",
        _INTEGER: "blank or an integer",
        _CATEGORY: "blank or up to 8 hexadecimal digits",
    }
    i = next(i for i, v in enumerate(values) if re.fullmatch(_PATTERNS[i], v) is None)
    return (
        f"{where}: column {i + 1} ({names[i]}) is {values[i]!r}; it must be "
        f"{meaning[_PATTERNS[i]]}."
    )


def _finish(
    element: Mapping[str, Any], *, sizes: Mapping[str, int | None], seed: int
) -> dict[str, Any]:
    """Logarithms and hashes of a sample or a batch.

    Args:
        element: From `CriteoSource`, batched or not.
        sizes: By category, the vocabulary that it is hashed onto; None leaves it.
        seed: Of the hash.
    """
    done = dict(element)
    done[DENSE_KEY] = np.log1p(np.maximum(element[DENSE_KEY], 0)).astype(np.float32)
    for name, size in sizes.items():
        if size is not None:
            ids = hash_ids(np.asarray(element[name]), vocabulary_size=size, seed=seed)
            done[name] = ids[()]  # a scalar stays one
    return done


def open_criteo(config: Config, options: CriteoOptions) -> OpenedSource:
    """Opens the source of kind ``criteo_tsv``.

    Raises:
        ConfigError: A file is missing, or cannot be decompressed anywhere.
        InputError: The first or last line of a file is wrong, or a file is damaged.
    """
    vocabulary = {table.name: table.vocabulary_size for table in config.tables}
    sizes = {
        feature.ids: None if feature.hash else vocabulary[feature.table]
        for feature in config.features
    }
    files = [
        decompressed(path, options.cache_dir) if path.suffix == ".gz" else path
        for path in expand_paths(options.path, _SUFFIXES)
    ]
    source = CriteoSource(
        [TextLines(path) for path in files],
        label=config.train.label,
        categories=sorted(sizes),
    )
    return OpenedSource(
        name=str(options.path),
        records=source,
        finish=functools.partial(_finish, sizes=sizes, seed=options.hash_seed),
    )
