"""`python -m elastic_mbs`."""

import sys

from elastic_mbs.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
