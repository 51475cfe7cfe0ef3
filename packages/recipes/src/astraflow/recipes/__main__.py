"""`python -m astraflow.recipes` is the `recipes` command."""

from .cli import main

if __name__ == "__main__":
    main()
