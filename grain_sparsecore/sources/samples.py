"""Samples are dicts; a key such as ``user/history`` leads into nested ones."""

from collections.abc import Mapping
from typing import Any

from grain_sparsecore.config import Config
from grain_sparsecore.features.paths import SEPARATOR


def put(sample: dict[str, Any], path: str, value: Any) -> None:
    """Stores ``value`` under a path, making the dicts on the way."""
    *parents, last = path.split(SEPARATOR)
    for name in parents:
        sample = sample.setdefault(name, {})
    sample[last] = value


def get(sample: Mapping[str, Any], path: str) -> Any:
    """The value under a path; KeyError where there is none."""
    value: Any = sample
    for name in path.split(SEPARATOR):
        value = value[name]
    return value


def keys_of_features(config: Config) -> dict[str, str]:
    """Key of all ids and weights, and which setting asks for it."""
    keys: dict[str, str] = {}
    for feature in config.features:
        keys.setdefault(feature.ids, f"ids of feature {feature.name!r}")
        if feature.weights is not None:
            keys.setdefault(feature.weights, f"weights of feature {feature.name!r}")
    return keys


def keys_of_training(config: Config) -> dict[str, str]:
    """Key of the label and of dense features, and which setting asks for it."""
    return {
        config.train.label: "train.label",
        **dict.fromkeys(config.train.dense, "train.dense"),
    }
