"""``python -m jaxllama`` is the ``jaxllama`` command."""

from jaxllama.cli import run

if __name__ == "__main__":
    run()
