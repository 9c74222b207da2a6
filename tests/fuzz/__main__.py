"""`python -m amalgam.tests.fuzz`, which `make fuzz` runs."""

import sys

from amalgam.tests.fuzz.command import main

sys.exit(main())
