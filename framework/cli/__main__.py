"""`python -m workerkit.framework.cli`: the `workerkit` command where no script was installed."""

import sys

from workerkit.framework.cli.main import main

sys.exit(main())
