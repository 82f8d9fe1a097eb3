"""The named sources of a configuration, as Grain data sets."""

from grain_sparsecore.sources.make import make_batches as make_batches
from grain_sparsecore.sources.make import make_source as make_source
