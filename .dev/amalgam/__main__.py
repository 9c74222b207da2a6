"""Starts the command: `amalgam`, or `python -m amalgam` for the environment of that Python."""

INTERRUPTED = 130


def main() -> None:
    """Runs the command; Ctrl-C prints no traceback, neither while modules load nor while the process exits."""
    try:
        import signal

        from amalgam.cli import main as run

        try:
            run()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
