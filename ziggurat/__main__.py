"""`python -m ziggurat`, for torchrun and machines where scripts are not on the path."""

import sys

from ziggurat.cli.main import main

sys.exit(main())
