"""The expected answer of each call, computed without the system or taken from an undisturbed one."""
