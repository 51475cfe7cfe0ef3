"""`python -m astraflow.weightsync` is the `weightsync` command."""

from .cli import main

if __name__ == "__main__":
    main()
