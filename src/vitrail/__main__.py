"""`python -m vitrail`, the same as the command `vitrail`."""

from vitrail.cli import main

if __name__ == "__main__":
    main()
