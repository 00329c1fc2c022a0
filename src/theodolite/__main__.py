"""`python -m theodolite`: the command line."""

from theodolite.cli import main

main()
