"""What the sections of a configuration must agree on, as pairs of path and text."""

from collections.abc import Iterable, Iterator
from typing import Any

from grain_sparsecore.config.checks import nearest
from grain_sparsecore.config.sections import TrainConfig
from grain_sparsecore.config.source import (
    CriteoOptions,
    PythonOptions,
    SourceConfig,
    SyntheticOptions,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec

# Keys of the 26 category columns of the Criteo format.
CRITEO_CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

# Key of the dense values of the sources that have them by themselves.
DENSE_KEY = "dense"


def name_errors(
    tables: list[tuple[str, Any]], features: list[tuple[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Names that collide or lead nowhere, as (path, text).

    Args:
        tables: Name and settings of each table, in the order of the file.
        features: Likewise; of the settings only ``table`` matters here.
    """
    for kind, entries in (("table", tables), ("feature", features)):
        if not entries:
            yield kind, f"there is no [[{kind}]]; declare at least one."
        yield from _duplicates(kind, entries)
    names = {name for name, _ in tables}
    read = {
        settings["table"]
        for _, settings in features
        if isinstance(settings.get("table"), str)
    }
    for i, (name, settings) in enumerate(features):
        table = settings.get("table")
        if isinstance(table, str) and table not in names:
            yield (
                f"feature[{i}].table",
                f"feature {name!r}: there is no table {table!r}; "
                f"{nearest(table, names)}",
            )
    for i, (name, _) in enumerate(tables):
        if features and name not in read:
            read.add(name)  # once, also where two tables have the name
            yield (
                f"table[{i}].name",
                f"table {name!r} is read by no feature; add a feature for it or "
                "remove the table.",
            )


def _duplicates(kind: str, entries: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    seen: dict[str, int] = {}
    for i, (name, settings) in enumerate(entries):
        first = seen.setdefault(name, i)
        if first == i:
            continue
        other = entries[first][1]
        keys = [key for key in {**other, **settings} if key != "name"]
        different = "; ".join(
            f"{key} {other.get(key)!r} and {settings.get(key)!r}"
            for key in keys
            if other.get(key) != settings.get(key)
        )
        yield (
            f"{kind}[{i}].name",
            f"{name!r} is also the name of {kind}[{first}] "
            f"({different or 'with equal settings'}); give every {kind} a name of its "
            "own.",
        )


def source_errors(
    source: SourceConfig | None,
    features: Iterable[FeatureSpec],
    tables: Iterable[TableSpec],
) -> Iterator[tuple[str, str]]:
    """What the source cannot give to the features, as (path, text)."""
    options = None if source is None else source.options
    if isinstance(options, SyntheticOptions):
        names = {feature.name for feature in features}
        for name in options.ids_per_sample:
            if name not in names:
                yield (
                    f"source.ids_per_sample.{name}",
                    f"there is no feature {name!r}; {nearest(name, names)}",
                )
    if isinstance(options, CriteoOptions):
        sizes = {table.name: table.vocabulary_size for table in tables}
        hashed_onto: dict[str, FeatureSpec] = {}
        for i, feature in enumerate(features):
            if feature.ids not in CRITEO_CATEGORIES:
                yield (
                    f"feature[{i}].ids",
                    f"feature {feature.name!r}: the categories of criteo_tsv are C1 "
                    f"to C26, not {feature.ids!r}.",
                )
            if feature.weights is not None:
                yield (
                    f"feature[{i}].weights",
                    f"feature {feature.name!r}: criteo_tsv has no weights; remove "
                    "the key.",
                )
            first = hashed_onto.setdefault(feature.ids, feature)
            if (
                sizes.get(first.table) != sizes.get(feature.table)
                or first.hash != feature.hash
            ):
                yield (
                    f"feature[{i}].ids",
                    f"features {first.name!r} and {feature.name!r} both read "
                    f"{feature.ids!r}, but hash it differently; set hash = true on "
                    "both.",
                )


def key_errors(
    source: SourceConfig | None,
    features: Iterable[FeatureSpec],
    train: TrainConfig,
    buffers_key: str,
) -> Iterator[tuple[str, str]]:
    """Keys of a batch that mean two things."""
    roles: dict[str, list[str]] = {train.label: ["the label"]}
    for feature in features:
        for key, role in ((feature.ids, "ids"), (feature.weights, "weights")):
            if key is not None and role not in roles.setdefault(key, []):
                roles[key].append(role)
    options = None if source is None else source.options
    if isinstance(options, CriteoOptions) or (
        isinstance(options, SyntheticOptions) and options.dense
    ):
        roles.setdefault(DENSE_KEY, []).append("the dense values")
    if buffers_key in {*roles, *train.dense}:
        yield (
            "pipeline.key",
            f"{buffers_key!r} is also the key of an input; give the buffers a key of "
            "their own.",
        )
    if isinstance(options, CriteoOptions | SyntheticOptions):
        for key, several in roles.items():
            if len(several) > 1:
                yield (
                    "source",
                    f"{key!r} would be the key of {' and of '.join(several)}; give "
                    "each a key of its own.",
                )
    if source is not None and not isinstance(options, PythonOptions):
        for key in roles:
            for other in roles:
                if other.startswith(f"{key}/"):
                    yield (
                        "source",
                        f"{key!r} cannot hold both a value and {other!r}; give one of "
                        "them another key.",
                    )
