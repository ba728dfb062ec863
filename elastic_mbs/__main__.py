"""`python -m elastic_mbs`."""

import sys

from elastic_mbs.cli import main

if __name__ == "__main__":
    sys.exit(main())
