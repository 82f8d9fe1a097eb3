"""Training loops that the tests run, each with ``python -m tests.examples.NAME``."""
