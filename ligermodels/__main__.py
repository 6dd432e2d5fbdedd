"""Run the command line, as `python -m ligermodels`."""

import sys

from ligermodels.cli import main

sys.exit(main())
