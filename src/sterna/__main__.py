"""`python -m sterna` is `sterna`."""

from sterna.cli.main import main

if __name__ == "__main__":
    main()
