"""Ways in and out: jax-tpu-embedding, keras-rs, DataLoader, tf.data, plain iterables.

Nothing here imports another framework before it is needed, and reading its objects
needs only their attributes.
"""

from grain_sparsecore.interop.data_loader import from_data_loader as from_data_loader
from grain_sparsecore.interop.iterables import from_iterable as from_iterable
from grain_sparsecore.interop.jax_tpu_embedding import (
    layout_from_feature_specs as layout_from_feature_specs,
)
from grain_sparsecore.interop.jax_tpu_embedding import (
    to_jax_tpu_embedding as to_jax_tpu_embedding,
)
from grain_sparsecore.interop.jax_tpu_embedding import (
    update_feature_specs as update_feature_specs,
)
from grain_sparsecore.interop.keras_rs import (
    layout_from_feature_configs as layout_from_feature_configs,
)
from grain_sparsecore.interop.keras_rs import to_keras_rs as to_keras_rs
