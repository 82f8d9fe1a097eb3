"""The round in which hosts tell each other where a batch is above a cap."""

import numpy as np

from grain_sparsecore.coordination.frames import Exchange, Tag, exchange
from grain_sparsecore.coordination.protocol import Host
from grain_sparsecore.overflow import Excess, excess_message
from grain_sparsecore.pipeline.coordinate_options import CoordinateOptions

# Of each host: its need, the position of the batch, the feature, its share.
_WORDS_PER_HOST = 4

# Shares travel as int32.
_SHARE_UNIT = 1_000_000


def explain_excess(
    excess: Excess,
    worst: tuple[int, int, int, float] | None,
    *,
    tag: Tag,
    host: Host,
    options: CoordinateOptions,
) -> Exchange[str]:
    """The message of the error that all hosts raise, naming host, step and feature.

    Args:
        excess: What is exceeded, equal on all hosts.
        worst: Where this host needs most of it, as `Window.worst` says.
        tag: Of the round.
        host: This host.
        options: Of the pipeline.
    """
    words = np.zeros((host.count, _WORDS_PER_HOST), np.int32)
    if worst is not None:
        position, needed, feature, share = worst
        words[host.index] = needed, position, feature, round(share * _SHARE_UNIT)
    agreed = yield from exchange(tag, words.ravel())
    agreed = agreed.reshape(host.count, _WORDS_PER_HOST)
    owner = int(agreed[:, 0].argmax())
    _, position, feature, share = (int(word) for word in agreed[owner])
    return excess_message(
        excess,
        layout=options.layout,
        host=owner,
        step=tag.start + position,
        feature=feature,
        share=share / _SHARE_UNIT,
        frozen=options.overflow.frozen,
        minibatching=options.overflow.minibatching,
        origin=options.overflow.cap_origin(
            options.layout.stacks[excess.stack].name, excess.column
        ),
    )
