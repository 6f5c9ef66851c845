"""`python -m stretto`, and what torchrun starts: `torchrun --nproc-per-node 2 -m stretto train JOB`."""

import sys

from stretto.cli import main

sys.exit(main())
