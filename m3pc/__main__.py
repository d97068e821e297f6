"""`python -m m3pc`: the command where no script is installed."""

from m3pc.cli import main

if __name__ == "__main__":
    main()
