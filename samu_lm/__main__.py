"""`python -m samu_lm COMMAND`: the same as `samu-lm COMMAND`."""

import sys

from samu_lm.cli import main

sys.exit(main())
