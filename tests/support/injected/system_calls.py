"""System calls that fail or are slow in real processes, by strace's injections."""


def strace(*injections: str) -> list[str]:
    """Return the start of a command with these injections; other system calls run without a stop."""
    calls = ",".join(dict.fromkeys(injection.partition(":")[0] for injection in injections))
    options = ["-f", "--seccomp-bpf", "-qqq", "-o", "/dev/null", "-e", f"trace={calls}"]
    return ["strace", *options, *(part for one in injections for part in ("-e", f"inject={one}"))]
