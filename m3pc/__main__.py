"""`python -m m3pc`: the m3pc command, where its script is not installed."""

from m3pc.cli import main

if __name__ == "__main__":
    main()
