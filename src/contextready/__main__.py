"""`python -m contextready`, which is how `torchrun -m contextready` starts the command."""

import sys

from contextready.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
