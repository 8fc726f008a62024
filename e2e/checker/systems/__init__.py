"""A real Orca on one machine: how the checker starts it, looks into it and ends it."""
