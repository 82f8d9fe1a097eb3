"""``python -m grain_sparsecore``."""

import sys

from grain_sparsecore.cli import main

# Grain's worker processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
