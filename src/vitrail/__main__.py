"""`python -m vitrail`, the same as the command `vitrail`."""

from vitrail.cli import main

main()
