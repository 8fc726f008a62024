"""The history of a run: plain records, the calls that they describe, and records from the system's own logs."""
