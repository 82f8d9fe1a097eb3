"""Minibatching: batches above the limits, split by a hash of their ids.

Ids fall into 64 buckets, and neighbouring buckets are merged into as few minibatches
as fit the limits, the same on all hosts. The chip works through them one by one, so no
id is lost where a batch is larger than the chip.
"""

from grain_sparsecore.minibatch.buckets import BUCKETS as BUCKETS
from grain_sparsecore.minibatch.buckets import LEFT_OUT as LEFT_OUT
from grain_sparsecore.minibatch.buckets import Bucketed as Bucketed
from grain_sparsecore.minibatch.buckets import bucketed as bucketed
from grain_sparsecore.minibatch.buckets import slot_buckets as slot_buckets
from grain_sparsecore.minibatch.layout import repartition_split as repartition_split
from grain_sparsecore.minibatch.layout import split_needs as split_needs
from grain_sparsecore.minibatch.overfull import leave_out as leave_out
from grain_sparsecore.minibatch.overfull import (
    main_contributor_of_bucket as main_contributor_of_bucket,
)
from grain_sparsecore.minibatch.splits import SPLIT_BITS as SPLIT_BITS
from grain_sparsecore.minibatch.splits import Split as Split
from grain_sparsecore.minibatch.splits import minibatch_count as minibatch_count
from grain_sparsecore.minibatch.splits import minibatch_of_bucket as minibatch_of_bucket
from grain_sparsecore.minibatch.splits import needed_bits as needed_bits
from grain_sparsecore.minibatch.splits import split_bits as split_bits
from grain_sparsecore.minibatch.together import split_together as split_together
