"""python -m pcourse: see `pcourse.cli`."""

import sys

from pcourse.cli import main

if __name__ == "__main__":
    sys.exit(main())
