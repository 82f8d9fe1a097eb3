"""One feature of one batch, in any accepted form, to flat checked ids and weights.

The forms, for ids and for weights alike:

- an integer array ``[B, k]`` or ``[B]`` of any dtype, memory order and stride, from
  numpy or from anything that numpy can read (jax, torch, tf.Tensor, pandas);
- rows: a list, or an object array, of lists, tuples or 1-D arrays; or of single ids,
  which is one id a sample. ``None`` in the place of a row is an empty row;
- CSR: ``{"values": v, "row_splits": s}`` or ``{"values": v, "row_lengths": n}``, or an
  object with ``values`` and ``row_splits`` such as a tf.RaggedTensor;
- COO: ``{"indices": i, "values": v, "dense_shape": d}`` or an object with those three,
  such as a tf.SparseTensor. Entries are put in row-major order first;
- a pyarrow array or column, of lists or of single ids. A null row is an empty row.

Tuples are told apart by their first member. One that starts with an array is
compressed: two members are CSR, three are COO. Any other is a tuple of rows and may
hold no array, so that nobody takes the one for the other; rows that are arrays go in a
list. In ``(values, x)``, x is row_splits where it has B + 1 entries or more. With fewer
it is whichever of row_lengths and row_splits is valid. Both are where every row but the
last is empty; the number of samples of the other features then decides, or of the other
arrays of the batch where all features leave it open; else it is an error. A dict, and
an object with attributes, is never in doubt.

Weights come in the same forms, not necessarily in that of their ids, with one weight
for each id. Beside CSR or COO ids, a plain array of n weights belongs to the n values,
in the order in which these came.
Weights of ids that are left out, such as padding, are not looked at. ``None`` in the
place of weights is weight 1 everywhere.
"""

from grain_sparsecore.features.counters import COUNTERS, CounterTotals
from grain_sparsecore.features.paths import feature_keys, pad_leaves, split_element
from grain_sparsecore.features.read import FeatureIds, read_features

__all__ = [
    "COUNTERS",
    "CounterTotals",
    "FeatureIds",
    "feature_keys",
    "pad_leaves",
    "read_features",
    "split_element",
]
