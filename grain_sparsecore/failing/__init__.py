"""Batches that could not be prepared, kept in a file and prepared again elsewhere."""

from grain_sparsecore.failing.batch import FailingBatch as FailingBatch
from grain_sparsecore.failing.keep import keep_failing as keep_failing
from grain_sparsecore.failing.keep import kept_notes as kept_notes
