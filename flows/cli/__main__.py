"""`python -m flows.cli …` is the `roster` command, for children that have no PATH to find it on."""

from flows.cli.app import main

if __name__ == "__main__":
    main()
