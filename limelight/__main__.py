"""`python -m limelight` is `limelight`."""

import sys

from limelight.cli import main

if __name__ == "__main__":
    sys.exit(main())
