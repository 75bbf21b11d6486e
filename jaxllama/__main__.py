"""``python -m jaxllama`` is the ``jaxllama`` command."""

import sys

from jaxllama.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
