"""`python -m ligermodels` is the command line."""

import sys

from ligermodels.cli import main

sys.exit(main())
