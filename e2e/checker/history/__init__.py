"""What happened in a run: plain records, the calls that they tell of, and what the system's own logs add."""
