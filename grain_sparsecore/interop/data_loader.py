"""A ``grain.DataLoader`` as a Grain dataset, so that stages can follow its workers."""

import json
from typing import Any

import grain

from grain_sparsecore.errors import CheckpointError, ConfigError


def from_data_loader(loader: grain.DataLoader) -> grain.IterDataset[Any]:
    """A Grain dataset of the elements of a ``grain.DataLoader``.

    A DataLoader has no place for a stage after its workers, where limits must be
    agreed. Put `ComputeInputStats` among its operations to run it in the workers, or
    leave it to ``sparsecore_pipeline``, which runs it here.

    Args:
        loader: A DataLoader; each ``iter()`` of the dataset starts one of its own.

    Returns:
        A dataset whose iterator's state is that of the DataLoader, so that restoring
        skips nothing and reads nothing twice.

    Raises:
        ConfigError: ``loader`` is no ``grain.DataLoader``.
    """
    if not isinstance(loader, grain.DataLoader):
        raise ConfigError(
            f"from_data_loader: {type(loader).__name__} is not a grain.DataLoader; "
            "use from_iterable for other iterables."
        )
    return DataLoaderIterDataset(loader)


class DataLoaderIterDataset(grain.IterDataset[Any]):
    """What `from_data_loader` returns."""

    def __init__(self, loader: grain.DataLoader) -> None:
        super().__init__()
        self._loader = loader

    def __iter__(self) -> "_DataLoaderIterator":
        return _DataLoaderIterator(self._loader)

    def __str__(self) -> str:
        return "FromDataLoader"


class _DataLoaderIterator(grain.DatasetIterator[Any]):
    """Gives a DataLoader's iterator the interface of a dataset's."""

    def __init__(self, loader: grain.DataLoader) -> None:
        super().__init__()
        self._iterator: Any = iter(loader)
        self._ended = False

    def _read_state(self) -> dict[str, Any]:
        return json.loads(self._iterator.get_state().decode())

    def __next__(self) -> Any:
        if self._iterator is None:
            raise ValueError("from_data_loader: next() after close().")
        if self._ended:
            raise StopIteration
        try:
            return next(self._iterator)
        except StopIteration:
            # Asking again would start the workers anew.
            self._ended = True
            raise

    def get_state(self) -> dict[str, Any]:
        if self._iterator is None:
            raise ValueError("from_data_loader: get_state() after close().")
        return {"data_loader": self._read_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or not isinstance(
            state.get("data_loader"), dict
        ):
            raise CheckpointError(
                f"from_data_loader: {state!r} is no state of it; it must be "
                "{'data_loader': <state of the DataLoader>}."
            )
        if self._iterator is None:
            raise ValueError("from_data_loader: set_state() after close().")
        try:
            self._iterator.set_state(json.dumps(state["data_loader"]).encode())
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                "from_data_loader: the state belongs to another DataLoader (its "
                f"source, sampler or number of workers differ): {error}"
            ) from error
        self._ended = False

    def start_prefetch(self) -> None:
        """Starts the workers before the first element is asked for."""
        # Grain before 0.2.17 starts them with the first element.
        start = getattr(self._iterator, "start_prefetch", None)
        if start is not None:
            start()

    def close(self) -> None:
        """Drops the DataLoader's iterator, which ends its workers."""
        self._iterator = None

    def __str__(self) -> str:
        return "FromDataLoader"
