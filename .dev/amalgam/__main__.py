"""`python -m amalgam` is `amalgam`: where several environments are at hand, it names the one."""

from amalgam.cli import main

main()
