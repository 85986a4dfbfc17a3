"""`python -m dcpcomm` is `dcpcomm`."""

from dcpcomm.cli import main

if __name__ == "__main__":
    main()
