"""jax-tpu-embedding's preprocessing of a bench case, called as directly as it goes."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from grain_sparsecore.bench_cases import BenchCase
from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.limits import Limits

PEER = "jax-tpu-embedding"


def make_peer(case: BenchCase, *, limits: Limits | None) -> Callable[[], Any]:
    """A function that preprocesses the batch, once a call.

    Its arguments are made here, beforehand: rows of ragged features as it wants them,
    and specs with limits that fit.

    Args:
        case: The batch.
        limits: What its buffers are made for. None: the defaults of the peer.

    Raises:
        MissingExtraError: jax-tpu-embedding is not installed.
    """
    try:
        import jax
        from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec
    except ImportError as error:
        raise MissingExtraError(
            f"comparing with {PEER} needs it, and it cannot be imported ({error}); "
            "pip install 'grain_sparsecore[sparsecore]', or measure without --against."
        ) from error
    # An extension module without types.
    peer: Any = importlib.import_module(
        "jax_tpu_embedding.sparsecore.lib.core.pybind_input_preprocessing"
    )
    layout = case.layout
    topology = layout.topology
    global_batch = layout.batch_size * topology.num_hosts
    optimizer = embedding_spec.SGDOptimizerSpec()
    specs, ids, weights = [], [], []
    for feature in layout.features:
        table = embedding_spec.TableSpec(
            name=feature.table.name,
            vocabulary_size=feature.table.vocabulary_size,
            embedding_dim=feature.table.embedding_dim,
            initializer=jax.nn.initializers.zeros,
            optimizer=optimizer,
            combiner=feature.table.combiner,
        )
        if limits is not None:
            agreed = limits[layout.stack_of_feature[feature.name].name]
            table.max_ids_per_partition = agreed.max_ids_per_partition
            table.max_unique_ids_per_partition = agreed.max_unique_ids_per_partition
            table.suggested_coo_buffer_size_per_device = agreed.buffer_size_per_device
        values = case.element[feature.spec.ids]
        dense = isinstance(values, np.ndarray)
        specs.append(
            embedding_spec.FeatureSpec(
                name=feature.name,
                table_spec=table,
                input_shape=[global_batch, *(values.shape[1:] if dense else ())],
                output_shape=[global_batch, feature.table.embedding_dim],
            )
        )
        ids.append(values if dense else _rows(values))
        if feature.spec.weights is not None:
            given = case.element[feature.spec.weights]
            weights.append(given if dense else _rows(given))
    embedding.prepare_feature_specs_for_training(
        specs, topology.global_device_count, topology.num_sc_per_device
    )

    def preprocess() -> Any:
        return peer.preprocess_sparse_dense_matmul_input(
            ids,
            weights or None,
            specs,
            topology.local_device_count,
            topology.global_device_count,
            num_sc_per_device=topology.num_sc_per_device,
            sharding_strategy=peer.ShardingStrategy.MOD,
            has_leading_dimension=True,
            allow_id_dropping=False,
            batch_number=0,
            enable_minibatching=False,
            all_reduce_interface=None,
        )

    return preprocess


def _rows(ragged: dict[str, np.ndarray]) -> np.ndarray:
    """CSR as an object array of rows, each with memory of its own."""
    values, splits = ragged["values"], ragged["row_splits"].tolist()
    rows = np.empty(len(splits) - 1, object)
    for i in range(rows.size):
        rows[i] = values[splits[i] : splits[i + 1]].copy()
    return rows
